"""The settings on the command line: arguments, `--root`, checks of options, and the output of `--cfg` and `--info`."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from rlcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from flows.parameters import RunSettings

ROOT = "paths.root="


class CommandGroup(TyperGroup):
    """A group of commands that accept `paths.root=DIR` in place of `--root`. Unknown options get a suggestion."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command by typer's rules, check its arguments, and translate `paths.root=DIR` to `--root`."""
        name, command, words = super().resolve_command(ctx, args)
        taken = {option: parameter.name for parameter in getattr(command, "params", ()) for option in parameter.opts}
        if not isinstance(command, TyperGroup) and not ctx.resilient_parsing:  # no errors during tab completion
            _require_text([*words, _working_folder()])
            if taken.keys() & {"settings", "overrides", "run"}:
                _refuse_settings_as_options(words, {"--help", *taken})
            if "--root" in taken and "settings" not in taken:
                words = [f"--root={root_value(word)}" if word.startswith(ROOT) else word for word in words]
            _refuse_empty_options(words, command)
        return name, command, words


def command_group(commands: Mapping[str, Callable[..., None]], description: str, **more: Any) -> typer.Typer:
    """Return a group of commands by name. The help of a command is its docstring up to `Raises:`. The lines of its
    examples are not wrapped."""
    group = typer.Typer(cls=CommandGroup, help=description, no_args_is_help=True, rich_markup_mode=None, **more)
    for name, command in commands.items():
        text = inspect.cleandoc(command.__doc__ or "").partition("\n\nRaises:")[0]
        short, _, examples = text.partition("\n\nExamples:\n")
        group.command(name, help=short, epilog=f"\b\nExamples:\n{examples}")(command)
    return group


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise DataError("the working folder of this command is deleted. Change to an existing one") from None


def _require_text(words: Sequence[str]) -> None:
    """Refuse a word that is not UTF-8, because settings, records and MLflow cannot store it."""
    for word in words:
        if word != word.encode(errors="ignore").decode():
            raise ConfigError(f"{word!r}: must be UTF-8 text, also as a file name. Rename the file")


def _refuse_empty_options(words: Sequence[str], command: Any) -> None:
    """Refuse an empty value of an option, unless its default is empty. The cause may be an unset shell variable."""
    takes = {
        option
        for one in command.params
        if not getattr(one, "is_flag", True) and one.default != ""
        for option in one.opts
    }
    for word, following in pairwise([*words, "-"]):
        if (word in takes and not following) or (word.endswith("=") and word[:-1] in takes):
            option = word.rstrip("=")
            raise ConfigError(f"{option}: must not be empty; is a shell variable unset? Give a value, or no {option}")


def root_path(word: str) -> Path:
    """Return the folder that the override `paths.root=DIR` names.

    >>> root_path("paths.root='/my data'")
    PosixPath('/my data')
    """
    return Path(os.path.expanduser(root_value(word)))  # noqa: PTH111 it keeps the path of an unknown user


