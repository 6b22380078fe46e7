"""Which MLflow store the runs of a root write to, where their settings name none.

The file under the root; or, where `millrace up` was given another database, the MLflow server of that stack, whether it
is up now or not: else the history of one root would lie in two places.
"""

import os
from pathlib import Path

from flows.server.secret import login_of, mlflow_client
from flows.stack.databases import Databases
from flows.stack.state import read_stack
from rlcore.config import RunConfig, TrackingConfig

STACK = "MILLRACE_STACK"
"""Environment of flows under a stack whose MLflow has a database of its own: the stack's root, whatever theirs is."""


def stack_store(root: Path) -> str | None:
    """The address of the stack's MLflow server; None: the file under the root. See `log_in`.

    Raises:
        MillraceError: `stack.json` is damaged or of another format, or the login's file can be read by others.
    """
    root = Path(os.environ.get(STACK, root)).resolve()
    stack = read_stack(root)
    if not stack.mlflow_database or Databases("", stack.mlflow_database).mlflow_is_the_file(root):
        return None
    return log_in(stack.mlflow_url, root) if stack.mlflow_url else None


def log_in(uri: str, root: Path) -> str:
    """The same address. If it is that of the stack's server, this process and those that it starts log in from now on.

    Only then: MLflow's clients send one login to whatever server they ask.
    """
    root = Path(os.environ.get(STACK, root)).resolve()
    if uri.rstrip("/") == read_stack(root).mlflow_url:
        os.environ.update(mlflow_client(login_of(root)))
    return uri


def tracking_in_stack(tracking: TrackingConfig, root: Path) -> TrackingConfig:
    """The same with the stack's store, if it names none."""
    uri = stack_store(root) if tracking.uri is None else log_in(tracking.uri, root)
    return tracking if uri == tracking.uri else tracking.model_copy(update={"uri": uri})


def in_stack(config: RunConfig) -> RunConfig:
    """The same settings with the stack's store, if they name none."""
    tracking = tracking_in_stack(config.tracking, Path(config.paths.root))
    return config if tracking is config.tracking else config.model_copy(update={"tracking": tracking})
