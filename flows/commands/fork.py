"""`--fork RUN[@CHECKPOINT]`: a new run, with settings of its own, from the weights of another run's checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from flows.commands.checkpoints import export_to, start_model_of
from flows.commands.named_run import named_run
from flows.commands.options import ROOT, root_of
from flows.parameters import written
from rlcore.checkpoint.catalog import find_checkpoint
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import CheckpointError
from rlcore.storage.finished import finished_or_set_aside, finished_or_why


@dataclass(frozen=True, slots=True)
class Fork:
    """Settings of a run, a fork or not. `missing`: where its model will be, where they name another of its shape."""

    settings: list[str]
    missing: Path | None = None

    def plan(self) -> tuple[RunConfig, RunConfig | None]:
        """The settings by which a dry run plans, and those to look at in place of a model that is not there yet.

        Raises:
            ConfigError: they are wrong.
        """
        config = load_config(self.settings)
        if self.missing is None:
            return config, None
        model = config.model.model_copy(update={"path": str(self.missing)})
        return config.model_copy(update={"model": model}), config


def forked(settings: list[str], source: str | None, *, dry_run: bool = False) -> Fork:
    """The settings, and those that make a checkpoint's weights the model of step 0; as they are where source is None.

    The weights go to `<root of the source>/models/fork-<digest>` as a transformers directory, once for a checkpoint.
    Optimizer, critic and place in the data begin anew: what goes on as the same run needs no fork. A dry run writes
    nothing: until the weights are there its settings name the model that the other run has started from.

    Raises:
        DataError: there is no such run.
        CheckpointError: it has no such checkpoint, or that is broken.
    """
    if source is None:
        return Fork(settings)
    name, _, checkpoint = source.partition("@")
    config, layout = named_run([name], _root_said(settings))
    info = find_checkpoint(layout.checkpoints, checkpoint or "last")
    digest = fingerprint("fork", {"run": layout.run_dir.name, "step": info.step, "created": info.created})
    target = layout.root / "models" / f"fork-{digest}"
    if dry_run:
        known, _ = finished_or_why(target, error=CheckpointError)
    else:
        known = finished_or_set_aside(target, error=CheckpointError)
    is_missing = known is None
    if is_missing and not dry_run:
        export_to(config, layout, info.name, target)
    model = start_model_of(config, layout) if is_missing and dry_run else target
    more = [
        f"model.path={written(str(model))}",
        "warm_start.enabled=false",
        f"tags.forked_from={written(f'{layout.run_dir.name}@{info.name}')}",
    ]
    return Fork([*settings, *more], target if is_missing and dry_run else None)


def _root_said(settings: list[str]) -> Path | None:
    """Where the new run goes: a run that is named by its id is looked for there. The settings cannot be read as a whole
    yet: their model is still to come.
    """
    said = [text for text in settings if text.startswith(ROOT)]
    return root_of(said[-1]) if said else None
