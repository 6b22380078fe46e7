"""Parts of a report about one run: settings, origin and phases of a step."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import JsonValue

from rlcore.config import CriticConfig, LoraConfig, RunConfig
from rlcore.config.base import leaves
from rlcore.config.problems import mask_secrets, plain_text
from rlcore.config.run import all_keys
from rlcore.report.document import Block, Cell, Kind, Prose, Row, Table, compact, table
from rlcore.report.plots import LIGHT, MAX_POINTS, Series, format_axes, thin
from rlcore.report.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NULL_SECTIONS: Mapping[str, type[CriticConfig | LoraConfig]] = {"critic": CriticConfig, "model.lora": LoraConfig}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return all settings as JSON values by dotted key, such as `trainer.total_steps`."""
    return leaves(config.model_dump(mode="json"))


def defaults_of(config: RunConfig) -> dict[str, Any]:
    """Return the default value of every setting that the run's task has, by dotted key. The optional sections `critic`
    and `model.lora` are included."""
    plain = RunConfig().model_dump(mode="json")
    found = leaves({**plain, "data": type(config.data)().model_dump(mode="json")})
    found["data.task"] = plain["data"]["task"]
    for section, kind in _NULL_SECTIONS.items():
        found |= leaves(kind().model_dump(mode="json"), f"{section}.")
    return found


def settings_table(config: RunConfig) -> Table:
    """Return a table of the run's settings that differ from the defaults of its task."""
    defaults = defaults_of(config)
    rows = [
        (key, _cell(value), _cell(defaults[key]) if key in defaults else Cell("–"), describe_setting(key))
        for key, value in settings_of(config).items()
        if defaults.get(key, ...) != value and key != "paths.root"
    ]
    columns: dict[str, Kind] = {"Setting": "code", "Value": "code", "Default": "code", "Meaning": "text"}
    note = "`run.json` in the run's folder has all settings."
    return table("settings_changed", "Settings that differ from the defaults", columns, rows, note)


