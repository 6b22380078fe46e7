"""Settings and runs as the command line names them: options, `--root`, `--fork`, and runs by id, folder or settings."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from flows.parameters import RunSettings
    from rlcore.config import RunConfig
    from rlcore.run.layout import RunLayout

ROOT = "paths.root="
SLOWER_BY = 0.1
"""Default of `millrace regression --slower-by`: a step that takes more than a tenth longer is told."""
START = "start"
"""In place of a checkpoint: the model that a run has started from."""


class Commands(TyperGroup):
    """Commands that accept `paths.root=DIR` where they take no settings, and show how a setting is written."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command as typer does, and translate its words."""
        name, command, words = super().resolve_command(ctx, args)
        taken = {option: parameter.name for parameter in getattr(command, "params", ()) for option in parameter.opts}
        if not isinstance(command, TyperGroup) and not ctx.resilient_parsing:  # nothing is refused while Tab completes
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
    """Refuse unknown options with the setting that was meant; one that is like an option is left to typer.

    Raises:
        ConfigError: there is one.
    """
    from rlcore.config.problems import Problem, settings_error

    if sweep := next((word for word in words if word in ("-m", "--multirun")), None):
        several = " ".join(word for word in words if "=" in word and not word.startswith("-"))
        rule = "is no option: several values of a setting are a sweep, which is a file"
        remedy = (
            "Write `grid: {KEY: [VALUE, VALUE]}` and `seeds: [1, 2]` in it, then `millrace sweep FILE`; docs/sweeps.md"
        )
        raise settings_error([Problem(sweep, rule, several or sweep, remedy)])
    unknown = [at for at, word in enumerate(words) if word.startswith("--") and word.partition("=")[0] not in options]
    if not unknown:
        return
    from flows.parameters import FIELDS
    from rlcore.config.compose import GROUPS
    from rlcore.config.problems import nearest
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


def require_dry_run(*, as_json: bool, dry_run: bool) -> None:
    """Refuse `--json` without `--dry-run`: whoever wants a plan wants no run."""
    if as_json and not dry_run:
        raise typer.BadParameter("goes with --dry-run alone; nothing was begun", param_hint="--json")


def composed_or_shown(words: dict[str, Any]) -> bool:
    """Compose the settings among a command's words, in place of them and of the options that say how.

    Returns:
        Whether the command goes on; False where the settings were only to be shown (`--cfg`, `--info`).
    """
    cfg, info, dry_run = words.pop("cfg", None), words.pop("info", False), words.get("dry_run", False)
    is_shown = cfg is not None or info
    require_dry_run(as_json=words.get("as_json", False), dry_run=dry_run)
    given = with_root(words["settings"], words.pop("root"))
    words["settings"] = forked(given, words.pop("fork", None), dry_run=dry_run or is_shown)
    if is_shown:
        _show(words["settings"], cfg=cfg)
    return not is_shown


def _show(settings: "RunSettings", *, cfg: str | None) -> None:
    """Print the composed settings as YAML (`--cfg job`), or what they are composed of (`--info`).

    Raises:
        ConfigError: `cfg` asks for another of Hydra's parts.
    """
    from rlcore.config.compose import CONF_DIR, composed_of
    from rlcore.config.documents import to_yaml
    from rlcore.config.fingerprint import run_id
    from rlcore.errors import ConfigError

    if cfg == "job":
        print(to_yaml(settings.config), end="")
        return
    if cfg is not None:
        raise ConfigError(
            f"--cfg: must be job, the composed settings; got {cfg}. --info says what they are composed of"
        )
    files, members = composed_of(settings.overrides, experiment=settings.experiment)
    print(f"run        {run_id(settings.config)} in {settings.config.paths.root}")
    print(f"conf       {CONF_DIR}")
    print(f"experiment {', '.join(files) or 'none: the defaults'}")
    print(f"groups     {' '.join(f'{group}={member}' for group, member in members.items())}")
    print(f"overrides  {' '.join(settings.overrides) or 'none'}")


