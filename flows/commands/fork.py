"""`--fork RUN[@CHECKPOINT]`: a new run, with settings of its own, from the weights of another run's checkpoint."""

from pathlib import Path

from flows.commands.checkpoints import export_to
from flows.commands.named_run import named_run
from flows.parameters import written
from rlcore.checkpoint.manage import find_checkpoint
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import CheckpointError
from rlcore.storage.publish import read_manifest

ROOT = "paths.root="


def forked(settings: list[str], source: str | None, root: Path) -> list[str]:
    """The settings, and those that make a checkpoint's weights the model of step 0; as they are where source is None.

    The weights go to `<root of the source>/models/fork-<digest>` as a transformers directory, once for a checkpoint.
    Optimizer, critic and place in the data begin anew: what goes on as the same run needs no fork.

    Raises:
        DataError: there is no such run.
        CheckpointError: it has no such checkpoint, or that is broken.
    """
    if source is None:
        return settings
    name, _, checkpoint = source.partition("@")
    config, layout = named_run([name], _root_said(settings) or root)
    info = find_checkpoint(layout.checkpoints, checkpoint or "last")
    digest = fingerprint("fork", {"run": layout.run_dir.name, "step": info.step, "created": info.created})
    target = layout.root / "models" / f"fork-{digest}"
    if read_manifest(target, error=CheckpointError) is None:
        export_to(config, layout, info.name, target)
    return [
        *settings,
        f"model.path={written(str(target))}",
        "warm_start.enabled=false",
        f"tags.forked_from={written(f'{layout.run_dir.name}@{info.name}')}",
    ]


def _root_said(settings: list[str]) -> Path | None:
    """Where the new run goes: a run that is named by its id is looked for there. The settings cannot be read as a whole
    yet: their model is still to come.
    """
    said = [text.removeprefix(ROOT) for text in settings if text.startswith(ROOT)]
    return Path(said[-1].strip("'\"")) if said else None
