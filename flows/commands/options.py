"""The arguments and options that several commands share, and the tab completion of settings, runs and names.

The completion reads folders and docs/settings.md, because the settings classes load slowly. Bash splits a word at `=`,
so only the value after the `=` is returned to Bash.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer._completion_shared import _completion_scripts

from flows import SOURCE_FOLDER
from flows.commands.settings import root_folder, use_config_dir

CONF = SOURCE_FOLDER / "conf"
OWN_CONF = "MILLRACE_CONFIG_DIR"  # rlcore.config.base.CONFIG_DIR_VARIABLE, whose module loads slowly
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
_SETTINGS_PARAMETERS = ("settings", "overrides", "run", "words")  # parameters of commands


def complete_settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the key of a setting or group, also after `+`, `++` or `~`. After `=`, complete the value."""
    before = [str(word) for word in next(filter(None, map(ctx.params.get, _SETTINGS_PARAMETERS)), ())]
    names = {*_groups(), *_values_by_key()}
    if not incomplete and before[-1:] and before[-1] in names:  # click drops the `=` at the cursor
        return sorted(_values(before[-1], ""))
    if len(before) > 1 and before[-1] == "=":
        return sorted(_values(before[-2], incomplete))
    word, equals, typed = incomplete.partition("=")
    key = word.lstrip("+~")
    if equals:
        return [f"{word}={value}" for value in sorted(_values(key, typed))]
    sign, end = word.removesuffix(key), "" if word.startswith("~") else "="
    return [f"{sign}{name}{end}" for name in sorted(names) if name.startswith(key)]


def complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the id of a run in the workspace."""
    root = Path(ctx.params.get("root") or "artifacts")
    names = (file.parent.name for file in root.glob("runs/*/run.json"))
    return sorted(name for name in names if name.startswith(incomplete))


def complete_runs_and_settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the id of a run, or a setting if no id matches."""
    return complete_runs(ctx, incomplete) or complete_settings(ctx, incomplete)


def choices(*words: str) -> Callable[[str], list[str]]:
    """Return a completion function. From `words`, it offers those that begin with the typed text."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def members_of(group: str) -> Callable[[str], list[str]]:
    """Return a completion function that offers the names in a folder of conf/."""
    return lambda incomplete: sorted(_values(group, incomplete))


def _groups() -> Iterator[str]:
    return (path.name for path in CONF.glob("[a-z]*") if path.is_dir() and path.name not in _NOT_GROUPS)


def _values(key: str, typed: str) -> Iterator[str]:
    folders = [str(CONF), *filter(None, [os.environ.get(OWN_CONF)])]
    members = {file.stem for folder in folders for file in Path(folder, key).glob("*.yaml")}
    return (name for name in members or _values_by_key().get(key, []) if name.startswith(typed))


def _values_by_key() -> dict[str, list[str]]:
    """Return the values that the tab completion offers for each setting.

    The values are read from docs/settings.md. If this page is not installed, all lists are empty.
    """
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


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings: experiment=<a file in conf/experiment>, a group such as algo=dapo, a key such as "
        "trainer.total_steps=40.",
        show_default=False,
        autocompletion=complete_settings,
    ),
]
Run = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="A run: its folder, its id, or the settings it was started with.",
        autocompletion=complete_runs_and_settings,
    ),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Runs by folder, id, or the beginning of an id.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, and stop.")]
PlanAsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ROOT_HELP = "Workspace: the folder of datasets, models, runs and databases; paths.root=DIR means the same."
Root = Annotated[Path, typer.Option(metavar="DIR", help=ROOT_HELP, parser=root_folder)]
ARTIFACTS = Path("artifacts")
OptionalRoot = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help=ROOT_HELP, show_default="artifacts", parser=root_folder)
]
"""The option `--root` of commands whose settings may also name the workspace."""
Uri = Annotated[str | None, typer.Option(help="MLflow store (tracking.uri); default: the one in the workspace.")]
Fork = Annotated[
    str | None,
    typer.Option(
        metavar="RUN[@CHECKPOINT]",
        help="Start from the weights of another run: its folder or id, and last (the default), best, or a step.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
Cfg = Annotated[
    Literal["job"] | None,
    typer.Option("--cfg", "-c", help="Print the composed and resolved settings as YAML, and stop."),
]
Package = Annotated[
    str | None,
    typer.Option("--package", "-p", metavar="KEY", help="With --cfg: only this section or value.", show_default=False),
]
Info = Annotated[
    Literal["all", "defaults", "searchpath"] | None,
    typer.Option("--info", "-i", help="Print the sources of the settings, and stop."),
]
Multirun = Annotated[
    bool,
    typer.Option("--multirun", "-m", help="Run every combination of settings with several values: seed=1,2,3."),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="Your folder of groups, experiments, suites and sweeps, of the form of conf/; MILLRACE_CONFIG_DIR too.",
        show_default=False,
        callback=use_config_dir,
        is_eager=True,  # before any name of a member is looked up
    ),
]
"""The option `--config-dir`. Its callback stores the folder in an environment variable, for child processes too."""
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of Prefect and the trainer too.")]
