"""The checkpoints of a run, as commands and stages name and find them."""

from rlcore.checkpoint.catalog import name_of
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.run.layout import RunLayout


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Where the run's checkpoints are kept."""
    layout = RunLayout.of(config)
    return CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)


def committed_step(config: RunConfig) -> int:
    """Step of the newest whole checkpoint of the run; 0 without one.

    Raises:
        CheckpointError: all are broken, or it is of other settings.
    """
    found = checkpoint_store(config).latest(verify=False)
    return 0 if found is None else found.step


def checkpoint_name(checkpoint: str) -> str:
    """A bare step as the name of its folder; other names as they are.

    >>> checkpoint_name("40"), checkpoint_name("best")
    ('step-000040', 'best')
    """
    return name_of(int(checkpoint)) if checkpoint.isdecimal() else checkpoint
