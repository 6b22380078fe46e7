"""The trainer's side: at once, without MLflow in its process, and forgiving."""

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlcore.config import RunConfig, TrackingConfig
from rlcore.tracking.attempts import ATTEMPTS_FILE, FinalStatus, read_attempts
from rlcore.tracking.catalog import describe
from rlcore.tracking.companion import Companion
from rlcore.tracking.connection import mlflow_name
from rlcore.tracking.delivery import STATE_FILE, read_state
from rlcore.tracking.journal import RunJournal, load_journal, read_journal
from rlcore.tracking.lineage import SystemSampler
from tests.test_imports import loaded_by
from tests.tracking.conftest import wait_until
from tests.tracking.reading import client_of, main_run, points, shown


@pytest.fixture
def offline(config: RunConfig) -> RunConfig:
    return RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"enabled": False}))


def test_from_the_first_step_to_the_end_without_mlflow_in_the_trainers_process(root: Path, run_dir: Path):
    code = (
        "from pathlib import Path; from rlcore.config import RunConfig\n"
        "from rlcore.tracking.journal import RunJournal\n"
        f"config = RunConfig(paths={{'root': {str(root)!r}}})\n"
        f"t = RunJournal(Path({str(run_dir)!r}), config, tags={{'stage': 'train'}})\n"
        "t.resume_at(0, 0); [t.append_step(step, {'a': step / 7}) for step in range(1, 21)]; "
        "assert t.sync(); assert t.finish('FINISHED', timeout_s=240)"
    )
    assert "mlflow" not in loaded_by(code)
    client = client_of(root)
    run = main_run(client)
    assert (run.info.status, run.data.tags["stage"]) == ("FINISHED", "train")
    assert points(client, run, "a") == [(step, step / 7) for step in range(1, 21)]


def test_without_mlflow_the_journal_is_all_there_is(offline: RunConfig, run_dir: Path, root: Path):
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.resume_at(0, 0)
    tracker.append_step(1, {"a": 1.0})
    assert not tracker.finish("FINISHED")
    assert [record.metrics for record in read_journal(run_dir / "metrics.jsonl")] == [{"a": 1.0}]
    assert not (run_dir / "tracking.json").exists()


def test_attempts_of_two_processes(offline: RunConfig, run_dir: Path):
    first = RunJournal(run_dir, offline, tags={"stage": "train"})
    first.resume_at(0, 0)
    first.append_step(1, {"a": 1.0})
    saved = first.sync()
    first.append_step(2, {"a": 2.0})
    second = RunJournal(run_dir, offline, tags={})
    second.resume_at(1, saved)
    second.append_step(2, {"a": 2.5})
    second.finish("KILLED")
    (begun, lost), (again, end) = read_attempts(run_dir)
    assert lost is None
    assert end is not None
    assert (begun.from_step, begun.journal_bytes, begun.destination.tags["stage"]) == (0, 0, "train")
    assert (again.from_step, again.journal_bytes, end.status) == (1, saved, "KILLED")
    assert [time for time in (begun.time, end.time)] == [round(time, 3) for time in (begun.time, end.time)]
    assert [record.metrics["a"] for record in read_journal(run_dir / "metrics.jsonl")] == [1.0, 2.5]


def test_going_back_within_one_process_is_a_new_attempt_if_something_is_cut(offline: RunConfig, run_dir: Path):
    """A worker is lost in the middle of a chunk, the trainer's process lives on."""
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.resume_at(0, 0)
    tracker.append_step(1, {"a": 1.0})
    saved = tracker.sync()
    tracker.resume_at(1, saved)
    assert len(read_attempts(run_dir)) == 1
    tracker.append_step(2, {"a": 2.0})
    tracker.resume_at(1, saved)
    tracker.append_step(2, {"a": 2.5})
    assert [attempt.from_step for attempt, _ in read_attempts(run_dir)] == [0, 1]
    assert [record.metrics["a"] for record in read_journal(run_dir / "metrics.jsonl")] == [1.0, 2.5]


def test_the_process_beside_a_trainer_that_goes_back_sends_the_repeated_steps(
    config: RunConfig, root: Path, run_dir: Path
):
    tracker = RunJournal(run_dir, config, tags={})
    tracker.resume_at(0, 0)
    tracker.append_step(1, {"a": 1.0})
    saved = tracker.sync()
    tracker.append_step(2, {"a": 2.0})
    wait_until(lambda: read_state(run_dir).journal_bytes > saved)
    tracker.resume_at(1, saved)
    tracker.append_step(2, {"a": 2.5})
    tracker.append_step(3, {"a": 3.5})
    assert tracker.finish("FINISHED", timeout_s=90.0)
    client = client_of(root)
    assert points(client, main_run(client), "a") == [(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.5)]
    assert shown(client, main_run(client), "a") == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_a_journal_shorter_than_the_checkpoint_says_goes_on(offline: RunConfig, run_dir: Path, caplog):
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.resume_at(20, 5_000)
    tracker.append_step(21, {"a": 1.0})
    contents = load_journal(run_dir / "metrics.jsonl")
    assert "asked to go back to byte 5000" in caplog.text
    assert [record.step for record in contents.steps] == [21]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (None, "KILLED", ["KILLED"]),
        (None, "FINISHED", ["FINISHED"]),
        ("KILLED", "FINISHED", ["KILLED", "FINISHED"]),
        ("FINISHED", "FAILED", ["FINISHED"]),
        ("FINISHED", "KILLED", ["FINISHED"]),
        ("FAILED", "KILLED", ["FAILED"]),
    ],
)
def test_a_process_that_did_nothing_can_finish_a_run_and_changes_no_other_end(
    offline: RunConfig, run_dir: Path, first: FinalStatus | None, second: FinalStatus, found: list[FinalStatus]
):
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.append_step(1, {"a": 1.0})
    if first is not None:
        tracker.finish(first)
    RunJournal(run_dir, offline, tags={}).finish(second)
    ends = [json.loads(line).get("status") for line in (run_dir / ATTEMPTS_FILE).read_text().splitlines()]
    assert ends == [None, *found]


