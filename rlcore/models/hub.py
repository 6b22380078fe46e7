"""Whether the model hub can be had. Loads no torch, so that a command can ask before anything expensive."""

from functools import cache
from pathlib import Path

from rlcore.errors import ModelError

_ANSWER_TIMEOUT_S = 10.0


@cache
def hub_answers() -> bool:
    """Asked once a process. Without an answer only the cache is read: the hub's client tries each file for 25 s."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_TIMEOUT_S)
    except Exception:  # the client's own classes (told to stay offline) and those of its HTTP library
        return False
    return True


def cached_config(path: str) -> Path | None:
    """`config.json` of a hub id in the cache on this machine, if it is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json")
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
    if (refusal := _refusal(path)) is not None:
        raise ModelError(
            f"{key}: {path} is no directory here, it is not in the hub's cache on this machine, and {refusal}, or give "
            f"{key} a local model directory"
        )


def _refusal(path: str) -> str | None:
    """Why the hub does not give a model, and what to do; None where it does."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    fetch = f"Fetch it where there is a network (hf download {path})"
    if not hub_answers():
        return f"the hub does not answer. {fetch}"
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_ANSWER_TIMEOUT_S)
    except GatedRepoError:
        where = f"{constants.ENDPOINT}/{path}"
        return f"the hub gives it to selected users alone. Ask for access on {where}, then log in (hf auth login)"
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        told = type(error).__name__
        return f"the hub has no such model ({told}). Check the name, log in if it is private (hf auth login)"
    except Exception as error:  # the client's own classes and those of its HTTP library
        return f"the hub does not give it ({type(error).__name__}: {error}). {fetch}"
    return None
