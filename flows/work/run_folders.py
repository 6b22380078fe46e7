"""Runs on disk: those of a root, and those that somebody names."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.errors import DataError

MOST_NAMES = 8
"""Run ids in a message at most."""


def all_runs(root: Path) -> list[Path]:
    """Folders of all runs under a root, by name."""
    return sorted(file.parent for file in (root / "runs").glob("*/settings.json"))


def named_runs(names: Sequence[str], root: Path) -> list[Path]:
    """The folders of runs named by a path, a run id, or the beginning of one that is no other's.

    Raises:
        DataError: a name that is no run's, or several runs'.
    """
    return [_named(name, root) for name in names]


def _named(name: str, root: Path) -> Path:
    for folder in (Path(name), root / "runs" / name):
        if (folder / "settings.json").is_file():
            return folder.resolve()
    known = all_runs(root)
    found = [folder for folder in known if folder.name.startswith(name)]
    if len(found) == 1:
        return found[0].resolve()
    names = ", ".join(folder.name for folder in (found or known)[:MOST_NAMES]) or "none"
    problem = "is the beginning of several runs" if found else "is neither the folder nor the id of a run"
    raise DataError(
        f"{name}: {problem}; under {root / 'runs'} there are: {names}. Name one of them, or another root (--root, or "
        "paths.root)."
    )
