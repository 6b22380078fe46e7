"""Options and settings on the command line: the root is given either way, and a setting given as an option is named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

ROOT = "paths.root="


class Commands(TyperGroup):
    """Commands that accept `paths.root=DIR` where they take no settings, and tell how a setting is written."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command as typer does, and translate its words."""
        name, command, words = super().resolve_command(ctx, args)
        taken = {option: parameter.name for parameter in getattr(command, "params", ()) for option in parameter.opts}
        if not isinstance(command, TyperGroup):
            if taken.keys() & {"settings", "run"}:
                _refuse_settings_as_options(words, {"--help", *taken})
            if "--root" in taken and "settings" not in taken:
                words = [f"--root={root_of(word)}" if word.startswith(ROOT) else word for word in words]
        return name, command, words


def root_of(word: str) -> Path:
    """The folder that `paths.root=DIR` names.

    >>> root_of("paths.root='/my data'")
    PosixPath('/my data')
    """
    return Path(word.removeprefix(ROOT).strip("'\""))


def with_root(settings: Sequence[str] | None, root: Path | None) -> list[str]:
    """The settings, with the one that `--root` stands for."""
    from flows.parameters import all_overrides

    return all_overrides(list(settings or ()), root=None if root is None else str(root))


def _refuse_settings_as_options(words: Sequence[str], options: set[str]) -> None:
    """Tell of every unknown option that a setting is written otherwise; one that is like an option is left to typer.

    Raises:
        ConfigError: there is one.
    """
    unknown = [at for at, word in enumerate(words) if word.startswith("--") and word.partition("=")[0] not in options]
    if not unknown:
        return
    from flows.parameters import FIELDS
    from rlcore.config.compose import GROUPS
    from rlcore.config.problems import Problem, nearest, settings_error
    from rlcore.config.run import all_keys

    own = {option.removeprefix("--").replace("-", "_") for option in options}
    problems = []
    for at in unknown:
        option, _, value = words[at].partition("=")
        written = option.removeprefix("--").replace("-", "_")
        key = FIELDS.get(written) or nearest(written, {*own, *all_keys(), *GROUPS, "experiment"})
        if key in own:
            return
        following = words[at + 1] if at + 1 < len(words) and "=" not in words[at + 1] else "VALUE"
        remedy = f"Did you mean {key}={value or following}?" if key else "docs/settings.md lists every setting"
        problems.append(Problem(option, "is no option; a setting is written KEY=VALUE", words[at], remedy))
    raise settings_error(problems)
