"""Parameters of the flows: flat, since Prefect replaces a nested one whole; and how they become settings."""

import re
import shlex
from typing import Annotated

from pydantic import Field, WithJsonSchema

from flows.work.stack_store import in_stack
from rlcore.config import RunConfig
from rlcore.config.compose import experiment_names, load_config

_NAMES = experiment_names()
_EITHER = {
    "type": "string",
    "anyOf": [
        {"title": "Name", "type": "string", "enum": list(_NAMES)},
        {"title": "File", "type": "string", "pattern": r"\.ya?ml$"},
    ],
    "pattern": rf"^({'|'.join(_NAMES)}|.*\.ya?ml)$",  # says the same, and Prefect tells it to whoever gives neither
}
Experiment = Annotated[str | None, WithJsonSchema({"anyOf": [_EITHER, {"type": "null"}]})]
"""A name in `conf/experiment`, or the path of a file; None takes the defaults. The form has a field for each."""
NO_OVERRIDES: list[str] = []
"""The default of every flow; none of them changes it."""
Seed = Annotated[int | None, Field(ge=0, lt=2**31)]
Steps = Annotated[int | None, Field(ge=1)]
Count = Annotated[int | None, Field(ge=1)]
Rate = Annotated[float | None, Field(gt=0)]
Root = str | None
"""`paths.root`. A deployment sets it, and `-p overrides=...` replaces the overrides whole: so it is apart from them."""
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


def settings_of(experiment: str | None, overrides: list[str], **fields: str | float | None) -> RunConfig:
    """The settings that a flow's parameters mean. Without a store of their own they take the stack's.

    Raises:
        ConfigError: one message with every mistake, as on the command line.
    """
    return in_stack(load_config(all_overrides(overrides, **fields), experiment=experiment))


def all_overrides(overrides: list[str], **fields: str | float | None) -> list[str]:
    """The overrides, and those that the typed parameters stand for."""
    return [
        *overrides,
        *(f"{FIELDS[name]}={written(value)}" for name, value in fields.items() if value not in (None, "")),
    ]


def written(value: str | float | None) -> str:
    """A value as Hydra reads it: a path with more than plain letters in it is quoted.

    >>> written(3e-4), written("/data/artifacts"), written("/my data")
    ('0.0003', '/data/artifacts', "'/my data'")
    """
    text = str(value)
    if not isinstance(value, str) or re.fullmatch(r"[\w.+\-]*(/[\w.+\-]*)+", text, re.ASCII):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


def plain_command(verb: str, experiment: str | None, overrides: list[str]) -> str:
    """The command line that does the same."""
    return shlex.join(command_words(verb, experiment, overrides))


def command_words(verb: str, experiment: str | None, overrides: list[str]) -> tuple[str, ...]:
    """Its words."""
    words = [f"experiment={experiment}"] if experiment else []
    return ("millrace", verb, *words, *overrides)
