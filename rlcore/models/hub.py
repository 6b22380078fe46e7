"""Resolution of model paths to local directories or to models on the Hugging Face hub, and reading of model files. This
module does not import torch."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from rlcore.errors import ModelError

T = TypeVar("T")

MODEL_FILES = ("generation_config.json", "config.json")
"""The files that may define the end-of-sequence tokens. The first file that defines them is used."""
_HUB_TIMEOUT_S = 10.0


@cache
def is_hub_reachable() -> bool:
    """Return whether the hub responds, tested once per process. Without the hub, models come from the local cache."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception:  # classes of the client (offline mode) and of its HTTP library
        return False
    return True


def config_file(path: str, name: str = "config.json") -> Path | None:
    """Return the path of a file in a local model directory or in the cache of a hub model, or None if it is missing."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        found = try_to_load_from_cache(path, name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def require_reachable(key: str, path: str) -> None:
    """Check that the model `path` is a local directory, cached, or on a reachable hub. Raises ModelError if not. The
    message names `key`, the setting with the path."""
    if Path(path).expanduser().is_dir() or config_file(path) is not None:
        return
    if (refusal := _hub_problem(path)) is not None:
        raise ModelError(
            f"{key}: {path} is not a directory here, it is not in the hub's cache on this machine, and {refusal}, or "
            f"set {key} to a local model directory"
        )


def _hub_problem(path: str) -> str | None:
    """Return the reason why the hub does not provide a model, followed by the remedy. Return None if the hub provides
    it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    fetch = f"Fetch it where there is a network (hf download {path})"
    if not is_hub_reachable():
        return f"the hub does not respond. {fetch}"
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{path}"
        return f"the model is gated. Request access on {page}, then log in (hf auth login)"
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        name = type(error).__name__
        return f"the hub has no such model ({name}). Check the name, log in if it is private (hf auth login)"
    except Exception as error:  # classes of the client and of its HTTP library
        return f"the hub does not provide it ({type(error).__name__}: {error}). {fetch}"
    return None


def resolve_model(path: str | Path, file_name: str) -> str:
    """Return the directory or the hub id (`owner/name`) that a path names. Raises ModelError if the path names neither,
    or if `file_name` in the directory is missing or damaged."""
    text, directory = str(path), Path(path).expanduser()
    if directory.is_dir():
        file = directory / file_name
        if not file.is_file():
            raise ModelError(
                f"model.path: a model directory must hold {file_name}, {text} does not. Is it the right one?"
            )
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"model.path: {file} must be JSON, got: {error}. Copy the directory again.") from None
        return str(directory)
    if text.startswith((".", "/", "~")) or text.count("/") != 1 or directory.exists():
        raise ModelError(
            f"model.path: must be a model directory or a hub id (owner/name), got {text!r}, which is neither. "
            "Check the spelling, or leave model.path empty to build a small, randomly initialized model."
        )
    return text


def read_stop_ids(files: Iterable[Path]) -> frozenset[int] | None:
    """Return the ids of the end tokens from the first file that defines `eos_token_id`, or None if no file defines it.
    Raises ModelError if a file is damaged."""
    for file in files:
        if not file.is_file():
            continue
        try:
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"model.path: {file} must be JSON, got: {error}. Copy the directory again.") from None
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return None


def read_pretrained(path: str, what: str, read: Callable[..., T]) -> T:
    """Call `read`, a loading function of transformers, and return its result. Remote code is never run. Only local
    files are read if `path` is a directory or the hub is unreachable. Raises ModelError if the call fails. `what` names
    the loaded object in the error message."""
    try:
        return read(local_files_only=Path(path).is_dir() or not is_hub_reachable(), trust_remote_code=False)
    except SafetensorError as error:
        raise ModelError(
            f"model.path: the weights must be whole safetensors files, those in {path} are not ({error}). Copy the "
            "directory again."
        ) from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        where = "the directory" if Path(path).is_dir() else "no directory of that name, and the hub"
        detail = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model.path: must lead to {what} that transformers can read, got {path!r} ({where}: {detail}). "
            "Check the path; architectures that need custom code are not supported."
        ) from error
