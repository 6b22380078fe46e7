"""The card of an export, and its upload to the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flows.work.open_run import EVALUATION
from flows.work.runs import all_runs
from rlcore.config.problems import mask_secrets
from rlcore.errors import CheckpointError, ConfigError, DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.report.card import model_card
from rlcore.report.record import read_run
from rlcore.run.layout import RunLayout
from rlcore.storage.manifest import MANIFEST, read_manifest
from rlcore.tracking.lineage import read_origin

_REPOSITORY = re.compile(r"[a-zA-Z0-9][\w.\-]{0,95}/[a-zA-Z0-9][\w.\-]{0,95}", re.ASCII)
_EMPTY = {".gitattributes"}  # the files of a repository without an upload


def require_pushable(repository: str) -> None:
    """Raise ConfigError if the repository is not named OWNER/NAME or if there is no token."""
    from huggingface_hub import get_token

    if _REPOSITORY.fullmatch(repository) is None:
        raise ConfigError(f"--push: must be OWNER/NAME, each of letters, digits and -_. ; got {repository!r}")
    if get_token() is None:
        raise ConfigError(
            f"--push {repository}: needs a token that may write; got none. Run hf auth login, or set HF_TOKEN"
        )


def write_card(layout: RunLayout, folder: Path, name: str, evaluated: Path) -> None:
    """Write the README.md of an export, with the results of `millrace eval` for the folder `evaluated`."""
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
    """Upload an export in one commit to a new repository, and return the repository's address. Raises CheckpointError
    if the hub rejects the upload or if the repository has files.
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
