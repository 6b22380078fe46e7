"""Settings as commands and flows are given them, and composed once: typed, checked, with the stack's MLflow store.

Parameters of flows are flat, since Prefect replaces a nested one whole.
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
from rlcore.config.base import FILE_ENDINGS
from rlcore.config.compose import Composition, compose, experiment_names
from rlcore.config.fingerprint import run_id
from rlcore.config.problems import override_value
from rlcore.errors import ConfigError
from rlcore.storage.documents import find_obstacle

_NAMES = experiment_names()
_EXPERIMENT_SCHEMA = {
    "type": "string",
    "anyOf": [
        {"title": "Name", "type": "string", "enum": list(_NAMES)},
        {"title": "File", "type": "string", "pattern": r"\.ya?ml$"},
    ],
    "pattern": rf"^({'|'.join(_NAMES)}|.*\.ya?ml)$",  # says the same; Prefect's message shows it for a wrong name
}
Experiment = Annotated[str | None, WithJsonSchema({"anyOf": [_EXPERIMENT_SCHEMA, {"type": "null"}]})]
"""A name in `conf/experiment`, or the path of a file; None takes the defaults. The form has a field for each."""
NO_STRINGS: list[str] = []
"""The default of every flow; none of them changes it."""
Seed = Annotated[int | None, Field(ge=0, lt=2**31)]
Count = Annotated[int | None, Field(ge=1)]
Positive = Annotated[float | None, Field(gt=0)]
Root = str | None
"""`paths.root`; None: see `flow_root`."""
MLFLOW_PAGE = "MILLRACE_MLFLOW_PAGE"
"""Environment of flows under a stack: where its MLflow shows what they write."""

FIELDS = {
    "seed": "seed",
    "total_steps": "trainer.total_steps",
    "learning_rate": "optim.lr",
    "batch_size": "trainer.batch_size",
    "samples_per_prompt": "rollout.samples_per_prompt",
    "root": "paths.root",
}
"""Parameters that stand for a setting, and the setting."""
EXPERIMENT = "experiment="


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of one run, composed and checked.

    `overrides`: as on the command line, the experiment among them or apart. `seen`: a fork's dry run plans by it, since
    the model that `config` names is not written yet; it names another one of the same shape and tokenizer. `composed`:
    where the settings come from.
    """

    config: RunConfig
    overrides: tuple[str, ...]
    experiment: str | None = None
    planning_config: RunConfig | None = None
    composed: Composition | None = None

    def __repr__(self) -> str:
        """`<RunSettings debug-s2-5f42b025: experiment=debug seed=2>`."""
        return f"<RunSettings {run_id(self.config)}: {' '.join(self.command('')[1:]) or 'defaults'}>"

    def command(self, verb: str) -> tuple[str, ...]:
        """The words of the command that does the same; `verb`: its name."""
        words = [f"{EXPERIMENT}{self.experiment}"] if self.experiment else []
        return ("millrace", *verb.split(), *words, *self.overrides)

    def unused_settings(self) -> list[str]:
        """Settings that were given and have no effect, a line each."""
        return self.composed.unused_settings() if self.composed else []


def compose_settings(
    overrides: Sequence[str] | None, experiment: str | None = None, **fields: str | float | Path | None
) -> RunSettings:
    """Settings from the command line, or from the parameters of a flow.

    From here on modules are found beside the experiment's file too: so a worker finds them, wherever it was started.

    Raises:
        ConfigError: one message with every mistake; or the root is no folder.
    """
    given = all_overrides(overrides, **fields)
    named = experiment or split_experiment(tuple(given))[0] or ""
    folder = str(Path(named).resolve().parent)
    if named.endswith(FILE_ENDINGS) and folder not in sys.path:
        sys.path.append(folder)  # the last, so that no file there takes the place of a module of ours
    composed = compose(given, experiment=experiment).require_valid()
    root = composed.config.paths.root
    if (other := find_obstacle(Path(root)) if root else "''") is not None:
        raise ConfigError(f"paths.root: must be a folder, and {other} is none. Choose another paths.root.")
    return RunSettings(with_stack_tracking(composed.config), tuple(given), experiment, composed=composed)


def all_overrides(overrides: Sequence[str] | None, **fields: str | float | Path | None) -> list[str]:
    """The overrides, and those that the typed parameters, such as `root`, stand for."""
    given = {FIELDS[name]: value for name, value in fields.items() if value not in (None, "")}
    return [
        *(overrides or ()),
        *(f"{key}={override_value(str(value) if isinstance(value, Path) else value)}" for key, value in given.items()),
    ]


def flow_root(root: Root) -> Root:
    """The root that a flow was given, else that of the stack whose worker runs it, if one does."""
    return root or os.environ.get(STACK_ROOT)


def split_experiment(overrides: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The experiment's name apart from the other overrides, so that it is a parameter of its own in Prefect.

    >>> split_experiment(("experiment='/my files/debug.yaml'", "seed=2"))
    ('/my files/debug.yaml', ['seed=2'])
    """
    names = [text.removeprefix(EXPERIMENT).strip("'\"") for text in overrides if text.startswith(EXPERIMENT)]
    rest = [text for text in overrides if not text.startswith(EXPERIMENT)]
    return (names[0] if names else None), rest


def experiment_name(experiment: str | None) -> str:
    """An experiment as the name of a flow run shows it.

    >>> experiment_name("debug"), experiment_name("/my/files/mine.yaml"), experiment_name(None)
    ('debug', 'mine', 'defaults')
    """
    named = experiment or "defaults"
    return PurePath(named).stem if named.endswith(FILE_ENDINGS) else named
