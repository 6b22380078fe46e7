"""Where a run comes from: its settings as tables, how it was started, and its lineage."""

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import JsonValue

from rlcore.config import CriticConfig, LoraConfig, RunConfig
from rlcore.config.base import leaves
from rlcore.config.problems import mask_secrets, plain_text
from rlcore.config.run import all_keys
from rlcore.report.document import Block, Cell, Prose, Table, cell, table
from rlcore.report.record import RunRecord

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
        (key, _cell(value), _cell(defaults[key]) if key in defaults else Cell("–"), describe_setting(key))
        for key, value in changed.items()
    ]
    same = [(key, _cell(value), describe_setting(key)) for key, value in settings.items() if key not in changed]
    return (
        table("settings_changed", "Settings that differ from the defaults",
              {"Setting": "code", "Value": "code", "Default": "code", "Meaning": "text"}, differing),
        table("settings_default", f"Settings at their defaults ({len(same)})",
              {"Setting": "code", "Value": "code", "Meaning": "text"}, same, folded=True),
    )  # fmt: skip


@cache
def describe_setting(key: str) -> str:
    """A setting's own documentation, first sentence: where it begins with a choice (`local: ...`), that choice's. A
    name in a free mapping (`tags.owner`) has the mapping's.

    >>> describe_setting("runtime.device"), describe_setting("rollout.samples_per_prompt")
    ('auto: CUDA where a GPU is present.', 'Responses to each prompt')
    """
    while key not in all_keys() and "." in key:
        key = key.rpartition(".")[0]
    found = all_keys().get(key)
    text = (found[0].description or "") if found else ""
    sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(":;")
    before, _, _ = sentence.partition(": ")
    return before if " " in before else sentence


def _cell(value: JsonValue) -> Cell:
    return Cell(mask_secrets(plain_text(value)), mask_secrets(value) if isinstance(value, str) else value)


def reproduction(record: RunRecord) -> Iterator[Block]:
    """How a run was started, and what makes it again."""
    if record.lineage.command:
        yield from (
            Prose("As it was started:"),
            Prose(shlex.join(map(mask_secrets, record.lineage.command)), is_code=True),
        )
    yield Prose(
        "`run.json` in the run's folder has all settings; the table above those that differ from the defaults. "
        f"Seed {record.config.seed} fixes initial weights, order of prompts and every sampled token, "
        f"`data.seed={record.config.data.seed}` the rows. The same versions of torch and transformers, the same kind "
        "of device and the same number of threads give the same numbers; others differ in the last digits, which "
        "sampling turns into other answers."
    )


def lineage(record: RunRecord) -> Iterator[Block]:
    """Stages, code and packages, and checkpoints of a run."""
    found = record.lineage
    if found.stages:
        rows = [
            (stage.name, stage.fingerprint, stage.path,
             Cell(", ".join(f"{key} {value}" for key, value in stage.facts.items()), dict(stage.facts)))
            for stage in found.stages
        ]  # fmt: skip
        yield table("stages", "Stages", {"Stage": "text", "Fingerprint": "code", "Path": "code", "Facts": "text"}, rows)
    commit = found.git_commit + (" + changes" if found.git_dirty else "")
    facts = {**({"git commit": commit} if commit else {}), **found.environment}
    if facts:
        yield table("environment", "Code and packages", {"What": "text", "Version": "code"}, list(facts.items()))
    if record.checkpoints:
        sizes = [(info.name, cell(info.size_bytes / 1e6, unit="MB")) for info in record.checkpoints]
        yield table("checkpoints", "Checkpoints on disk", {"Name": "code", "Size": "number"}, sizes)
    elif not found.stages and not facts:
        yield Prose("Nothing is recorded of where this run comes from.")


ALGORITHMS = {
    "gae": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++ (group baseline)",
    "remax": "ReMax",
    "opo": "OPO",
}


def algorithm_of(config: RunConfig) -> str:
    """The algorithm's usual name."""
    algo = config.algo
    name = ALGORITHMS.get(algo.advantage, algo.advantage)
    return name if algo.policy_loss == "ppo_clip" else f"{name} with {algo.policy_loss}"


def model_of(config: RunConfig) -> str:
    """The model's usual name."""
    model = config.model
    if model.path is not None:
        return model.path.rstrip("/").rpartition("/")[2]
    layers = f"{model.scratch.num_layers} layer{'' if model.scratch.num_layers == 1 else 's'}"
    return f"a model from nothing ({layers} of {model.scratch.hidden_size})"
