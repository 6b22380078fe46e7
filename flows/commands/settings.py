"""Functions for the settings on the command line.

They parse arguments and `--root`, check options, and print the output of `--cfg` and `--info`.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from rlcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from flows.parameters import RunSettings

ROOT = "paths.root="
WORDS = "millrace.words"  # key of typer's context for the arguments that messages show
_CFG = "Write millrace run KEY=VALUE ... --cfg job; its values are always resolved"
_NAME = "Name your file by experiment=NAME and --config-dir DIR, or by experiment=FILE.yaml"
_HYDRA = {
    **dict.fromkeys(("-m", "--multirun"), "Write millrace run -m KEY=VALUE,VALUE ..., or a file for millrace sweep"),
    **dict.fromkeys(("-c", "--cfg", "-p", "--package", "--resolve"), _CFG),
    **dict.fromkeys(("-i", "--info"), "Write millrace run KEY=VALUE ... --info"),
    **dict.fromkeys(("-cn", "--config-name", "-cp", "--config-path"), _NAME),
    **dict.fromkeys(
        ("hydra", "all", "--hydra-help"), "Hydra's launchers, sweepers, loggers and output folders are unused"
    ),
    **dict.fromkeys(("config", "plugins", "defaults-tree"), "--cfg job prints the settings; there are no plugins"),
    "--on-workers": "Write millrace sweep FILE --on-workers",
    "--experimental-rerun": "The command of a run is in its run.json and its report; it resumes the run",
    **dict.fromkeys(("-sc", "--shell-completion"), "Write millrace --install-completion"),
}
"""Advice for error messages. The keys are options of Hydra or of `millrace sweep` that other commands do not have.

Keys such as `plugins` are unsupported values of the options `--cfg` and `--info`.
"""


class CommandGroup(TyperGroup):
    """A typer group whose commands accept `paths.root=DIR` and some Hydra options. Usage errors become ConfigErrors."""

    def main(self, *args: Any, **more: Any) -> NoReturn:
        """Run a command and exit with its code. Raises ConfigError for a mistake in the arguments."""
        try:
            code = super().main(*args, **{"prog_name": "millrace", **more, "standalone_mode": False})
        except typer.TyperException as error:
            raise _usage_error(error) from None
        sys.exit(code or 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the group. If there are none, print the help of the group."""
        ctx.meta.setdefault(WORDS, list(args))
        return super().parse_args(ctx, args or ["--help"])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands by section. Each command is shown with the first sentence of its help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            summary = command.get_short_help_str(limit=1_000)
            sections.setdefault(str(getattr(command, "rich_help_panel", "Commands")), []).append((name, summary))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command by typer's rules, check its arguments, and translate `paths.root=DIR` to `--root`."""
        name, command, words = super().resolve_command(ctx, args)
        taken = {option: parameter.name for parameter in getattr(command, "params", ()) for option in parameter.opts}
        if not isinstance(command, TyperGroup) and not ctx.resilient_parsing:  # no errors during tab completion
            _require_text(words)
            if "--info" in taken:
                given = [word for word in words if word != "--resolve" or not {"-c", "--cfg"} & {*words}]
                words = ["--info=all" if word in ("-i", "--info") and re.match("-|.*=|$", following) else word
                         for word, following in pairwise([*given, ""])]  # fmt: skip
            _refuse_unknown_options(f"{ctx.command_path} {name}", words, taken)
            if "--root" in taken and "settings" not in taken:
                words = [f"--root={_root_value(word)}" if word.startswith(ROOT) else word for word in words]
            _refuse_empty_options(words, command)
        return name, command, words


def _usage_error(error: Any) -> ConfigError:
    from rlcore.config.problems import Problem, format_value, nearest, settings_error

    command, parameter = error.ctx.command_path, getattr(error, "param", None)
    place = getattr(error, "param_hint", None) or (parameter.get_error_hint() if parameter else command)
    message = (error.message or "is missing").removeprefix("Value error, ").replace("Input should be", "must be")
    rule, _, remedy = message.partition(". ")
    got, rule = format_value(" ".join(error.ctx.meta[WORDS])), rule.rstrip(".").replace("'", "")
    near = next(iter(getattr(error, "possibilities", None) or ()), "")
    if rule.startswith("No such command "):
        got, rule = rule.removeprefix("No such command "), "no such command"
    if " is not one of " in rule:
        got, _, choices = rule.partition(" is not one of ")
        rule, near = f"must be {'one of ' * (', ' in choices)}{choices}", nearest(got, choices.split(", ")) or ""
    help = f"{command} --help describes the arguments and options"
    remedy = _HYDRA.get(got) or remedy.replace("'", "") or (f"Did you mean {near}?" if near else help)
    return settings_error([Problem(place.replace("'", ""), rule[0].lower() + rule[1:], got, remedy)])