@pytest.mark.parametrize("call", ["append_step", "append_event"])
def test_the_first_line_of_a_trainer_begins_its_attempt(offline: RunConfig, run_dir: Path, call: str):
    tracker = RunJournal(run_dir, offline, tags={})
    for _ in range(2):
        if call == "append_step":
            tracker.append_step(3, {"a": 1.0})
        else:
            tracker.append_event("resume", 3, {})
    ((begun, end),) = read_attempts(run_dir)
    assert (begun.from_step, begun.journal_bytes, end) == (3, 0, None)


def test_a_trainer_that_has_finished_holds_no_file_open(offline: RunConfig, run_dir: Path):
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.append_step(1, {"a": 1.0})
    names = {Path(file.path).name for file in psutil.Process().open_files() if Path(file.path).parent == run_dir}
    assert names == {"metrics.jsonl", "attempts.jsonl"}
    tracker.finish("FINISHED")
    assert not [file for file in psutil.Process().open_files() if Path(file.path).parent == run_dir]


def test_a_run_that_never_began_is_not_made(config: RunConfig, run_dir: Path):
    assert RunJournal(run_dir, config, tags={}).finish("KILLED")
    assert read_attempts(run_dir) == []
    assert not (run_dir / "tracking.json").exists()


def test_what_ends_the_delivery_is_told(config: RunConfig, run_dir: Path, caplog: pytest.LogCaptureFixture):
    tracker = RunJournal(run_dir, config, tags={})
    (run_dir / STATE_FILE).write_text("{")
    tracker.append_step(1, {"a": 1.0})
    assert not tracker.finish("FINISHED")
    wait_until(lambda: any("tracking.json: cannot be read" in line for line in caplog.messages))


def test_a_companion_that_cannot_be_started_is_told_and_forgiven(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "executable", str(run_dir / "no-python"))
    companion = Companion(run_dir, TrackingConfig())
    for _ in range(10):
        companion.ensure_running()
    assert not companion.finish(1.0)
    assert caplog.text.count("cannot be started") == 3


def test_the_delivery_takes_no_module_from_the_working_directory(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "argparse.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    companion = Companion(run_dir, TrackingConfig())
    companion.ensure_running()
    companion.finish(60.0)
    assert not (tmp_path / "imported").exists()


def test_the_first_sample_has_the_processor_time_since_the_sampler_was_made(tmp_path: Path):
    sampler = SystemSampler(tmp_path)
    before = time.process_time()
    while time.process_time() - before < 0.03:  # a tick of the kernel's clock is 0.01 s
        pass
    assert sampler.sample()["system/process_cpu_percent"] > 0


def test_what_each_gpu_tells_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NVML as it answers for two GPUs, of which the first keeps its power to itself: this machine has none."""

    class NVMLError(Exception):
        pass

    def power(gpu: int) -> int:
        if gpu == 0:
            raise NVMLError("Not Supported")
        return 312_500  # milliwatts

    answers: dict[str, object] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=(gpu + 1) * 1_500_000_000),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=40 + gpu),
        "nvmlDeviceGetPowerUsage": power,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **answers))  # type: ignore[arg-type]
    sample = SystemSampler(tmp_path).sample()
    assert {name: value for name, value in sample.items() if name.startswith("system/gpu_")} == {
        "system/gpu_0_memory_used_gb": 1.5,
        "system/gpu_0_utilization_percent": 40,
        "system/gpu_1_memory_used_gb": 3.0,
        "system/gpu_1_utilization_percent": 41,
        "system/gpu_1_power_watts": 312.5,
    }


def test_the_machine_is_sampled_under_documented_names(tmp_path: Path):
    sample = SystemSampler(tmp_path).sample()
    assert {"system/cpu_percent", "system/memory_used_gb", "system/disk_free_gb"} <= sample.keys()
    assert all(math.isfinite(value) and value >= 0 for value in sample.values())
    assert sample["system/process_memory_gb"] < sample["system/memory_used_gb"]
    memory = psutil.virtual_memory()
    assert sample["system/memory_used_gb"] == pytest.approx(memory.used / 1e9, rel=0.5)
    assert sample["system/memory_percent"] == pytest.approx(memory.percent, rel=0.5)
    assert sample["system/disk_free_gb"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / 1e9, rel=0.1)
    for name in sample:
        assert describe(name) is not None
        assert mlflow_name(name) == name