def root_value(word: str) -> str:
    """Return the value of the override `paths.root=VALUE` without its quotes."""
    text = word.removeprefix(ROOT)
    if text[:1] not in ("'", '"') or text[-1:] != text[:1]:
        return text
    # Hydra's rule: backslashes count double before a quote and at the end, and one escapes the quote.
    return re.sub(rf"\\+(?={text[0]}|$)", lambda found: found[0][: len(found[0]) // 2], text[1:-1])


def root_in_overrides(words: Sequence[str]) -> Path | None:
    """Return the folder of the last override `paths.root=DIR`, or None if there is no such override."""
    return next((root_path(word) for word in reversed(words) if word.startswith(ROOT)), None)


def root_folder(given: str | Path) -> Path:
    """Return the folder that `--root` names. It need not exist.

    Raises:
        typer.BadParameter: if the folder or one of its parents is a file.
    """
    from rlcore.storage.documents import find_obstacle

    root = Path(os.path.expanduser(given))  # noqa: PTH111 it keeps the path of an unknown user
    if (other := find_obstacle(root)) is not None:
        raise typer.BadParameter(f"must be a folder, and {other} is none. Name another one.")
    return root


def use_config_dir(given: Path | None) -> Path | None:
    """Make the folder of `--config-dir` known to this process and its children.

    Raises:
        typer.BadParameter: the folder does not exist.
    """
    if given is not None:
        from rlcore.config.base import CONFIG_DIR_VARIABLE

        if not given.is_dir():
            raise typer.BadParameter(
                f"must be an existing folder; got {given} in {Path.cwd()}. Create it, or name another"
            )
        os.environ[CONFIG_DIR_VARIABLE] = str(given.resolve())
    return given


def _refuse_settings_as_options(words: Sequence[str], options: set[str]) -> None:
    """Refuse an unknown option and suggest a setting. An option that resembles an existing one is left to typer."""
    from rlcore.config.problems import Problem, settings_error

    if "-m" not in options and (sweep := next((word for word in words if word in ("-m", "--multirun")), None)):
        remedy = "Write millrace run -m KEY=VALUE,VALUE ..., or a file for millrace sweep; docs/sweeps.md"
        raise settings_error([Problem(sweep, "is an option of millrace run only", sweep, remedy)])
    unknown = [at for at, word in enumerate(words) if word.startswith("--") and word.partition("=")[0] not in options]
    if not unknown:
        return
    from flows.parameters import FIELDS
    from rlcore.config.compose import GROUPS
    from rlcore.config.problems import nearest
    from rlcore.config.run import all_keys

    own_options = [option for option in options if option.startswith("--")]
    own = {option.removeprefix("--").replace("-", "_") for option in own_options}
    problems = []
    for at in unknown:
        option, _, value = words[at].partition("=")
        written = option.removeprefix("--").replace("-", "_")
        key = FIELDS.get(written) or nearest(written, {*own, *all_keys(), *GROUPS, "experiment"})
        if key in own:
            return
        following = words[at + 1] if at + 1 < len(words) and "=" not in words[at + 1] else "VALUE"
        listed = f"There are {', '.join(sorted(own_options))}; docs/settings.md lists every setting"
        remedy = f"Did you mean {key}={value or following}?" if key else listed
        problems.append(Problem(option, "is no option; a setting is written KEY=VALUE", words[at], remedy))
    raise settings_error(problems)


def require_dry_run(*, as_json: bool, dry_run: bool) -> None:
    """Refuse `--json` without `--dry-run`, because the command would start a run instead of printing a plan."""
    if as_json and not dry_run:
        raise typer.BadParameter("goes with --dry-run alone; nothing was started", param_hint="--json")


def require_only_settings(words: Sequence[str] | None) -> None:
    """Refuse an argument that is not a setting, such as a step. The option `--checkpoint` names the checkpoint."""
    from rlcore.config.problems import Problem, settings_error

    if bare := [word for word in words or () if "=" not in word]:
        remedy = f"Write millrace validate KEY=VALUE ... --checkpoint {bare[-1] if bare[-1].isdigit() else 'N'}"
        rule = "takes the settings that the run was started with, and the checkpoint as an option"
        raise settings_error([Problem("validate", rule, " ".join(bare), remedy)])


def compose_arguments(
    settings: Sequence[str] | None, root: Path | None, *, fork: str | None = None, dry_run: bool = False
) -> "RunSettings":
    """Compose the settings of a command. Print a warning for each setting without effect.

    `fork` names the run to start from. With `dry_run`, no weights are written for the fork.

    Raises:
        ConfigError: if a setting is wrong. One message lists every problem.
    """
    from flows.parameters import all_overrides, compose_settings

    given = all_overrides(settings, root=root)
    if fork is None:
        composed = compose_settings(given)
    else:
        from flows.work.weights import compose_fork

        composed = compose_fork(given, fork, root_in_overrides(given), dry_run=dry_run)
    print_warnings(composed.unused_settings())
    return composed


def print_warnings(lines: Iterable[str]) -> None:
    """Print each warning on standard error, because a program may read the standard output."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr, flush=True)


def show_settings(settings: "RunSettings", part: str | None) -> None:
    """Print the settings as YAML if `part` (the value of `--cfg`) is `job`. Print their sources if `part` is None."""
    from rlcore.config.base import conf_dirs
    from rlcore.config.compose import compose
    from rlcore.config.documents import to_yaml
    from rlcore.config.fingerprint import run_id
    from rlcore.config.problems import mask_secrets

    if part == "job":
        print(to_yaml(settings.config), end="")
        return
    if part is not None:
        raise ConfigError(f"--cfg: must be job, the composed settings; got {part}. --info prints their files")
    composition = compose(settings.overrides, experiment=settings.experiment)
    print(f"run        {run_id(settings.config)} in {settings.config.paths.root}")
    print(f"conf       {' '.join(map(str, conf_dirs()))}")
    print(f"experiment {', '.join(composition.files) or 'none: the defaults'}")
    print(f"groups     {' '.join(f'{group}={member}' for group, member in composition.members.items())}")
    print(f"overrides  {' '.join(map(mask_secrets, settings.overrides)) or 'none'}")


def with_program_path(command: str) -> str:
    """Return a command, with the full path of its program if the program is in the interpreter's folder.

    >>> with_program_path("no-such-program --flag")
    'no-such-program --flag'
    """
    program, _, rest = command.partition(" ")
    path = Path(sys.executable).parent / program
    return f"{quote(str(path))} {rest}" if path.is_file() else command