def describe_setting(key: str) -> str:
    """Return the first clause of a setting's documentation. A key such as `tags.owner` has the documentation of `tags`.

    >>> describe_setting("runtime.device"), describe_setting("tags.owner") == describe_setting("tags")
    ('The device of the workers.', True)
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


def origin(record: RunRecord) -> Iterator[Block]:
    """Yield the command that started a run, a table of its stages, and a table of its code and package versions."""
    found = record.lineage
    if found.command:
        yield Prose("Started with:")
        yield Prose(shlex.join(map(mask_secrets, found.command)), is_code=True)
    if found.stages:
        rows = [
            (stage.name, stage.fingerprint, stage.path,
             Cell(", ".join(f"{key} {compact(value) if isinstance(value, float) else value}"
                            for key, value in stage.facts.items()), dict(stage.facts)))
            for stage in found.stages
        ]  # fmt: skip
        yield table("stages", "Stages", {"Stage": "text", "Fingerprint": "code", "Path": "code", "Facts": "text"}, rows)
    commit = found.git_commit + (" + changes" if found.git_dirty else "")
    if facts := {**({"git commit": commit} if commit else {}), **found.environment}:
        yield table("environment", "Code and packages", {"Component": "text", "Version": "code"}, list(facts.items()))


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
    """Return the common name of the algorithm, such as PPO."""
    if config.is_supervised:
        return "SFT"
    algo = config.algo
    name = ALGORITHMS.get(algo.advantage, algo.advantage)
    return name if algo.policy_loss == "ppo_clip" else f"{name} with {algo.policy_loss}"


def model_of(config: RunConfig) -> str:
    """Return a short name of the model."""
    if (path := config.model.path) is not None:
        return path.rstrip("/").rpartition("/")[2]
    shape = config.model.scratch
    layers = f"{shape.num_layers} layer{'' if shape.num_layers == 1 else 's'}"
    return f"randomly initialized model ({layers} of {shape.hidden_size})"


PHASES: Mapping[str, tuple[str, str]] = {
    "gen": ("Generation", "blue"),
    "environment": ("Environment", "lime"),
    "reward": ("Scoring", "orange"),
    "old_log_prob": ("Old log-probabilities", "teal"),
    "ref": ("Reference forward pass", "purple"),
    "teacher": ("Teacher forward pass", "ink"),
    "values": ("Values", "pink"),
    "adv": ("Advantages", "muted"),
    "update_critic": ("Critic update", "red"),
    "update_actor": ("Policy update", "green"),
    "supervise": ("Supervised update", "green"),
    "update_weights": ("Weight sync", "sand"),
    "other": ("Between phases", "grey"),
}
"""The title and color of each phase of a step. The phase `other` is the time of a step outside all other phases."""


def phase_seconds(record: RunRecord) -> pd.DataFrame:
    """Return a table with the seconds of each phase (columns) at each step (rows)."""
    whole = record.series("timing_s/step")
    if whole is None:
        return pd.DataFrame()
    measured = {f"timing_s/{name}": name for name in PHASES}
    found = record.metrics.reindex(index=whole.index, columns=list(measured)).fillna(0.0).rename(columns=measured)
    found = found.loc[:, found.any()]
    return found.assign(other=(whole - found.sum(axis=1)).clip(lower=0.0))


def mean_phases(record: RunRecord) -> dict[str, float]:
    """Return the mean seconds of each phase over all steps except the first, or those of the only step. The sum over
    phases is the mean time of a step."""
    found = phase_seconds(record)
    return {str(name): float(seconds) for name, seconds in found.iloc[min(1, len(found) - 1) :].mean().items()}


def draw_phases(record: RunRecord, figure: "Figure") -> None:
    """Draw the seconds of each phase at each step, stacked."""
    seconds = phase_seconds(record)
    if not len(seconds):
        return
    axes = figure.subplots()
    phases: list[Series] = [thin(seconds[name], MAX_POINTS // 4) for name in seconds]
    labels = [PHASES[str(name)][0] for name in seconds]
    colors = [LIGHT[PHASES[str(name)][1]] for name in seconds]
    if len(seconds) == 1:
        tops = seconds.iloc[0].cumsum()
        axes.bar(seconds.index.repeat(len(tops)), seconds.iloc[0], 0.4, tops - seconds.iloc[0], color=colors,
                 label=labels)  # fmt: skip
    else:
        axes.stackplot(phases[0].index, phases, colors=colors, labels=labels, alpha=0.88, linewidth=0)
    format_axes(axes, y="seconds per step")
    axes.set_ylim(bottom=0, top=1.15 * float(seconds.sum(axis=1).quantile(0.99)))


def phase_table(record: RunRecord) -> Table:
    """Return a table with the mean seconds of each phase of a step. The table also has rows for checkpoints and
    validations, which are not part of a step."""
    phases = mean_phases(record)
    total = sum(phases.values())
    rows: list[Row] = [
        (PHASES[name][0], seconds, seconds / total, "" if name == "other" else f"timing_s/{name}")
        for name, seconds in phases.items()
    ]
    if phases:
        rows.append(("Step", record.step_s, 1.0, "timing_s/step"))
    for name, title in (("save_checkpoint", "Checkpoint"), ("testing", "Validation")):
        if (series := record.series(f"timing_s/{name}")) is not None:
            times = "once" if len(series) == 1 else f"{len(series)} times"
            if name == "save_checkpoint":  # every step has this metric, mostly 0
                times = f"mean over {len(series)} steps"
            rows.append((f"{title} ({times}, not in the step)", float(series.mean()), "", f"timing_s/{name}"))
    columns: dict[str, Kind] = {"Phase": "text", "Mean": "seconds", "Share": "share", "Metric": "code"}
    return table("phases", "Phases of a step", columns, rows, "Without the first step (warm-up).")