def command_group(
    sections: Mapping[str, Mapping[str, Callable[..., None]]], description: str, **more: Any
) -> typer.Typer:
    """Return a typer group of commands. `sections` maps each section of the group's help to its commands by name.

    The lines of examples in a command's help are not wrapped. `more` is passed to `typer.Typer`.
    """
    group = typer.Typer(cls=CommandGroup, help=description, rich_markup_mode=None, **more)
    for section, name, command in ((section, *one) for section, each in sections.items() for one in each.items()):
        short, _, examples = inspect.cleandoc(command.__doc__ or "").partition("\n\nExamples:\n")
        group.command(name, help=short, epilog=f"\b\nExamples:\n{examples}", rich_help_panel=section)(command)
    return group


def _require_text(words: Sequence[str]) -> None:
    """Refuse arguments and a working folder that are not UTF-8, because settings and MLflow cannot store them."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        raise DataError("the working folder of this command is deleted. Change to an existing one") from None
    for word in (*words, folder):
        if word != word.encode(errors="ignore").decode():
            raise ConfigError(f"{word!r}: must be UTF-8 text, also as a file name. Rename the file")


def _refuse_empty_options(words: Sequence[str], command: Any) -> None:
    """Raise ConfigError if an option has no value, or has an empty value although its default is not empty."""
    takes = {option: one.default for one in command.params if not getattr(one, "is_flag", True) for option in one.opts}
    for word, following in pairwise([*words, None]):
        option = str(word).rstrip("=")
        is_empty = takes.get(option) != "" and (word != option or following == "")
        if option in takes and (is_empty or (word == option and following is None)):
            raise ConfigError(f"{option}: must not be empty; is a shell variable unset? Give a value, or no {option}")


def _root_value(word: str) -> str:
    """Return the value of the override `paths.root=VALUE` without its quotes."""
    text = word.removeprefix(ROOT)
    if text[:1] not in ("'", '"') or text[-1:] != text[:1]:
        return text
    # Hydra's rule: backslashes count double before a quote and at the end, and one escapes the quote.
    return re.sub(rf"\\+(?={text[0]}|$)", lambda found: found[0][: len(found[0]) // 2], text[1:-1])


def root_in_overrides(words: Sequence[str]) -> Path | None:
    """Return the folder of the last override `paths.root=DIR`, or None if there is no such override.

    >>> root_in_overrides(["paths.root=a", "paths.root='/my data'", "seed=1"])
    PosixPath('/my data')
    """
    values = [_root_value(word) for word in words if word.startswith(ROOT)]
    return Path(os.path.expanduser(values[-1])) if values else None  # noqa: PTH111 it keeps the path of an unknown user


def root_folder(given: str | Path) -> Path:
    """Return the folder of `--root`, which may not exist yet. Raises BadParameter if a file blocks the path."""
    from rlcore.storage.disk import find_obstacle

    root = Path(os.path.expanduser(given))  # noqa: PTH111 it keeps the path of an unknown user
    if (other := find_obstacle(root)) is not None:
        raise typer.BadParameter(f"must be a folder, and {other} is none. Name another one.")
    return root


def use_config_dir(given: Path | None) -> Path | None:
    """Let this process and its children also read configuration files from the folder of `--config-dir`.

    Return the folder. Raises ConfigError if it does not exist.
    """
    if given is not None:
        from rlcore.config.base import CONFIG_DIR_VARIABLE, conf_dirs

        os.environ[CONFIG_DIR_VARIABLE] = str(given.absolute())
        conf_dirs()
    return given


def _refuse_unknown_options(command: str, words: Sequence[str], taken: Mapping[str, str]) -> None:
    """Raise ConfigError if an option is unknown. The message suggests the most similar one, or lists all options."""
    words = words[: words.index("--")] if "--" in words else words
    unknown = [
        at
        for at, word in enumerate(words)
        if word.startswith("-")
        and (word[1:2] == "-" or word in _HYDRA)
        and word.partition("=")[0] not in {"--help", *taken}
    ]
    if not unknown:
        return
    from flows.parameters import FIELDS
    from rlcore.config.base import GROUPS
    from rlcore.config.problems import Problem, nearest, settings_error
    from rlcore.config.run import all_keys

    own = {option.removeprefix("--").replace("-", "_"): option for option in taken if option.startswith("--")}
    keys = {*all_keys(), *GROUPS, "experiment"} if taken.keys() & {"settings", "overrides", "run"} else set()
    problems = []
    for at in unknown:
        option, _, value = words[at].partition("=")
        written = option.removeprefix("--").replace("-", "_")
        exact = FIELDS.get(written, written)
        key = exact if exact in keys else nearest(written, own) or nearest(written, keys)
        following = words[at + 1] if at + 1 < len(words) and "=" not in words[at + 1] else "VALUE"
        remedy = f"There are {', '.join(sorted(own.values()))}"
        if key:
            remedy = f"Did you mean {own.get(key) or f'{key}={value or following}'}?"
        rule = f"no such option{', and a setting is written KEY=VALUE' if key in keys else ''}"
        problems.append(Problem(command, rule, words[at], _HYDRA.get(option, remedy)))
    raise settings_error(problems)


def require_dry_run(*, as_json: bool, dry_run: bool) -> None:
    """Refuse `--json` without `--dry-run`, because the command would start a run instead of printing a plan."""
    if as_json and not dry_run:
        raise ConfigError("--json: goes with --dry-run alone; nothing was started. Add --dry-run")


def show_wrong_settings(
    settings: Sequence[str] | None, root: Path | None, cfg: str | None, package: str | None, info: str | None
) -> None:
    """If `cfg` is set, print the settings as YAML, with defaults in place of invalid values.

    Otherwise print the sources of the settings (see `show_settings`). If the experiment is unknown or a file of a group
    cannot be read, print nothing.
    """
    from flows.parameters import RunSettings, all_overrides
    from rlcore.config.base import covers
    from rlcore.config.compose import compose

    given = all_overrides(settings, root=root)
    found = compose(given)
    if any(problem.key in ("experiment", "conf") for problem in found.problems):
        return
    if cfg is not None and any(package is None or covers(package, problem.key) for problem in found.problems):
        print("# A value of the wrong type or range is replaced by its default. The problems follow.")
    show_settings(RunSettings(found.config, tuple(given)), cfg, package, info)


def print_warnings(lines: Iterable[str]) -> None:
    """Print each warning on standard error, because a program may read the standard output."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr, flush=True)


