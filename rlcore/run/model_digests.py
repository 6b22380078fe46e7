"""Digests of the model files that settings name: other weights under the same path are another model."""

from functools import lru_cache
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.storage.documents import sha256_of
from rlcore.storage.manifest import MANIFEST, in_threads

READ = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"})
"""Suffixes of the files that count: weights, settings and tokenizer."""


def model_paths(config: RunConfig) -> dict[str, str | None]:
    """The settings that name models."""
    return {"model.path": config.model.path, "critic.path": config.critic.path if config.critic else None}


def model_digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Digests of the models that the settings name, by key; without those that are not on this machine."""
    named = {key: Path(path).expanduser() for key, path in model_paths(config).items() if path is not None}
    return {key: digests_in(folder) for key, folder in named.items() if folder.exists()}


def digests_in(folder: Path) -> dict[str, str]:
    """sha256 of each file of a model, by name; empty where the folder is not there."""
    files = [file for file in sorted(folder.glob("*")) if file.suffix in READ and file.is_file()]
    return dict(
        in_threads(lambda file: (file.name, content_digest(file)), [one for one in files if one.name != MANIFEST])
    )


def content_digest(file: Path) -> str:
    """sha256 of a file. A process reads it again only where its size or its change time has changed."""
    path = file.expanduser().resolve()
    seen = path.stat()
    return _digest(path, seen.st_size, seen.st_ctime_ns)


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, time_ns: int) -> str:
    return sha256_of(path)
