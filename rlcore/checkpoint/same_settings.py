"""Whether a checkpoint was made with the settings of the run that is to go on from it, and what differs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.checkpoint.catalog import CheckpointInfo
from rlcore.errors import CheckpointError
from rlcore.storage.documents import parse_json, read_ordinary

SETTINGS = "settings.json"
"""Its name in a checkpoint's folder."""
SHOWN_DIFFERENCES = 10


def require_same_settings(info: CheckpointInfo, settings: Mapping[str, Any], fingerprint: str) -> None:
    """Refuse a checkpoint of another run; `settings` are those that numbers depend on, by key.

    Raises:
        CheckpointError: names the settings that differ, with both values.
    """
    if info.settings_fingerprint == fingerprint:
        return
    theirs = _read_settings(info.path / SETTINGS)
    keys = [
        key
        for key in sorted(theirs.keys() | settings.keys())
        if (key in theirs, theirs.get(key)) != (key in settings, settings.get(key))
    ]
    shown = [
        f"  {key}: {_told(theirs, key)} in the checkpoint, {_told(settings, key)} now"
        for key in keys[:SHOWN_DIFFERENCES]
    ]
    if len(keys) > SHOWN_DIFFERENCES:
        shown.append(f"  and {len(keys) - SHOWN_DIFFERENCES} more")
    listed = "\n".join(shown)
    raise CheckpointError(
        f"{info.path}: was made with other settings, so going on would be another run:\n{listed}\n"
        "Set them back; or start a new run from these weights with settings of its own: --fork "
        f"{info.path.parents[1].name}@{info.step} and another run_id."
    )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(read_ordinary(path))
    except (OSError, ValueError) as reason:
        raise CheckpointError(f"{path}: cannot be read ({reason}). Restore it, or delete {path.parent}.") from reason
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: holds no settings. Restore it, or delete {path.parent}.")
    return settings


def _told(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "absent"