def show_settings(settings: "RunSettings", cfg: str | None, package: str | None, info: str | None) -> None:
    """If `cfg` is set, print the settings as YAML, or only the section or value `package`.

    Otherwise print the sources of the settings (files, groups, overrides, and the source of each value that is not the
    default), or the part of them that `info` names.
    """
    from rlcore.config.base import conf_dirs, leaves
    from rlcore.config.compose import compose
    from rlcore.config.fingerprint import run_id
    from rlcore.config.problems import format_value, mask_secrets

    if cfg is not None:
        print(_settings_text(settings.config.model_dump(mode="json"), package or ""), end="")
        return
    composition = compose(settings.overrides, experiment=settings.experiment)
    groups = " ".join(f"{group}={member}" for group, member in composition.members.items())
    if info == "all" and settings.composed is not None:  # wrong settings are of no run
        print(f"run        {run_id(settings.config)} in {settings.config.paths.root}")
    if info != "defaults":
        print(f"conf       {' '.join(map(str, conf_dirs()))}")
    if info != "searchpath":
        print(f"experiment {', '.join(composition.files) or 'none: the defaults'}\ngroups     {groups}")
    if info == "all":
        print(f"overrides  {' '.join(map(mask_secrets, settings.overrides)) or 'none'}")
        default, used = (
            leaves(config.model_dump(mode="json")) for config in (type(settings.config)(), settings.config)
        )
        for key, source in composition.sources.items():
            if key in used and used[key] != default.get(key):
                print(f"value      {key}={format_value(used[key])}  {source}")


def _settings_text(settings: dict[str, Any], package: str) -> str:
    """Return the section or value `package` as text, or all settings for ''. Raises ConfigError for an unknown key."""
    from rlcore.config.base import leaves
    from rlcore.config.documents import to_yaml
    from rlcore.config.problems import Problem, did_you_mean, plain_text, settings_error
    from rlcore.config.run import section_names

    found: Any = settings
    for part in filter(None, package.split(".")):
        if not isinstance(found, dict) or part not in found:
            remedy = did_you_mean(package, {*leaves(settings), *section_names()}) or "--cfg job prints all keys"
            raise settings_error([Problem("--package", "must be a key of these settings", package, remedy)])
        found = found[part]
    if not isinstance(found, dict | list):
        return f"{plain_text(found)}\n"
    return (f"# @package {package}\n" if package else "") + to_yaml(found)


def with_program_path(command: str) -> str:
    """Return the command line with the program's full path if the interpreter's folder contains the program.

    >>> with_program_path("no-such-program --flag")
    'no-such-program --flag'
    """
    program, _, rest = command.partition(" ")
    path = Path(sys.executable).parent / program
    return f"{quote(str(path))} {rest}" if path.is_file() else command
