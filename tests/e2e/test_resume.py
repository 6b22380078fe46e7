"""A run that is killed anywhere and started again ends with the numbers of one that was not."""

import contextlib
import os
import random
import signal
import time
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from rlcore.run.process import EXIT_RESUMABLE
from rlcore.runtime.cluster import ray_folder
from tests.forked import run_module
from tests.helpers.running import DEADLINE_S, finish, small, start, steps_of, weights_of, write_record
from tests.small_run import SmallRun

STEPS = 6


def kill_all(process: BaseProcess) -> None:
    """SIGKILL to the process and everything that it started."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # one may end with the one before it
            member.kill()
    process.join(30)
    psutil.wait_procs(family, timeout=30)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("undisturbed"), steps=STEPS)
    finish(write_record(run), run.layout.run_dir / "out.log")
    return run


@pytest.mark.lengthy
@pytest.mark.multiprocess
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_killed_at_three_random_moments(undisturbed: SmallRun, tmp_path: Path, runtime: str) -> None:
    run = small(tmp_path, f"runtime={runtime}", steps=STEPS)
    run_dir, log = write_record(run), tmp_path / "out.log"
    rng = random.Random(5)
    for _ in range(3):
        process = start(run_dir, log)
        wanted = rng.uniform(0.2, 1.0)  # how much of the way from the first line of the journal to the end
        deadline = time.monotonic() + DEADLINE_S
        grown = run.layout.journal.stat().st_size if run.layout.journal.exists() else 0
        while process.is_alive() and time.monotonic() < deadline:
            if run.layout.journal.exists() and run.layout.journal.stat().st_size != grown:
                time.sleep(wanted * 0.5)
                break
            time.sleep(0.01)
        if process.is_alive():
            kill_all(process)
    finish(run_dir, log)
    assert steps_of(run) == steps_of(undisturbed)
    assert weights_of(run) == weights_of(undisturbed)


@pytest.mark.multiprocess
@pytest.mark.needs_ray
def test_sigterm_saves_and_the_run_goes_on(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, "runtime=ray", steps=STEPS)
    run_dir, log = write_record(run), tmp_path / "out.log"
    begun = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S}"  # an older one is of another process that had this id
    process = start(run_dir, log)

    def own_sessions() -> list[Path]:
        return [one for one in ray_folder().glob(f"session_2*_{process.pid}") if one.name >= begun]

    deadline = time.monotonic() + DEADLINE_S
    while process.is_alive() and time.monotonic() < deadline:
        sessions = own_sessions()
        if run.layout.journal.exists() and run.layout.journal.stat().st_size:
            break
        time.sleep(0.01)
    assert sessions
    os.kill(process.pid, signal.SIGTERM)
    process.join(DEADLINE_S)
    assert process.exitcode == EXIT_RESUMABLE, log.read_text()
    assert list(run.layout.checkpoints.glob("step-*")), "the finished step was not saved"
    assert not own_sessions(), "a Ray session is left"
    finish(write_record(small(tmp_path, steps=STEPS)), log)
    assert steps_of(run) == steps_of(undisturbed)
    assert weights_of(run) == weights_of(undisturbed)


def test_a_finished_run_does_no_step_again(undisturbed: SmallRun) -> None:
    before = undisturbed.layout.journal.read_bytes()
    finish(write_record(undisturbed), undisturbed.layout.run_dir / "out.log")
    assert undisturbed.layout.journal.read_bytes() == before


def test_more_steps_go_on_from_the_end(undisturbed: SmallRun, tmp_path: Path) -> None:
    short = small(tmp_path, steps=4)
    finish(write_record(short), tmp_path / "out.log")
    longer = small(tmp_path, steps=STEPS)
    assert longer.layout.run_dir == short.layout.run_dir
    finish(write_record(longer), tmp_path / "out.log")
    assert steps_of(longer) == steps_of(undisturbed)


def test_a_checkpoint_of_other_settings_is_refused_by_name(undisturbed: SmallRun, tmp_path: Path) -> None:
    run_id = undisturbed.layout.run_dir.name
    other = small(Path(undisturbed.config.paths.root), "optim.lr=1e-3", f"run_id={run_id}", steps=STEPS)
    record, run_dir = undisturbed.layout.run_json, undisturbed.layout.run_dir
    before = record.read_text()
    other.inputs.write(other.config, undisturbed.layout)
    log = tmp_path / "out.log"
    code = run_module("tests.helpers.whole_run", ["--run", str(run_dir)], output=log, timeout_s=DEADLINE_S)
    record.write_text(before)
    assert code == 1
    assert "optim.lr: 0.0003 in the checkpoint, 0.001 now" in log.read_text()
