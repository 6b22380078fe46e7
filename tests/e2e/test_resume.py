"""A run that is killed at any moment and started again has the numbers of an undisturbed run."""

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
from tests.helpers.running import DEADLINE_S, finish, small, start, steps_of, weights_of, write_record
from tests.helpers.small_run import SmallRun

STEPS = 6


def kill_all(process: BaseProcess) -> None:
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
def test_sigterm_saves_and_run_resumes(undisturbed: SmallRun, tmp_path: Path) -> None:
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
