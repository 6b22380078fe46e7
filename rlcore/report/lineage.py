"""Where a run comes from, as it is kept in `lineage.json` of its folder: stages, code, packages, command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlcore.errors import DataError, MillraceError
from rlcore.storage.manifest import read_manifest
from rlcore.storage.publish import write_json_atomically

LINEAGE_FILE = "lineage.json"
INPUTS_FILE = "inputs.json"

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage left for the next: `dataset`, `filter`, `model`, ... `facts` are counts and other plain values."""

    name: str
    fingerprint: str
    path: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The whole chain. `command` is the command line as typed, empty where nobody kept it."""

    stages: tuple[Stage, ...] = ()
    command: tuple[str, ...] = ()
    git_commit: str = ""
    git_dirty: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def write(self, run_dir: Path) -> Path:
        """Keep it in the run's folder."""
        target = run_dir / LINEAGE_FILE
        document: dict[str, Any] = _LINEAGE.dump_python(self, mode="json")
        write_json_atomically(target, document)
        return target


_LINEAGE = TypeAdapter(Lineage)
_INPUTS = TypeAdapter(dict[str, Path])


def read_lineage(run_dir: Path) -> Lineage | None:
    """What `Lineage.write` wrote; without it what the run's inputs say of themselves; None without either.

    Raises:
        DataError: the file is there and cannot be read.
    """
    file = run_dir / LINEAGE_FILE
    if not file.is_file():
        return _from_inputs(run_dir)
    try:
        return _LINEAGE.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(
            f"{file}: cannot be read as a lineage ({_reason(error)}); the report goes on without it"
        ) from error


def _from_inputs(run_dir: Path) -> Lineage | None:
    """The folders that the run was started with; each one's manifest is what its stage knows."""
    try:
        folders = _INPUTS.validate_json((run_dir / INPUTS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return Lineage(stages=tuple(stage_of(name, folder) for name, folder in folders.items()))


def stage_of(name: str, folder: Path) -> Stage:
    """What the manifest of a stage's folder says; the folder alone where it has none (a model from elsewhere)."""
    try:
        manifest = read_manifest(folder)
    except MillraceError:
        manifest = None
    facts: dict[str, Fact] = {}
    if manifest is not None:
        values = {**manifest.values, **_counts(manifest.values)}
        facts = {key: value for key, value in values.items() if isinstance(value, str | int | float | bool)}
        facts["size_bytes"] = manifest.size_bytes
    return Stage(name.removesuffix("_directory"), folder.name, str(folder), facts)


def _counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rows by split and the like, which stand one level down."""
    counts = values.get("counts")
    return {f"{key} rows": value for key, value in counts.items()} if isinstance(counts, Mapping) else {}


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        detail = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
    return str(error)
