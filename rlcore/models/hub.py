"""Where a model is read from: a directory, or the hub where it is reachable. Loads no torch, so that a command can ask
before anything expensive."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from rlcore.errors import ModelError

T = TypeVar("T")

MODEL_FILES = ("generation_config.json", "config.json")
"""Where a model names the tokens that end an answer: the first that names any."""
_HUB_TIMEOUT_S = 10.0


@cache
def is_hub_reachable() -> bool:
    """Whether the hub answers; asked once a process. If not, only the cache is read: the client waits 25 s a file."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception:  # the client's own classes (told to stay offline) and those of its HTTP library
        return False
    return True


def cached_config(path: str, name: str = "config.json") -> Path | None:
    """`config.json`, or another file, of a hub id in the cache on this machine, if it is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def require_reachable(key: str, path: str) -> None:
    """A model of the hub is in the cache, or the hub gives it to this user.

    Raises:
        ModelError: neither.
    """
    if Path(path).expanduser().is_dir() or cached_config(path) is not None:
        return
    if (refusal := _hub_problem(path)) is not None:
        raise ModelError(
            f"{key}: {path} is no directory here, it is not in the hub's cache on this machine, and {refusal}, or give "
            f"{key} a local model directory"
        )


def _hub_problem(path: str) -> str | None:
    """Why the hub does not give a model, and what to do; None where it does."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    fetch = f"Fetch it where there is a network (hf download {path})"
    if not is_hub_reachable():
        return f"the hub does not answer. {fetch}"
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        where = f"{constants.ENDPOINT}/{path}"
        return f"the hub gives it to selected users alone. Ask for access on {where}, then log in (hf auth login)"
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        told = type(error).__name__
        return f"the hub has no such model ({told}). Check the name, log in if it is private (hf auth login)"
    except Exception as error:  # the client's own classes and those of its HTTP library
        return f"the hub does not give it ({type(error).__name__}: {error}). {fetch}"
    return None


def resolve_model(path: str | Path, file_name: str) -> str:
    """The directory, which must hold `file_name`, or the hub id `owner/name`; what is neither is refused."""
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
            "Check the spelling, or leave model.path empty to build a small model from nothing."
        )
    return text


def read_stop_ids(files: Iterable[Path]) -> frozenset[int] | None:
    """`eos_token_id` of the first of these JSON files that is there and names any; None where none does.

    Raises:
        ModelError: a file is damaged.
    """
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
    """Read with transformers; its many errors become one that names the setting."""
    try:
        return read(local_files_only=use_local_files(path), trust_remote_code=False)
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
            "Check the path; architectures that need code of their own are not supported."
        ) from error


def use_local_files(path: str) -> bool:
    """Whether nothing is to be asked of the hub: it is a directory, or the hub is away and its cache must do."""
    return Path(path).is_dir() or not is_hub_reachable()
