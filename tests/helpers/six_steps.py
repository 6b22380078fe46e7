"""An undisturbed run of six steps, and the settings of its parts."""

import pytest

from tests.helpers.sessions import run_to_the_end
from tests.helpers.small_run import SmallRun, prepare

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
