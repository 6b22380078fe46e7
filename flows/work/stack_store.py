"""Which MLflow store the runs of a root write to, where their settings name none.

The file under the root; or, where `millrace up` was given another database, the MLflow server of that stack, whether it
is up now or not: else the history of one root would lie in two places.
"""

import os
from pathlib import Path

from flows.stack.databases import Databases
from flows.stack.state import read_stack
from rlcore.config import RunConfig, TrackingConfig

TRACKING_URI = "MILLRACE_TRACKING_URI"
"""Environment of flows under a stack whose MLflow has a database of its own: where their metrics go."""


def stack_store(root: Path) -> str | None:
    """The address of the stack's MLflow server; None: the file under the root.

    Raises:
        MillraceError: `stack.json` is damaged or of another format.
    """
    if uri := os.environ.get(TRACKING_URI):
        return uri
    stack = read_stack(root)
    if not stack.mlflow_database or Databases("", stack.mlflow_database).mlflow_is_the_file(root.resolve()):
        return None
    return stack.mlflow_url or None


def tracking_in_stack(tracking: TrackingConfig, root: Path) -> TrackingConfig:
    """The same with the stack's store, if it names none."""
    uri = stack_store(root) if tracking.uri is None else None
    return tracking if uri is None else tracking.model_copy(update={"uri": uri})


def in_stack(config: RunConfig) -> RunConfig:
    """The same settings with the stack's store, if they name none."""
    tracking = tracking_in_stack(config.tracking, Path(config.paths.root))
    return config if tracking is config.tracking else config.model_copy(update={"tracking": tracking})
