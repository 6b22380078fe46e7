"""A run goes on with the code and the data files that it began with: they are compared at each start."""

from data.tasks import input_digests, inputs_of
from rlcore.checkpoint.catalog import scan
from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_id
from rlcore.errors import CheckpointError, DataError
from rlcore.run.inputs import RunInputs
from rlcore.run.layout import RunLayout
from rlcore.user_code import code_of, difference, kept_code


def keep_code(config: RunConfig, layout: RunLayout) -> None:
    """Keep the code with the run.

    Raises:
        CheckpointError: the run has begun with other code or data.
    """
    require_same_code(config, layout)
    code = code_of(config)
    try:
        is_kept = kept_code(layout.code) == code
    except DataError:  # damaged before the run has begun
        is_kept = False
    if not is_kept:
        code.keep(layout.code)


def require_same_code(config: RunConfig, layout: RunLayout) -> None:
    """What the settings name as `module:function`, and the files that the dataset is made of, are those of the run.

    Raises:
        CheckpointError: the run has begun, and they are not; shows what is different.
    """
    steps = [info.step for info in scan(layout.checkpoints).checkpoints]
    if not steps and not any(layout.validation.glob("*.json")):
        return
    now, then = code_of(config), kept_code(layout.code)
    if then is not None and then.digests != now.digests:
        changed, remedy = difference(then, now), f"Put it back (the run's code lies in {layout.code})"
    elif files := _changed_files(config, layout):
        changed, remedy = "\n".join(files), "Put them back (data.revision names the commit of a hub dataset)"
    else:
        return
    fork = f"from these weights (--fork {run_id(config)}@{steps[-1]}) or from step 0" if steps else "from step 0"
    raise CheckpointError(
        f"{layout.run_dir}: has begun with other code or data, so going on would be another run:\n{changed}\n{remedy}; "
        f"or start another run by what is there now, {fork}, with a run_id of its own."
    )


def _changed_files(config: RunConfig, layout: RunLayout) -> list[str]:
    """Files that the run's dataset was made of and that have other content now, a line each."""
    try:
        dataset = RunInputs.read(layout).dataset_directory
    except DataError:
        return []
    then = {} if dataset is None else inputs_of(dataset)
    now = input_digests(config.data, layout.root) if then else {}
    return [
        f"  {name}: {_told(then, name)} when the run's dataset was made, {_told(now, name)} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def _told(digests: dict[str, str], name: str) -> str:
    return digests[name][:16] if name in digests else "absent"
