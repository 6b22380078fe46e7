"""Calls of the trainer process, as the stages make them."""

from collections.abc import Mapping
from typing import Any

from flows.stages.rows import inputs_of
from flows.work.open_run import OpenRun, require_same_rows


def call_trainer(run: OpenRun, command: str, **arguments: str | int) -> Mapping[str, Any]:
    """Have the trainer process do a command.

    Raises:
        CheckpointError: the run has begun with other rows.
    """
    write_inputs(run)
    return run.trainer.call(command, **arguments)


def write_inputs(run: OpenRun) -> None:
    """Write the inputs to where the trainer process reads them.

    Raises:
        CheckpointError: the run has begun with other rows.
    """
    inputs = inputs_of(run)
    if not run.is_evaluation:  # its suites may be others than those of its last start
        require_same_rows(run.config, run.layout, inputs)
    inputs.write(run.layout)
