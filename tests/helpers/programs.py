"""Programs of the system that some tests need, which name them by `@pytest.mark.program("bwrap")`."""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)  # path of the browser, or None

_FOLDERS = [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
_FOLDERS += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
POSTGRES = next(
    (folder for folder in _FOLDERS if all((folder / name).is_file() for name in ("initdb", "postgres"))), None
)  # folder with the programs of a PostgreSQL server, or None

SYSTEM_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
"""The path on which Debian's daemons are found, such as slurmd."""


@cache
def missing(name: str) -> str:
    """Return which part of a marked program is missing, or ''."""
    if name == "bwrap":
        from rlcore import sandbox

        return sandbox._missing_requirement()
    slurmd = shutil.which("munged", path=SYSTEM_PATH) and shutil.which("slurmd", path=SYSTEM_PATH)
    found = {"chromium": CHROMIUM, "postgres": POSTGRES, "slurmd": slurmd}[name]
    return "" if found else f"{name} is not installed"


def skip_tests_without_programs(items: list[pytest.Item]) -> None:
    for item in items:
        names = [name for mark in item.iter_markers("program") for name in mark.args]
        if found := [reason for name in names if (reason := missing(name))]:
            item.add_marker(pytest.mark.skip(reason="; ".join(found)))
