"""Datasets of the hub: at which commit they are taken, and their files in the cache on this machine."""

import re
from functools import cache
from pathlib import Path

from rlcore.errors import DataError

_COMMIT = re.compile(r"[0-9a-f]{40}")
# One question to the hub; without an answer the cache is asked.
_ANSWER_TIMEOUT_S = 10.0


@cache
def commit_of(source: str, revision: str) -> str:
    """The commit that a branch, a tag or '' (main) stands for: as the hub says, without it as the cache does.

    Raises:
        DataError: neither knows it.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(source, revision=revision or None, timeout=_ANSWER_TIMEOUT_S).sha
    except Exception as error:  # OSError, ValueError, the client's own classes and those of its HTTP library
        cached = _cached(source, revision or "main")
        if cached is None:
            raise _unavailable(source, revision, error) from error
        return cached.name
    if found is None:
        raise DataError(f"data.source: the hub names no commit of {source}; give one in data.revision")
    return found


@cache
def snapshot(source: str, revision: str) -> Path:
    """The folder with the dataset's files as of `commit_of`, fetched unless it is in the cache.

    Raises:
        DataError: it is not there and cannot be fetched.
        DiskSpaceError: no room.
    """
    from huggingface_hub import constants

    from rlcore.storage.disk import is_out_of_room, out_of_room

    commit = commit_of(source, revision)
    try:
        # Asked for by its name, the cache notes which commit that is, so that a start without a network finds it.
        folder = _fetched(source, revision or "main")
        return folder if folder.name == commit else _fetched(source, commit)  # the branch has moved in between
    except Exception as error:
        if is_out_of_room(error):
            raise out_of_room(Path(constants.HF_HUB_CACHE), error) from error
        raise _unavailable(source, revision, error) from error


def _fetched(source: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, repo_type="dataset", revision=revision))


def _cached(source: str, revision: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None


def _unavailable(source: str, revision: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300]
    at, option = (f" at {revision}", f" --revision {revision}") if revision else ("", "")
    return DataError(
        f"data.source: there is no folder {source} here, and the hub dataset of that name{at} cannot be had "
        f"({type(error).__name__}: {reason}). Check the name and data.revision, fetch it where there is a network (hf "
        f"download {source} --repo-type dataset{option}), or give data.source a folder with local files"
    )
