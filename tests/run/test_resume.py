"""A run that is killed anywhere and started again ends with the numbers of one that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from rlcore.runtime.folder import ray_folder
from rlcore.tracking.journal import read_journal
from rlcore.trainer.metrics import repeatable
from tests.small_run import SmallRun, prepare

OVERRIDES = (
    "trainer.steps_per_chunk=2",
    "validation.every_steps=2",
    "tracking.enabled=false",
    "runtime.stop_deadline_s=200",  # a busy disk may take long to save
)
STEPS = 6
DEADLINE_S = 240


def write_settings(run: SmallRun) -> Path:
    layout = run.layout
    layout.run_dir.mkdir(parents=True, exist_ok=True)
    layout.settings_json.write_text(run.config.model_dump_json())
    run.inputs.write(layout)
    return layout.settings_json


def start(settings: Path, log: Path) -> subprocess.Popen[bytes]:
    """The trainer process in a session of its own, its output in a file."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rlcore.run.process", "--settings", str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(settings: Path, log: Path) -> None:
    process = start(settings, log)
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and everything that it started."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)
    process.wait(timeout=30)


def steps_of(run: SmallRun) -> dict[int, dict[str, float]]:
    """The journal's metrics by step, without those of the machine; each step stands there once."""
    records = read_journal(run.layout.journal)
    assert [record.step for record in records] == list(range(len(records)))
    return {record.step: repeatable(dict(record.metrics)) for record in records}


def weights_of(run: SmallRun) -> dict[str, bytes]:
    tensors = load_file(run.layout.exported_model / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def small(root: Path, *overrides: str, steps: int = STEPS) -> SmallRun:
    return prepare(root, *OVERRIDES, f"trainer.total_steps={steps}", *overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("undisturbed"))
    finish(write_settings(run), run.layout.run_dir / "out.log")
    return run


@pytest.mark.lengthy
@pytest.mark.multiprocess
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_killed_at_three_random_moments(undisturbed: SmallRun, tmp_path: Path, runtime: str) -> None:
    run = small(tmp_path, f"runtime={runtime}")
    settings, log = write_settings(run), tmp_path / "out.log"
    rng = random.Random(5)
    for _ in range(3):
        process = start(settings, log)
        wanted = rng.uniform(0.2, 1.0)  # how much of the way from the first line of the journal to the end
        deadline = time.monotonic() + DEADLINE_S
        grown = run.layout.journal.stat().st_size if run.layout.journal.exists() else 0
        while process.poll() is None and time.monotonic() < deadline:
            if run.layout.journal.exists() and run.layout.journal.stat().st_size != grown:
                time.sleep(wanted * 0.5)
                break
            time.sleep(0.01)
        if process.poll() is None:
            kill_all(process)
    finish(settings, log)
    assert steps_of(run) == steps_of(undisturbed)
    assert weights_of(run) == weights_of(undisturbed)


@pytest.mark.multiprocess
@pytest.mark.needs_ray
def test_sigterm_saves_and_the_run_goes_on(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, "runtime=ray")
    settings, log = write_settings(run), tmp_path / "out.log"
    process = start(settings, log)
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        sessions = list(ray_folder().glob(f"session_2*_{process.pid}"))
        if run.layout.journal.exists() and run.layout.journal.stat().st_size:
            break
        time.sleep(0.01)
    assert sessions
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 75, log.read_text()
    assert list(run.layout.checkpoints.glob("step-*")), "the finished step was not saved"
    assert not list(ray_folder().glob(f"session_2*_{process.pid}")), "a Ray session is left"
    finish(settings, log)
    assert steps_of(run) == steps_of(undisturbed)
    assert weights_of(run) == weights_of(undisturbed)


def test_a_finished_run_does_no_step_again(undisturbed: SmallRun) -> None:
    before = undisturbed.layout.journal.read_bytes()
    finish(write_settings(undisturbed), undisturbed.layout.run_dir / "out.log")
    assert undisturbed.layout.journal.read_bytes() == before


def test_more_steps_go_on_from_the_end(undisturbed: SmallRun, tmp_path: Path) -> None:
    short = small(tmp_path, steps=4)
    finish(write_settings(short), tmp_path / "out.log")
    longer = small(tmp_path)
    assert longer.layout.run_dir == short.layout.run_dir
    finish(write_settings(longer), tmp_path / "out.log")
    assert steps_of(longer) == steps_of(undisturbed)


def test_a_checkpoint_of_other_settings_is_refused_by_name(undisturbed: SmallRun, tmp_path: Path) -> None:
    run_id = undisturbed.layout.run_dir.name
    other = small(Path(undisturbed.config.paths.root), "optim.lr=1e-3", f"run_id={run_id}")
    settings = undisturbed.layout.settings_json
    before = settings.read_text()
    settings.write_text(other.config.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "rlcore.run.process", "--settings", str(settings)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    settings.write_text(before)
    assert done.returncode == 1
    assert "optim.lr: 0.0003 in the checkpoint, 0.001 now" in done.stderr
