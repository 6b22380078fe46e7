"""The settings of a run as tables, and the command line that makes the same run again."""

import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import JsonValue

from rlcore.config import CriticConfig, LoraConfig, RunConfig
from rlcore.config.base import leaves
from rlcore.config.problems import masked, plain_text
from rlcore.config.run import all_keys
from rlcore.errors import ConfigError
from rlcore.report.document import Cell, Table, table

_BARE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./:@%-]*")
_NULL_SECTIONS: Mapping[str, type[CriticConfig | LoraConfig]] = {"critic": CriticConfig, "model.lora": LoraConfig}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings as plain values by dotted key."""
    return leaves(config.model_dump(mode="json"))


def defaults_of(config: RunConfig) -> dict[str, Any]:
    """The default of each key that this run's settings may have: of its task, and of sections that are switched on."""
    plain = RunConfig().model_dump(mode="json")
    found = leaves({**plain, "data": type(config.data)().model_dump(mode="json")})
    found["data.task"] = plain["data"]["task"]
    for section, kind in _NULL_SECTIONS.items():
        found |= leaves(kind().model_dump(mode="json"), f"{section}.")
    return found


def settings_tables(config: RunConfig) -> tuple[Table, Table]:
    """What differs from the defaults, and everything else. A section that is off by default counts by its keys."""
    defaults, settings = defaults_of(config), settings_of(config)
    changed = {key: value for key, value in settings.items() if defaults.get(key, ...) != value}
    differing = [
        (key, _cell(value), _cell(defaults[key]) if key in defaults else Cell("–"), meaning(key))
        for key, value in changed.items()
    ]
    same = [(key, _cell(value), meaning(key)) for key, value in settings.items() if key not in changed]
    return (
        table("settings_changed", "Settings that differ from the defaults",
              {"Setting": "code", "Value": "code", "Default": "code", "Meaning": "text"}, differing),
        table("settings_default", f"Settings at their defaults ({len(same)})",
              {"Setting": "code", "Value": "code", "Meaning": "text"}, same, folded=True),
    )  # fmt: skip


@cache
def meaning(key: str) -> str:
    """A setting's own documentation, first sentence: where it begins with a choice (`local: ...`), that choice's. A
    name in a free mapping (`tags.owner`) has the mapping's.

    >>> meaning("runtime.device"), meaning("rollout.samples_per_prompt")
    ('auto: CUDA where a GPU is present.', 'Answers to each prompt')
    """
    while key not in all_keys() and "." in key:
        key = key.rpartition(".")[0]
    found = all_keys().get(key)
    text = (found[0].description or "") if found else ""
    sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(":;")
    before, _, _ = sentence.partition(": ")
    return before if " " in before else sentence


def _cell(value: JsonValue) -> Cell:
    return Cell(masked(plain_text(value)), masked(value) if isinstance(value, str) else value)


def reproduce_command(config: RunConfig) -> str | None:
    """The command line that composes to exactly these settings; None if there is none in this version.

    It starts from the experiment of the run's name where there is one, and is checked by composing it.
    """
    from rlcore.config.compose import experiment_names

    starts = [config.name, None] if config.name in experiment_names() else [None]
    for experiment in starts:
        overrides = _overrides_from(config, experiment)
        if overrides is not None:
            start = [f"experiment={experiment}"] if experiment else []
            return shlex.join(["millrace", "run", *start, *map(masked, overrides)])
    return None


def _overrides_from(config: RunConfig, experiment: str | None) -> list[str] | None:
    """Overrides that lead from an experiment, or from the defaults, to these settings."""
    from rlcore.config.compose import load_config

    try:
        base = load_config([], experiment=experiment) if experiment else RunConfig()
        groups = []
        if base.data.task != config.data.task:
            groups.append(f"data={config.data.task}")
        if (base.critic is None) != (config.critic is None):
            groups.append(f"critic={'none' if config.critic is None else 'default'}")
        wanted, given = settings_of(config), defaults_of(config)
        given |= {key: value for key, value in settings_of(base).items() if not (groups and key.startswith("data."))}
        given["data.task"] = config.data.task  # chosen as a group
        overrides = {key: value for key, value in wanted.items() if given.get(key, ...) != value}
        for _ in range(2):  # the second time with what the files of the chosen groups say otherwise
            arguments = [*groups, *(f"{key}={_quoted(value)}" for key, value in overrides.items() if key != "critic")]
            found = load_config(arguments, experiment=experiment)
            if found == config:
                return arguments
            said = settings_of(found)
            overrides |= {key: value for key, value in wanted.items() if said.get(key, ...) != value}
    except ConfigError:
        return None
    return None


def _quoted(value: JsonValue) -> str:
    """A value in Hydra's grammar."""
    match value:
        case str() if _BARE.fullmatch(value) and value.lower() not in ("true", "false", "null", "nan", "inf"):
            return value
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case list():
            return f"[{','.join(map(_quoted, value))}]"
        case dict():
            return "{" + ",".join(f"{_quoted(key)}:{_quoted(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)
