"""The tab completion of settings, runs and names. It reads folders and docs/settings.md instead of settings classes.

Bash splits a word at `=`, so only the value after the `=` is returned to Bash.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from typer._completion_shared import _completion_scripts

from flows import SOURCE_FOLDER

CONF = SOURCE_FOLDER / "conf"
OWN_CONF = "MILLRACE_CONFIG_DIR"
"""The value of `rlcore.config.base.CONFIG_DIR_VARIABLE`. An import of that module would take as long as a whole
completion.
"""
PAGE = SOURCE_FOLDER / "docs" / "settings.md"
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| ([^|]*)\|[^|]*\| (.*)", re.MULTILINE)
_NAMES = re.compile(r": ([\w, ]+), or a custom `module:function`")
_completion_scripts["bash"] = _completion_scripts["bash"].replace(
    "return 0", "[[ $COMPREPLY == *= ]] && compopt -o nospace  # the value follows\n    return 0"
)
_completion_scripts["zsh"] = _completion_scripts["zsh"].replace("eval $(", "local out=$(").replace(
    "\n}", r"""
  out=${out//$'\n'/ }
  [[ $out == *'="'* ]] && out="compadd -S '' -- ${${out#*\(\(}%%\)\)*}"  # no space, since the value follows
  eval $out
}""")  # fmt: skip
_NOT_GROUPS = ("suite", "sweep")
_SETTINGS_PARAMETERS = ("settings", "overrides", "run", "words")
"""The names of the command parameters that hold settings."""


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the key of a setting or group. After `=`, complete the value: an option of a config group, an experiment
    or a literal.
    """
    before = [str(word) for word in next(filter(None, map(ctx.params.get, _SETTINGS_PARAMETERS)), ())]
    names = {*_groups(), *_values_by_key()}
    if not incomplete and before[-1:] and before[-1] in names:  # click drops the `=` at the cursor
        return sorted(_values(before[-1], ""))
    if len(before) > 1 and before[-1] == "=":
        return sorted(_values(before[-2], incomplete))
    key, equals, typed = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in sorted(_values(key, typed))]
    return [f"{name}=" for name in sorted(names) if name.startswith(key)]


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the id of a run under the root."""
    root = Path(ctx.params.get("root") or "artifacts")
    names = (file.parent.name for file in root.glob("runs/*/run.json"))
    return sorted(name for name in names if name.startswith(incomplete))


def runs_and_settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the id of a run, or a setting if no id matches."""
    return runs(ctx, incomplete) or settings(ctx, incomplete)


def choices(*words: str) -> Callable[[str], list[str]]:
    """Return a completion function that offers the passed words that begin with the typed text."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def suites(incomplete: str) -> list[str]:
    """Complete the name of a suite in conf/suite."""
    return sorted(_values("suite", incomplete))


def sweeps(incomplete: str) -> list[str]:
    """Complete the name of a sweep in conf/sweep."""
    return sorted(_values("sweep", incomplete))


def _groups() -> Iterator[str]:
    return (path.name for path in CONF.glob("[a-z]*") if path.is_dir() and path.name not in _NOT_GROUPS)


def _values(key: str, typed: str) -> Iterator[str]:
    folders = [str(CONF), *filter(None, [os.environ.get(OWN_CONF)])]
    members = {file.stem for folder in folders for file in Path(folder, key).glob("*.yaml")}
    return (name for name in members or _values_by_key().get(key, []) if name.startswith(typed))


def _values_by_key() -> dict[str, list[str]]:
    """Return the literal values of each setting. There are none if docs/settings.md is not installed."""
    if not PAGE.is_file():
        from rlcore.config.run import all_keys

        return {key: [] for key in all_keys()}
    rows = _ROW.findall(PAGE.read_text(encoding="utf-8").partition("\n## The run itself\n")[2])
    booleans = ["true", "false"]
    values: dict[str, list[str]] = {}
    for key, kind, meaning in rows:  # a key of several tasks has several rows
        names = [name for found in _NAMES.findall(meaning) for name in found.split(", ")]
        found = re.findall(r"`([\w-]+)`", kind) or booleans * kind.startswith("true or false") or names
        values[key] = [*dict.fromkeys(values.get(key, []) + found)]
    return values
