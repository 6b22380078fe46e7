"""Sessions in this process. Unlike in the trainer process, the test receives the events and requests stops.

`undisturbed` is a run of six steps.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlcore.checkpoint.catalog import list_checkpoints
from rlcore.run.process import Session
from tests.helpers.running import write_record
from tests.helpers.small_run import NoSignals, SmallRun, give_up, prepare

Event = Mapping[str, object]


class Asked(NoSignals):
    """A stop request that the test sets."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        super().__init__()
        self._asked = asked

    def __call__(self) -> bool:
        return self._asked()


def session_of(
    run: SmallRun, report: Callable[[Event], None] = lambda event: None, stop: Callable[[], bool] = lambda: False
) -> Session:
    write_record(run)
    return Session(run.config, run.layout, report=report, stop=Asked(stop), abandon=give_up)


def run_to_the_end(
    run: SmallRun, report: Callable[[Event], None] = lambda event: None, stop: Callable[[], bool] = lambda: False
) -> None:
    trainer = run.config.trainer
    with session_of(run, report, stop) as session:
        train_in_chunks(session, *range(trainer.steps_per_chunk, trainer.total_steps + 1, trainer.steps_per_chunk))
        session.export("last")


def train_in_chunks(session: Session, *ends: int) -> None:
    for step in ends:
        session.train(step)


def elsewhere(run: SmallRun, root: Path, *overrides: str) -> SmallRun:
    """Return the same run at its start under another root. Results of earlier stages are copied."""
    for name in ("datasets", "filtered", "tokenizers", "models"):
        source = Path(run.config.paths.root) / name
        if source.is_dir():
            shutil.copytree(source, root / name, dirs_exist_ok=True)
    return prepare(root, *overrides)


def verified_steps(run: SmallRun) -> list[int]:
    rows = list_checkpoints(run.layout.checkpoints, verify_hashes=True)
    assert [row.reason for row in rows if row.verdict != "verified"] == []
    return [row.step for row in rows]


# Two steps and a half an epoch: a batch holds the end of one and the beginning of the next.
BASE = ("data.train_size=20", "validation.every_steps=2")
QUIET = "tracking.enabled=false"


def steps(total: int, chunk: int = 2) -> tuple[str, ...]:
    return (*BASE, f"trainer.total_steps={total}", f"trainer.steps_per_chunk={chunk}")


OVERRIDES = (*steps(6), QUIET)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = prepare(tmp_path_factory.mktemp("undisturbed"), *OVERRIDES)
    run_to_the_end(run)
    return run
