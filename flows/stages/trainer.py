"""Calls of the trainer process, as the stages make them."""

from collections.abc import Mapping
from typing import Any

from flows.stages.rows import inputs_of
from flows.work.open_run import OpenRun
from flows.work.origin import require_same_inputs
from rlcore.run.inputs import planned_initial_policy
from rlcore.run.pass_rates import planned_pass_rates
from rlcore.tracking.lineage import PASS_RATES_STAGE, Stage, stage_of
from rlcore.user_code import code_for_run


def call_trainer(run: OpenRun, command: str, **arguments: str | int) -> Mapping[str, Any]:
    """Have the trainer process do a command.

    Raises:
        CheckpointError: the run has begun with other rows.
    """
    record_inputs(run)
    return run.trainer.call(command, **arguments)


def record_inputs(run: OpenRun) -> None:
    """Record the stages before the training, where the trainer process reads its inputs.

    Raises:
        CheckpointError: the run has begun with other rows.
    """
    inputs = inputs_of(run)
    folders = inputs.folders | {"start model": planned_initial_policy(run.config, inputs.filtered_directory)}
    if run.config.pass_rates.is_enabled:
        folders[PASS_RATES_STAGE] = planned_pass_rates(run.config, inputs.filtered_directory)
    code = code_for_run(run.config)
    kept = Stage("code", code.fingerprint, str(run.layout.code), {"files": ", ".join(code.sources)})
    stages = (kept, *(stage_of(name, folder) for name, folder in folders.items()))
    if stages != run.origin.stages:
        if not run.is_evaluation:  # its suites may be others than those of its last start
            require_same_inputs(run.config, run.layout, inputs)
        run.note(stages=stages)
