"""The checkpoints of a run, and the check that its code, data and models are still the recorded ones."""

from collections.abc import Mapping
from pathlib import Path

from data.tasks import input_digests, inputs_of
from rlcore.checkpoint.catalog import name_of, scan
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_id
from rlcore.errors import CheckpointError
from rlcore.run.initial_policy import model_digests, model_paths
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.storage.documents import content_digest
from rlcore.storage.manifest import FILE_SHA256, read_manifest
from rlcore.tracking.lineage import Origin, read_origin
from rlcore.user_code import code_for_run, code_patch, read_code


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Return the checkpoint store of a run."""
    layout = RunLayout.of(config)
    return CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)


def committed_step(config: RunConfig) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is none. Raises CheckpointError if all are
    broken, or if the newest one was written with other settings.
    """
    found = checkpoint_store(config).latest(verify=False)
    return 0 if found is None else found.step


def checkpoint_name(checkpoint: str) -> str:
    """Return the folder name of a checkpoint. A name that is not a step is returned unchanged.

    >>> checkpoint_name("40"), checkpoint_name("best")
    ('step-000040', 'best')
    """
    return name_of(int(checkpoint)) if checkpoint.isdecimal() else checkpoint


ABSENT = "absent"
SHOWN_DIGITS = 16  # hex digits of a digest in a message


def require_same_inputs(config: RunConfig, layout: RunLayout, inputs: RunInputs | None = None) -> None:
    """Raise CheckpointError, with the changes, if the code, data or models of a run differ from its record, or if the
    run has more steps than `trainer.total_steps`. Filtered rows are compared only if `inputs` is passed.
    """
    steps = [info.step for info in scan(layout.checkpoints).checkpoints]
    if not steps and not any(layout.validation.glob("*.json")):  # the run has not begun
        return
    total, this = config.trainer.total_steps, run_id(config)
    if steps and steps[-1] > total:
        start = max((step for step in steps if step <= total), default=steps[-1])
        raise CheckpointError(
            f"trainer.total_steps: must be at least {steps[-1]}, the steps that run {this} already has; got "
            f"{total}. Set it to {steps[-1]} or more; for fewer steps start another run, from these weights "
            f"(--fork {this}@{start}) or from step 0, with another name or run_id."
        )
    origin = read_origin(layout.run_dir)
    changes = _changed_code(config, layout)
    if origin is not None:
        then = RunInputs.of(origin)
        changes += [] if then is None else _changed_files(config, then)
        changes += _changed_models(config, origin)
        changes += [] if then is None or inputs is None else _changed_rows(then, inputs)
    if changes:
        fork = f"from these weights (--fork {this}@{steps[-1]}) or from step 0" if steps else "from step 0"
        raise CheckpointError(
            f"{layout.run_dir}: has begun with other code, data or models, and cannot resume with these:\n"
            + "\n".join(changes)
            + f"\nRestore what has changed (the run's code is in {layout.code}; data.revision names the commit of a "
            f"hub dataset), or start another run with the current inputs, {fork}, with a separate run_id."
        )


def _changed_code(config: RunConfig, layout: RunLayout) -> list[str]:
    """Return a patch from the recorded code to the current code. Suites that were added or removed are ignored."""
    now, then = code_for_run(config), read_code(layout.code)
    if then is None:
        return []
    then, now = then.shared_with(now), now.shared_with(then)
    return [code_patch(then, now)] if then.digests != now.digests else []


def _changed_files(config: RunConfig, inputs: RunInputs) -> list[str]:
    then = {} if inputs.dataset_directory is None else inputs_of(inputs.dataset_directory)
    now = input_digests(config.data) if then else {}
    shown, file = inputs.demonstrations_directory, config.warm_start.demonstrations
    manifest = None if shown is None or file is None else read_manifest(shown)
    if manifest is not None and FILE_SHA256 in manifest.values:
        name, path = "warm_start.demonstrations", Path(str(file)).expanduser()
        then |= {name: manifest.values[FILE_SHA256]}
        now |= {name: content_digest(path)} if path.is_file() else {}
    return _digest_changes("", then, now)


def _changed_models(config: RunConfig, origin: Origin) -> list[str]:
    """Return a line for each changed model file. A model that is or was missing on this machine is skipped."""
    changes, paths = [], model_paths(config)
    for key, now in model_digests(config).items():
        place = Path(str(paths[key])).expanduser().resolve()
        changes += _digest_changes(f"{key}, {place}: ", origin.models.get(key, now), now)
    return changes


def _changed_rows(then: RunInputs, now: RunInputs) -> list[str]:
    from rlcore.run.pass_rates import row_digests

    if then.filtered_directory.name == now.filtered_directory.name:
        return []
    files = [[*inputs.train_parquets, *inputs.validation_parquets] for inputs in (then, now)]
    if not all(file.is_file() for file in files[0]):  # the first rows are deleted
        return []
    before, after = ([row_digests(file) for file in each] for each in files)
    return [] if before == after else [f"  rows: {then.filtered_directory} then, {now.filtered_directory} now"]


def _digest_changes(where: str, then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"  {where}{name}: {then.get(name, ABSENT)[:SHOWN_DIGITS]} then, {now.get(name, ABSENT)[:SHOWN_DIGITS]} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
