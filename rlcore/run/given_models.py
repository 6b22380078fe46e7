"""The files of the models that a run was given: other weights under the same path are another run.

A record keeps size, change time and sha256 of each file. A file is read again only where its size or its time differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from rlcore.config import RunConfig
from rlcore.config.model import SMOLLM2
from rlcore.errors import ModelError
from rlcore.run.inputs import content_digest, planned_start_model, stage_layout
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import read_document
from rlcore.storage.manifest import MANIFEST, in_threads
from rlcore.storage.publish import write_json_atomically

READ = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"})
"""Of the files in a model's folder: weights, settings and tokenizer."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file as it was. `changed_ns`: when its content or its inode last changed, which no copy can keep."""

    size_bytes: int
    changed_ns: int
    sha256: str


Models = dict[str, dict[str, ModelFile]]
"""By key of the settings, then by name of the file."""
_RECORD = TypeAdapter(Models)


def model_paths(config: RunConfig) -> dict[str, str | None]:
    """The settings that name models."""
    return {"model.path": config.model.path, "critic.path": config.critic.path if config.critic else None}


def keep_models(record: Path, paths: Mapping[str, str | None]) -> None:
    """Record the files at these paths. The entry of a model that is not on this machine stays as it was."""
    then = _read(record)
    if (now := {**then, **_found(paths, then)}) != then:
        write_json_atomically(record, _RECORD.dump_python(now, mode="json"))


def changed_models(record: Path, paths: Mapping[str, str | None]) -> list[str]:
    """A line for each model that is another one than when the record was written; none where nothing was."""
    then, lines = _read(record), []
    for key, now in _found(paths, then).items():
        before = then.get(key, now)
        names = sorted(before.keys() | now.keys())
        changed = [name for name in names if _shown(before, name) != _shown(now, name)]
        if changed:
            shown, more = changed[0], f" (and {len(changed) - 1} more files)" if changed[1:] else ""
            place = Path(str(paths[key])).expanduser().resolve()
            lines.append(f"  {key}, {place}: {shown} was {_shown(before, shown)}, is {_shown(now, shown)} now{more}")
    return lines


def keep_start(record: Path, config: RunConfig) -> None:
    """Record which model lies at `model.path`: the input of a result that runs share."""
    keep_models(record, {"model.path": config.model.path})


def require_same_start(record: Path, config: RunConfig, what: str) -> None:
    """Raise ModelError, which shows the difference, where another model lies at `model.path` than in the record.

    `what` names the result that runs share, with its verb: `...: the pass rates were`.
    """
    if changed := changed_models(record, {"model.path": config.model.path}):
        raise ModelError(
            f"{what} begun with another model than lies at model.path now:\n{changed[0]}\nPut it back, or give the "
            "other model a folder of another name and set model.path to that."
        )


def require_same_base(config: RunConfig, filtered_directory: Path) -> None:
    """Raise ModelError where the warm start was begun from another model than lies at `model.path` now."""
    stage, made = _stage(config, filtered_directory), planned_start_model(config, filtered_directory)
    if stage is not None and (made.is_dir() or stage.checkpoints.is_dir()):
        require_same_start(stage.models_json, config, f"{made}: the warm start has")


def keep_base(config: RunConfig, filtered_directory: Path) -> None:
    """Record which model the warm start begins from."""
    if (stage := _stage(config, filtered_directory)) is not None:
        keep_start(stage.models_json, config)


def _stage(config: RunConfig, filtered_directory: Path) -> RunLayout | None:
    """The warm start's folder; None where there is none, or its name says which model it is made from."""
    path = config.model.path
    has_own = path not in (None, SMOLLM2) and config.warm_start.enabled
    return stage_layout(config, filtered_directory) if has_own else None


def _read(record: Path) -> Models:
    """What a record says; nothing where there is none: the run was begun before records were kept, or is not begun."""
    remedy = "it says what the models were when the run began. If they are still the same, delete it; else start "
    return read_document(record, _RECORD, f"{remedy}another run") or {}


def _found(paths: Mapping[str, str | None], then: Models) -> Models:
    """The files as they are now, without those of models that are not on this machine."""
    found: Models = {}
    for key, path in paths.items():
        place, known = Path(path or "").expanduser(), then.get(key, {})
        if path is None or not place.exists():
            continue
        files = [file for file in sorted(place.glob("*")) if _is_read(file)]
        found[key] = dict(in_threads(partial(_entry, known), files))
    return found


def _is_read(file: Path) -> bool:
    return file.suffix in READ and file.name != MANIFEST and file.is_file()


def _entry(known: Mapping[str, ModelFile], file: Path) -> tuple[str, ModelFile]:
    seen, before = file.stat(), known.get(file.name)
    if before is not None and (before.size_bytes, before.changed_ns) == (seen.st_size, seen.st_ctime_ns):
        return file.name, before
    return file.name, ModelFile(seen.st_size, seen.st_ctime_ns, content_digest(file))


def _shown(files: Mapping[str, ModelFile], name: str) -> str:
    return files[name].sha256[:16] if name in files else "absent"
