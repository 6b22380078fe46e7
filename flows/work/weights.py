"""The weights of a run's checkpoint.

The weights can be exported as a transformers directory, used as the initial policy of another run, and pushed to the
Hugging Face hub.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flows.parameters import RunSettings, compose_settings
from flows.work.open_run import EVALUATION
from flows.work.runs import all_runs, find_run
from rlcore.checkpoint.catalog import find_checkpoint
from rlcore.config import RunConfig, WarmStartConfig
from rlcore.config.fingerprint import RUN_FILE, fingerprint
from rlcore.config.problems import mask_secrets, override_value
from rlcore.errors import CheckpointError, ConfigError, DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.models.hub import require_reachable
from rlcore.report.card import model_card
from rlcore.report.record import read_run
from rlcore.run.initial_policy import planned_initial_policy
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.runtime.interpreter import run_module
from rlcore.storage.manifest import MANIFEST, read_finished_or_reason, read_finished_or_set_aside, read_manifest
from rlcore.tracking.lineage import read_origin
from rlcore.user_code import run_code

START = "start"  # name of the initial policy in place of a checkpoint


def export_to(config: RunConfig, layout: RunLayout, checkpoint: str, target: Path) -> Path:
    """Write a checkpoint (`last`, `best`, a step or a folder's name) as a transformers directory. Raises
    CheckpointError if the checkpoint is absent or broken, and DataError if the run's initial policy is missing.
    """
    info, start = find_checkpoint(layout.checkpoints, checkpoint), find_initial_policy(config, layout)
    if config.runtime.python is None:
        from rlcore.checkpoint.load import export_checkpoint

        return export_checkpoint(info, config, start, target)
    words = (str(layout.checkpoints), info.name, config.model_dump_json(), str(start), str(target))
    run_module(config.runtime.python, "rlcore.checkpoint.load", *words, error=CheckpointError)
    return target


def find_initial_policy(config: RunConfig, layout: RunLayout) -> Path:
    """Return the folder or hub id of the run's initial policy. Raises DataError if the folder is missing. Raises
    ModelError if the hub model is neither cached nor reachable.
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
    """A run's checkpoint, used as a model. `folder` is a transformers directory that may not exist yet."""

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
    """Compose the settings of a run whose initial policy is the checkpoint `source`, given as `RUN[@CHECKPOINT]`.

    If needed, the checkpoint is exported to `<root>/models/fork-<digest>`. A dry run writes nothing. If there is no
    export yet, the dry run plans with the initial policy of the source run. Raises ConfigError for invalid settings,
    and the errors of `find_weights`.
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


_REPOSITORY = re.compile(r"[a-zA-Z0-9][\w.\-]{0,95}/[a-zA-Z0-9][\w.\-]{0,95}", re.ASCII)
_EMPTY = {".gitattributes"}  # the files of a repository without an upload


def require_pushable(repository: str) -> None:
    """Raise ConfigError if the repository is not named OWNER/NAME, or if no token of the Hugging Face hub is set."""
    from huggingface_hub import get_token

    if _REPOSITORY.fullmatch(repository) is None:
        raise ConfigError(f"--push: must be OWNER/NAME, each of letters, digits and -_. ; got {repository!r}")
    if get_token() is None:
        raise ConfigError(
            f"--push {repository}: needs a token that may write; got none. Run hf auth login, or set HF_TOKEN"
        )


def write_card(layout: RunLayout, folder: Path, name: str, evaluated: Path) -> None:
    """Write the README.md of an export. It contains the results of `millrace eval` for the model folder `evaluated`."""
    manifest = read_manifest(folder, error=CheckpointError)
    step = int(manifest.values["step"]) if manifest is not None else 0
    results = tuple(_evaluations(layout.root, str(evaluated)))
    model_card(read_run(layout.run_dir), step, name, results).save(folder / "README.md")


def _evaluations(root: Path, model: str) -> Iterator[ValidationResult]:
    for run in all_runs(root):
        with suppress(DataError):  # a damaged run has no results
            origin = read_origin(run)
            if origin is not None and (origin.settings.name, origin.settings.model.path) == (EVALUATION, model):
                yield from (result for suite in read_run(run).suites.values() for result in suite.values())


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload an exported model in one commit to a new repository of the hub, and return the repository's address.
    Raises CheckpointError if the hub rejects the upload or if the repository already has files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        try:
            address = str(api.create_repo(repository, private=private))
        except HfHubHTTPError as error:
            if error.response.status_code != 409:
                raise
            address = f"{api.endpoint}/{repository}"
            if not set(api.list_repo_files(repository)) <= _EMPTY:
                raise CheckpointError(
                    f"--push {repository}: must be a new repository, and this one has files. {folder} stays. Choose "
                    f"another name, or replace the files by hf upload {repository} {folder}"
                ) from error
        api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[MANIFEST])
    except CheckpointError:
        raise
    except Exception as error:  # classes of the client and of its HTTP library
        reason = mask_secrets(" ".join(str(error).split()))[:300]
        raise CheckpointError(
            f"--push {repository}: the hub must accept the upload, it does not ({type(error).__name__}: {reason}). "
            f"{folder} stays. Check the name, the token's right to write and the network, then repeat the command, or "
            f"run hf upload {repository} {folder}"
        ) from error
    return address
