"""The journal, written and read, the GPU-seconds in it, and the trainer's attempts."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from rlcore.config import RunConfig
from rlcore.tracking.attempts import ATTEMPTS_FILE, FinalStatus, read_attempts
from rlcore.tracking.delivery import ensure_mlflow_run, read_state
from rlcore.tracking.journal import (
    GPU_SECONDS,
    CostMeter,
    GpuUse,
    Journal,
    RunJournal,
    gpu_seconds,
    load_journal,
    missing_steps,
    read_journal,
)
from tests.helpers.forked import loaded_by
from tests.helpers.mlflow import main_run, main_runs, points, values_by_step, wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_import_loads_neither_mlflow_nor_torch():
    assert not {"mlflow", "torch", "pandas"} & loaded_by(
        "import rlcore.tracking.attempts, rlcore.tracking.mlflow_store, rlcore.tracking.delivery"
    )


def test_event_data_is_converted_to_json(path: Path):
    data = {"loss": math.nan, "limit": 1.5, "each": [1, math.inf, (True, None)], "by rank": {3: Path("größer")}}
    with Journal(path) as journal:
        journal.append_event("alarm", 1, data)
    (event,) = load_journal(path).events
    assert event.data == {"loss": "nan", "limit": 1.5, "each": [1, "inf", [True, None]], "by rank": {"3": "größer"}}


def test_empty_journal_is_complete(path: Path, caplog: pytest.LogCaptureFixture):
    with Journal(path) as journal:
        journal.close()
    contents = load_journal(path)
    assert (contents.steps, contents.events, contents.torn_bytes, contents.num_damaged_lines) == ((), (), 0, 0)
    assert (read_journal(path), caplog.messages) == ([], [])
    assert path.stat().st_mode & 0o133 == 0, "only its owner writes it, and it is not executable"


@pytest.mark.parametrize(
    ("steps", "spans"),
    [
        (range(1, 11), ""),
        ((1, 2, 4, 5, 6, 7, 8, 9, 10), "step 3"),
        ((2, 3, 7, 8, 10), "steps 1, 4-6, 9"),
        ((1, 2, 3, 11), "steps 4-10"),
        ((), "steps 1-10"),
    ],
)
def test_missing_steps_are_reported_as_spans(path: Path, steps: Sequence[int], spans: str):
    with Journal(path) as journal:
        for step in steps:
            journal.append_step(step, {"a": 1.0})
    assert missing_steps(load_journal(path), 10) == spans


def test_lines_of_one_step_are_merged_and_nonfinite_values_named(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0, "b": math.nan, "d": -math.inf})
        journal.append_step(2, {"a": 2.0})
        journal.append_step(1, {"b": 5.0, "c": math.inf})
    line = json.loads(path.read_text().splitlines()[0], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (line["metrics"], line["nonfinite"]) == ({"a": 1.0, "b": None, "d": None}, ["b", "d"])
    first, second = read_journal(path)
    assert (first.step, first.metrics, first.nonfinite) == (1, {"a": 1.0, "b": 5.0}, ("d", "c"))
    assert (second.metrics, second.nonfinite) == ({"a": 2.0}, ())


def test_non_numbers_are_rejected(path: Path):
    with Journal(path) as journal, pytest.raises(TypeError):
        journal.append_step(1, {"a": None})  # type: ignore[dict-item]
    assert path.stat().st_size == 0


@pytest.mark.parametrize("cut", [1, 30])
def test_torn_last_line_is_skipped_and_reported(path: Path, caplog: pytest.LogCaptureFixture, cut: int):
    with Journal(path) as journal:
        for step in (1, 2):
            journal.append_step(step, {"a": 1.0})
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-cut])
    assert [record.step for record in read_journal(path)] == [1]
    torn = len(second) - cut
    assert load_journal(path).torn_bytes == torn
    assert caplog.messages == [f"{path}: skipped {torn} bytes of an unfinished last line and 0 unreadable lines"]


def test_damaged_lines_are_counted(path: Path):
    lines = [b'{"step":1,"time":1.0,"metrics":{"a":1.0}}', b"\0\0\0", b"[]", b'{"step":"x","time":1,"metrics":{}}']
    lines += [b'{"step":2,"time":1.0,"metrics":{"a":"text"}}', b'{"step":3,"time":2.0,"metrics":{"a":2.0}}', b""]
    path.write_bytes(b"\n".join(lines))
    contents = load_journal(path)
    assert [record.step for record in contents.steps] == [1, 3]
    assert contents.num_damaged_lines == 4


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.dictionaries(st.text(min_size=1), st.floats(allow_nan=True), max_size=4)),
        max_size=15,
    )
)
def test_any_names_and_values_round_trip(tmp_path_factory: pytest.TempPathFactory, lines):
    path = tmp_path_factory.mktemp("journal") / "metrics.jsonl"
    wanted: dict[int, dict[str, float]] = {}
    with Journal(path) as journal:
        for step, metrics in lines:
            journal.append_step(step, metrics)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            wanted.setdefault(step, {}).update(finite)
    assert {record.step: dict(record.metrics) for record in read_journal(path)} == wanted


def test_seconds_of_ranks_are_summed(path: Path):
    meter = CostMeter(path)
    assert meter.metrics([GpuUse(1, 10), GpuUse(1, 11)]) == {GPU_SECONDS: 21}
    assert meter.metrics([GpuUse(1, 20), GpuUse(1, 21)]) == {GPU_SECONDS: 41}
    # after a restart of the group, the seconds of its previous ranks count
    assert meter.metrics([GpuUse(2, 50), GpuUse(2, 50)]) == {GPU_SECONDS: 141}


def test_cpu_has_no_gpu_seconds(path: Path):
    assert CostMeter(path).metrics([]) == {}
    with Journal(path) as journal:
        journal.append_step(1, {"actor/lr": 0.1})
    assert gpu_seconds(path) is None


def test_resume_adds_attempts_without_double_counting(path: Path):
    """Each attempt resumes from the first step and repeats the second."""

    def attempt(checkpoint_bytes: int, *seconds: float) -> int:
        with Journal(path) as journal:
            journal.truncate(checkpoint_bytes)
            meter = CostMeter(path)
            for place, one in enumerate(seconds):
                journal.append_step(place + (checkpoint_bytes > 0), meter.metrics([GpuUse(1.0, one)]))
            return journal.size_bytes

    checkpoint = attempt(0, 10)
    attempt(checkpoint, 5, 8)
    assert gpu_seconds(path) == 18
    attempt(checkpoint, 2, 4)
    assert gpu_seconds(path) == 22
    attempt(checkpoint)
    assert gpu_seconds(path) == 22, "the removed lines count, also without a new line"
    assert len(list(path.parent.glob("metrics.abandoned-*.jsonl"))) == 2


def test_trainer_process_does_not_import_mlflow(root: Path, run_dir: Path, client: MlflowClient):
    code = (
        "from pathlib import Path; from rlcore.config import RunConfig\n"
        "from rlcore.tracking.journal import RunJournal\n"
        f"config = RunConfig(paths={{'root': {str(root)!r}}})\n"
        f"t = RunJournal(Path({str(run_dir)!r}), config, tags={{'stage': 'train'}})\n"
        "t.resume_at(0, 0); [t.append_step(step, {'a': step / 7}) for step in range(1, 21)]; "
        "assert t.sync(); assert t.finish('FINISHED', timeout_s=240)"
    )
    assert "mlflow" not in loaded_by(code)
    run = main_run(client)
    assert (run.info.status, run.data.tags["stage"]) == ("FINISHED", "train")
    assert points(client, run, "a") == [(step, step / 7) for step in range(1, 21)]


def values_of(run_dir: Path) -> list[float]:
    return [record.metrics["a"] for record in read_journal(run_dir / "metrics.jsonl")]


def test_disabled_tracking_writes_journal_only(tracker: RunJournal, run_dir: Path):
    assert not tracker.finish("FINISHED")
    assert values_of(run_dir) == [1.0]
    assert not (run_dir / "tracking.json").exists()
    assert not [file for file in psutil.Process().open_files() if Path(file.path).parent == run_dir]


def test_attempts_of_two_processes(tracker: RunJournal, offline: RunConfig, run_dir: Path):
    saved = tracker.sync()
    tracker.append_step(2, {"a": 2.0})
    second = RunJournal(run_dir, offline, tags={})
    second.resume_at(1, saved)
    second.append_step(2, {"a": 2.5})
    second.finish("KILLED")
    (started, lost), (again, end) = read_attempts(run_dir)
    assert lost is None
    assert (started.from_step, started.journal_bytes, started.destination.tags["stage"]) == (1, 0, "train")
    assert (again.from_step, again.journal_bytes, end.status) == (1, saved, "KILLED")
    assert [time for time in (started.time, end.time)] == [round(time, 3) for time in (started.time, end.time)]
    assert values_of(run_dir) == [1.0, 2.5]


def test_resume_starts_attempt_if_lines_are_removed(tracker: RunJournal, run_dir: Path):
    """A worker is lost in a chunk, and the trainer process continues."""
    saved = tracker.sync()
    tracker.resume_at(1, saved)
    assert len(read_attempts(run_dir)) == 1
    tracker.append_event("alarm", 2, {})
    tracker.resume_at(2, saved)
    tracker.append_step(2, {"a": 2.5})
    assert [attempt.from_step for attempt, _ in read_attempts(run_dir)] == [1, 2]
    assert values_of(run_dir) == [1.0, 2.5]


def test_repeated_steps_are_sent_again(config: RunConfig, run_dir: Path, client: MlflowClient):
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
    assert points(client, main_run(client), "a") == [(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.5)]
    assert values_by_step(client, main_run(client), "a") == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_journal_shorter_than_checkpoint_continues(offline: RunConfig, run_dir: Path, caplog):
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.resume_at(20, 5_000)
    tracker.append_step(21, {"a": 1.0})
    assert "cannot be cut to byte 5000" in caplog.text
    assert values_of(run_dir) == [1.0]


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
def test_idle_process_changes_end_only_to_finished(
    tracker: RunJournal,
    offline: RunConfig,
    run_dir: Path,
    first: FinalStatus | None,
    second: FinalStatus,
    found: list[FinalStatus],
):
    if first is not None:
        tracker.finish(first)
    RunJournal(run_dir, offline, tags={}).finish(second)
    ends = [json.loads(line).get("status") for line in (run_dir / ATTEMPTS_FILE).read_text().splitlines()]
    assert ends == [None, *found]


def test_run_without_attempt_is_not_created(config: RunConfig, run_dir: Path):
    assert RunJournal(run_dir, config, tags={}).finish("KILLED")
    assert read_attempts(run_dir) == []
    assert not (run_dir / "tracking.json").exists()


def test_flow_and_trainer_share_mlflow_run(config: RunConfig, run_dir: Path, client: MlflowClient, other: Path):
    first = ensure_mlflow_run(run_dir, config, {"stage": "train"}).id
    assert ensure_mlflow_run(run_dir, config, {}).id == first
    assert read_state(run_dir).mlflow_run_id == first
    assert len(main_runs(client)) == 1
    address = f"sqlite:///{other}/mlflow.db"
    moved = RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"uri": address}))
    second = ensure_mlflow_run(run_dir, moved, {}).id
    assert second != first, "another store has its own run"
    assert (read_state(run_dir).uri, read_state(run_dir).mlflow_run_id) == (address, second)
