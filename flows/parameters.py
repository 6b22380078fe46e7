"""The settings of commands and flows: their types in Prefect, their composition and their checks.

No parameter of a flow is a nested object. If a user changed one value of such an object, Prefect would replace the
whole object.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import Field, WithJsonSchema

from flows.stack.state import STACK_ROOT, with_stack_tracking
from rlcore.config import RunConfig
from rlcore.config.base import FILE_ENDINGS, group_members
from rlcore.config.compose import Composition, compose
from rlcore.config.fingerprint import run_id
from rlcore.config.problems import override_value
from rlcore.errors import ConfigError
from rlcore.storage.disk import find_obstacle

_NAMES = group_members("experiment")
_EXPERIMENT_SCHEMA = {
    "type": "string",
    "anyOf": [
        {"title": "Name", "type": "string", "enum": list(_NAMES)},
        {"title": "File", "type": "string", "pattern": r"\.ya?ml$"},
    ],
    "pattern": rf"^({'|'.join(_NAMES)}|.*\.ya?ml)$",  # repeated for Prefect's message about a wrong name
}
Experiment = Annotated[str | None, WithJsonSchema({"anyOf": [_EXPERIMENT_SCHEMA, {"type": "null"}]})]
"""A name in `conf/experiment`, a file's path, or None for the defaults. Prefect's form accepts a name or a path."""
NO_STRINGS: list[str] = []  # default of list parameters; no flow changes it
Seed = Annotated[int | None, Field(ge=0, lt=2**31)]
Count = Annotated[int | None, Field(ge=1)]
Steps = Annotated[int | None, Field(ge=0)]
Positive = Annotated[float | None, Field(gt=0)]
Root = str | None

FIELDS = {
    "seed": "seed",
    "total_steps": "trainer.total_steps",
    "learning_rate": "optim.lr",
    "batch_size": "trainer.batch_size",
    "samples_per_prompt": "rollout.samples_per_prompt",
    "root": "paths.root",
}
"""The setting that each typed parameter of a flow sets."""
EXPERIMENT = "experiment="


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The composed and checked settings of one run. `overrides` are settings as on the command line.

    With `--fork`, a run starts from weights of another run. In a dry run, these weights are not exported to
    `model.path`. Instead, `planning_config` names an existing model with the same shape and tokenizer.
    """

    config: RunConfig
    overrides: tuple[str, ...]
    experiment: str | None = None
    planning_config: RunConfig | None = None
    composed: Composition | None = None

    def __repr__(self) -> str:
        """Return a short text, for example `<RunSettings debug-s2-5f42b025: experiment=debug seed=2>`."""
        return f"<RunSettings {run_id(self.config)}: {' '.join(self.command('')[1:]) or 'defaults'}>"

    def command(self, verb: str) -> tuple[str, ...]:
        """Return the words of the command line `millrace VERB` with these settings."""
        words = [f"{EXPERIMENT}{self.experiment}"] if self.experiment else []
        return ("millrace", *verb.split(), *words, *self.overrides)

    def unused_settings(self) -> list[str]:
        """Return a line for each passed setting that has no effect."""
        return self.composed.unused_settings() if self.composed else []


def compose_settings(
    overrides: Sequence[str] | None, experiment: str | None = None, **fields: str | float | Path | None
) -> RunSettings:
    """Compose and check the settings of a command or flow. Raises ConfigError if settings are wrong.

    The folder of an experiment's file is added to `sys.path`, so that its custom functions can be imported.
    """
    given = all_overrides(overrides, **fields)
    named = experiment or split_experiment(tuple(given))[0] or ""
    folder = str(Path(named).resolve().parent)
    if named.endswith(FILE_ENDINGS) and folder not in sys.path:
        sys.path.append(folder)  # appended, so that no file there replaces a Millrace module
    composed = compose(given, experiment=experiment).require_valid()
    root = composed.config.paths.root
    if (other := find_obstacle(Path(root)) if root else "''") is not None:
        raise ConfigError(f"paths.root: must be a folder; got {other}, which is not one. Choose another paths.root.")
    return RunSettings(with_stack_tracking(composed.config), tuple(given), experiment, composed=composed)


def all_overrides(overrides: Sequence[str] | None, **fields: str | float | Path | None) -> list[str]:
    """Return the overrides, followed by an override for each typed parameter that is set."""
    given = {FIELDS[name]: value for name, value in fields.items() if value not in (None, "")}
    texts = {key: override_value(str(value) if isinstance(value, Path) else value) for key, value in given.items()}
    return [*(overrides or ()), *(f"{key}={text}" for key, text in texts.items())]


def flow_root(root: Root) -> Root:
    """Return `root` if it is set. Otherwise return the workspace of the worker's stack, or None outside a worker."""
    return root or os.environ.get(STACK_ROOT)


def split_experiment(overrides: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Split overrides into the experiment and the other overrides, because a flow has a parameter for the experiment.

    >>> split_experiment(("experiment='/my files/debug.yaml'", "seed=2"))
    ('/my files/debug.yaml', ['seed=2'])
    """
    names = [text.removeprefix(EXPERIMENT).strip("'\"") for text in overrides if text.startswith(EXPERIMENT)]
    rest = [text for text in overrides if not text.startswith(EXPERIMENT)]
    return (names[0] if names else None), rest


def experiment_name(experiment: str | None) -> str:
    """Return the short name of an experiment, which is shown in the name of a flow run.

    >>> experiment_name("debug"), experiment_name("/my/files/mine.yaml"), experiment_name(None)
    ('debug', 'mine', 'defaults')
    """
    named = experiment or "defaults"
    return PurePath(named).stem if named.endswith(FILE_ENDINGS) else named
