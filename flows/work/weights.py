"""The weights of a run's checkpoint, as a transformers directory or as the model of another run (`--fork`)."""

from dataclasses import dataclass, replace
from pathlib import Path

from flows.parameters import RunSettings, compose_settings
from flows.work.runs import find_run
from rlcore.checkpoint.catalog import find_checkpoint
from rlcore.config import RunConfig, WarmStartConfig
from rlcore.config.fingerprint import RUN_FILE, fingerprint
from rlcore.config.problems import override_value
from rlcore.errors import CheckpointError, DataError
from rlcore.models.hub import require_reachable
from rlcore.run.initial_policy import planned_initial_policy
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.runtime.interpreter import run_module
from rlcore.storage.manifest import read_finished_or_reason, read_finished_or_set_aside
from rlcore.user_code import run_code

START = "start"  # name of the initial policy in place of a checkpoint


def export_to(config: RunConfig, layout: RunLayout, checkpoint: str, target: Path) -> Path:
    """Write a checkpoint (`last`, `best`, a step or a folder's name) as a transformers directory. Raises
    CheckpointError if it is absent or broken, DataError if the run's initial policy is missing.
    """
    info, start = find_checkpoint(layout.checkpoints, checkpoint), find_initial_policy(config, layout)
    if config.runtime.python is None:
        from rlcore.checkpoint.load import export_checkpoint

        return export_checkpoint(info, config, start, target)
    words = (str(layout.checkpoints), info.name, config.model_dump_json(), str(start), str(target))
    run_module(config.runtime.python, "rlcore.checkpoint.load", *words, error=CheckpointError)
    return target


def find_initial_policy(config: RunConfig, layout: RunLayout) -> Path:
    """Return the folder or hub id of the run's initial policy. Raises DataError if the folder is missing, ModelError if
    the hub model is neither cached nor reachable.
    """
    if config.is_supervised:
        config = config.model_copy(update={"warm_start": WarmStartConfig()})
    with run_code(layout.code):
        start = planned_initial_policy(config, RunInputs.read(layout).filtered_directory)
    if not start.is_absolute():
        require_reachable("model.path", str(start))
    elif not start.is_dir():
        raise DataError(
            f"{start}: missing: the initial policy of run {layout.run_dir.name} has config and tokenizer. Restore it "
            "or make it again with the run's own command."
        )
    return start


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The checkpoint of a run as a model. `folder` is a transformers directory that may not exist yet."""

    config: RunConfig
    layout: RunLayout
    checkpoint: str
    folder: Path

    @property
    def label(self) -> str:
        """The text `<run id>@<checkpoint>`."""
        return f"{self.layout.run_dir.name}@{self.checkpoint}"

    def ensure(self) -> Path:
        """Write the transformers directory unless it is complete, and return it."""
        if self.checkpoint != START and read_finished_or_set_aside(self.folder, error=CheckpointError) is None:
            export_to(self.config, self.layout, self.checkpoint, self.folder)
        return self.folder


def find_weights(source: str, root: Path | None) -> CheckpointWeights:
    """Return the weights of `RUN[@CHECKPOINT]`. CHECKPOINT is `last` (default), `best`, a step, or `start` (initial
    policy). Raises DataError if no run matches, and CheckpointError if no checkpoint matches.
    """
    name, at, checkpoint = source.rpartition("@")
    if not at or (Path(source) / RUN_FILE).is_file():  # the name of a folder may have an @
        name, checkpoint = source, ""
    config, layout = find_run([name], root)
    if checkpoint == START:
        return CheckpointWeights(config, layout, START, find_initial_policy(config, layout))
    if config.is_supervised and checkpoint in ("", "last", "best"):  # it has no checkpoints
        return CheckpointWeights(config, layout, "last", layout.exported_model)
    info = find_checkpoint(layout.checkpoints, checkpoint or "last")
    digest = fingerprint("fork", {"run": layout.run_dir.name, "step": info.step, "created": info.created})
    return CheckpointWeights(config, layout, info.name, layout.root / "models" / f"fork-{digest}")


def compose_fork(settings: list[str], source: str, root: Path | None = None, *, dry_run: bool = False) -> RunSettings:
    """Compose settings whose initial policy has the weights of `source`, exported to `<root>/models/fork-<digest>`.

    A dry run writes nothing. If the export is missing, a dry run plans with the initial policy of the source. Raises
    ConfigError for invalid settings, and the errors of `find_weights`.
    """
    weights = find_weights(source, root)
    is_missing = dry_run and read_finished_or_reason(weights.folder, error=CheckpointError)[0] is None
    target = weights.folder if dry_run else weights.ensure()
    model = find_initial_policy(weights.config, weights.layout) if is_missing else target
    more = [
        f"model.path={override_value(str(model))}",
        *([] if "warm_start.enabled=true" in settings else ["warm_start.enabled=false"]),
        f"tags.forked_from={override_value(weights.label)}",
    ]
    composed = compose_settings([*settings, *more])
    if not is_missing:
        return composed
    seen = composed.config
    planned = seen.model_copy(update={"model": seen.model.model_copy(update={"path": str(target)})})
    return replace(composed, config=planned, planning_config=seen)