def named_run(words: list[str], root: Path | None) -> "tuple[RunConfig, RunLayout]":
    """Settings and folders of a run. An id, or the beginning of one, is looked up below `root` (None: the usual one).

    Raises:
        ConfigError: the settings are wrong.
        DataError: there is no such run, its settings cannot be read, or a part of it is of another kind.
    """
    from flows.work.runs import named_runs
    from rlcore.config import PathsConfig, RunConfig
    from rlcore.config.compose import load_config
    from rlcore.errors import DataError
    from rlcore.run.layout import RunLayout

    if len(words) == 1 and "=" not in words[0]:
        (folder,) = named_runs(words, root or Path(PathsConfig().root))
        file = folder / "settings.json"
        try:
            config = RunConfig.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file}: cannot be read as the settings of this version of Millrace ({error}). Use the version that "
                "wrote it."
            ) from error
        layout = RunLayout(Path(config.paths.root).resolve(), folder)  # the folder may have been moved or copied
    else:
        config = load_config(with_root(words, root))
        layout = RunLayout.of(config)
        if not layout.run_dir.is_dir():
            raise DataError(
                f"{layout.run_dir}: there is no such run: the settings name it, but nothing was started with them. "
                "Give the settings of the run, its id, or its folder."
            )
    layout.require_kinds()
    return config, layout


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint of a run as a model: `folder` is where its transformers directory is, or will be."""

    config: "RunConfig"
    layout: "RunLayout"
    checkpoint: str
    folder: Path

    @property
    def label(self) -> str:
        """`<run id>@<checkpoint>`."""
        return f"{self.layout.run_dir.name}@{self.checkpoint}"

    def ensure(self) -> Path:
        """The folder, written unless it is there and whole.

        Raises:
            CheckpointError: the checkpoint is broken.
        """
        from flows.commands.checkpoints import export_to
        from rlcore.errors import CheckpointError
        from rlcore.storage.finished import finished_or_set_aside

        if self.checkpoint != START and finished_or_set_aside(self.folder, error=CheckpointError) is None:
            export_to(self.config, self.layout, self.checkpoint, self.folder)
        return self.folder


def weights_of(source: str, root: Path | None) -> Weights:
    """The weights that `RUN[@CHECKPOINT]` names: of `last` (taken if not given), `best`, a step, or `start`.

    Raises:
        DataError: there is no such run.
        CheckpointError: it has no such checkpoint.
    """
    from flows.commands.checkpoints import start_model_of
    from rlcore.checkpoint.catalog import find_checkpoint
    from rlcore.config.fingerprint import fingerprint

    name, _, checkpoint = source.partition("@")
    config, layout = named_run([name], root)
    if checkpoint == START:
        return Weights(config, layout, START, start_model_of(config, layout))
    info = find_checkpoint(layout.checkpoints, checkpoint or "last")
    digest = fingerprint("fork", {"run": layout.run_dir.name, "step": info.step, "created": info.created})
    return Weights(config, layout, info.name, layout.root / "models" / f"fork-{digest}")


def forked(settings: list[str], source: str | None = None, *, dry_run: bool = False) -> "RunSettings":
    """Compose settings; where `source` names a run's checkpoint, its weights are the model of step 0.

    The weights go to `<root of the source>/models/fork-<digest>` as a transformers directory, once for a checkpoint.
    Optimizer, critic and place in the data begin anew: what goes on as the same run needs no fork. A dry run writes
    nothing: until the weights are there it plans by the model that the other run has started from.

    Args:
        settings: as on the command line.
        source: `RUN[@CHECKPOINT]`; None: no fork.
        dry_run: nothing may be written.

    Raises:
        ConfigError: the settings are wrong.
        DataError: there is no such run.
        CheckpointError: it has no such checkpoint, or that is broken.
    """
    from flows.parameters import compose_settings
    from rlcore.config.problems import override_value

    if source is None:
        return compose_settings(settings)
    from flows.commands.checkpoints import start_model_of
    from rlcore.errors import CheckpointError
    from rlcore.storage.finished import finished_or_why

    # The settings cannot be composed yet: their model is still to come. A run's id is looked for in their root.
    roots = [root_of(text) for text in settings if text.startswith(ROOT)]
    weights = weights_of(source, roots[-1] if roots else None)
    is_missing = dry_run and finished_or_why(weights.folder, error=CheckpointError)[0] is None
    target = weights.folder if dry_run else weights.ensure()
    model = start_model_of(weights.config, weights.layout) if is_missing else target
    more = [
        f"model.path={override_value(str(model))}",
        "warm_start.enabled=false",
        f"tags.forked_from={override_value(weights.label)}",
    ]
    composed = compose_settings([*settings, *more])
    if not is_missing:
        return composed
    seen = composed.config
    planned = seen.model_copy(update={"model": seen.model.model_copy(update={"path": str(target)})})
    return replace(composed, config=planned, seen=seen)


def beside_python(command: str) -> str:
    """The command with the path of its program, where that lies beside the interpreter.

    >>> beside_python("no-such-program --flag")
    'no-such-program --flag'
    """
    program, _, rest = command.partition(" ")
    path = Path(sys.executable).parent / program
    return f"{quote(str(path))} {rest}" if path.is_file() else command
