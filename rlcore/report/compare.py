"""Parts of a comparison of several runs: differing settings, groups of seeds, findings and tables."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from pydantic import JsonValue
from scipy.special import stdtrit

from rlcore.config.base import covers
from rlcore.config.fingerprint import fixed_settings
from rlcore.config.problems import mask_secrets, plain_text
from rlcore.evaluation.stats import Interval
from rlcore.report.document import NO_VALUE, Cell, Finding, Row, Table, Tile, fixed, signed_interval, table
from rlcore.report.held_out import OTHER_PROBLEMS, paired_runs
from rlcore.report.panels import Groups, num_seeds
from rlcore.report.record import RunRecord, Runs
from rlcore.report.run_sections import algorithm_of, describe_setting, settings_of

MIN_RUNS = 2
LABELS = ("name", "run_id", "tags", "paths", "tracking")
"""The settings that only name a run or its location. A comparison ignores these settings."""
OF_THE_SCORE = (
    "trainer.total_steps",
    *(f"validation.{key}" for key in ("max_problems", "samples_per_problem", "sampling")),
)
"""The settings that can be changed when a run is resumed, but affect the run's last held-out reward. A comparison puts
runs that differ in one of these settings into different groups."""
MAX_KEYS_IN_A_LABEL = 2
CODE = "code"  # the stage of `Origin` with the fingerprint of the user's code


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of a metric over seeds. `mean` has a 95% Student-t interval if there are several seeds."""

    mean: Interval
    deviation: float
    lowest: float
    highest: float
    num_seeds: int


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, tuple[JsonValue, ...]]:
    """Return the settings that differ between runs, each with one value per run. The value is None for a run without
    the setting. The key `code` stands for the fingerprint of the user's code, if every run recorded a fingerprint."""
    codes = [next((one.fingerprint for one in run.lineage.stages if one.name == CODE), None) for run in runs]
    known = zip(runs, codes if all(codes) else [None] * len(runs), strict=True)
    found = [{**settings_of(run.config), CODE: code} for run, code in known]
    keys = dict.fromkeys(key for settings in found for key in settings if key.partition(".")[0] not in LABELS)
    values = {key: tuple(settings.get(key) for settings in found) for key in keys}
    return {
        key: tuple(mask_secrets(value) if isinstance(value, str) else value for value in row)
        for key, row in values.items()
        if any(value != row[0] for value in row)
    }


def groups_of(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs that differ only in their seed, or in settings that can be changed when a run is resumed. However,
    runs that differ in a setting listed in `OF_THE_SCORE` are in different groups. If one or two settings differ
    between groups, a group's label shows their values. If more settings differ, the label is the name or id of the
    group's first run."""
    fixed = {CODE, *OF_THE_SCORE}.union(*(fixed_settings(run.config) for run in runs)) - {"seed"}
    differing = {key: row for key, row in differing_settings(runs).items() if any(covers(name, key) for name in fixed)}
    members: dict[str, list[int]] = {}
    for place in range(len(runs)):
        members.setdefault(json.dumps([row[place] for row in differing.values()]), []).append(place)
    firsts = [places[0] for places in members.values()]
    labels = [runs[first].config.name for first in firsts]
    named = {key: row for key, row in differing.items() if key != CODE}
    if len({json.dumps([row[first] for row in named.values()]) for first in firsts}) < len(firsts):
        named = differing
    if 1 <= len(named) <= MAX_KEYS_IN_A_LABEL:
        labels = [" ".join(f"{key}={plain_text(row[first])}" for key, row in named.items()) for first in firsts]
    elif len(set(labels)) < len(labels):
        labels = list(label_runs([runs[first] for first in firsts]))
    return {label: [runs[place] for place in found] for label, found in zip(labels, members.values(), strict=True)}


def label_runs(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return the runs with their ids as keys. If two runs have the same id, the folders of the runs are the keys."""
    by_id = {run.run_id: run for run in runs}
    return by_id if len(by_id) == len(runs) else {str(run.run_dir): run for run in runs}


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of `values`, which has one value per seed."""
    found = np.asarray(values, dtype=float)
    count, mean = len(found), float(found.mean())
    deviation = float(found.std(ddof=1)) if count > 1 else 0.0
    half = float(stdtrit(count - 1, 0.975)) * deviation / np.sqrt(count) if count > 1 else 0.0
    return Spread(Interval(mean, mean - half, mean + half), deviation, float(found.min()), float(found.max()), count)


def _final_scores(group: Sequence[RunRecord]) -> dict[str, list[float]]:
    """Return each held-out metric at the last validation, with one value per seed. The value is the mean over the runs
    with that seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in group:
        for statistic in run.core_statistics:
            if curve := run.held_out(statistic):
                found.setdefault(statistic, {}).setdefault(run.config.seed, []).append(curve[-1][1].value)
    return {statistic: [float(np.mean(each)) for each in by_seed.values()] for statistic, by_seed in found.items()}


def _reward_of(group: Sequence[RunRecord]) -> Spread | None:
    values = _final_scores(group).get(group[0].reward_statistic)
    return spread_of(values) if values else None


def title_of(groups: Groups) -> str:
    """Return the title of the comparison, in one line."""
    names = list(dict.fromkeys(run.config.name for group in groups.values() for run in group))
    if len(groups) == 1:
        (group,) = groups.values()
        count = num_seeds(group)
        return f"{names[0]}: {count} seeds" if count > 1 else f"{names[0]}: {len(group)} runs of one seed"
    return f"{names[0]}: {len(groups)} settings" if len(names) == 1 else f"{names[0]} and {len(groups) - 1} more"


def tile_of(label: str, group: Sequence[RunRecord]) -> Tile:
    """Return a tile with the held-out reward of a group of runs: its mean and its range over seeds."""
    reward = _reward_of(group)
    if reward is None:
        return Tile(label, NO_VALUE, "no validation")
    ends = f"{fixed(reward.lowest)} to {fixed(reward.highest)}, {reward.num_seeds} seeds"
    return Tile(label, fixed(reward.mean.value), ends if reward.num_seeds > 1 else "1 seed")


def comparison_findings(runs: Runs, groups: Groups) -> Iterator[Finding]:
    """Yield the findings about the spread over seeds, the best group of runs, and each run's difference from the first
    run."""
    rule = "Mean, lowest and highest of the last held-out reward of each seed."
    for label, group in groups.items():
        found = _reward_of(group)
        if found is not None and found.num_seeds > 1:
            ends = f"from {fixed(found.lowest)} to {fixed(found.highest)}"
            text = f"{label}: mean {group[0].reward_statistic} {fixed(found.mean.value)}, seeds {ends}."
            yield Finding("Over seeds", f"{found.num_seeds} seeds", "", text, rule, {label: asdict(found)})
    if len(groups) > 1:
        yield _best(groups)
    yield _differences_from_first(runs)


def _best(groups: Groups) -> Finding:
    rule = (
        "The setting with the highest mean of the last held-out reward over seeds; better than another if its lowest "
        "seed is above the other's highest, with at least two seeds each."
    )
    finding = partial(Finding, "Best setting", rule=rule)
    found = {label: spread for label, group in groups.items() if (spread := _reward_of(group)) is not None}
    if len(found) < MIN_RUNS:
        return finding("not known", "muted", "Fewer than two settings have a held-out validation.")
    (first, best), (second, next_best), *_ = sorted(found.items(), key=lambda pair: -pair[1].mean.value)
    means = {label: asdict(spread.mean) for label, spread in found.items()}
    text = f"{first} has {fixed(best.mean.value)}, and {second} has {fixed(next_best.mean.value)}"
    if unfinished := [label for label in (first, second) if not all(run.is_complete for run in groups[label])]:
        text += f" (not finished: {', '.join(unfinished)})"
    if paired_runs(groups[first][0], groups[second][0])[1] == OTHER_PROBLEMS:  # a group's runs have equal settings
        return finding("not known", "muted", f"{text}, but on different held-out problems.", numbers=means)
    if min(best.num_seeds, next_best.num_seeds) < MIN_RUNS:
        text += "; a comparison of settings needs at least two seeds of each."
        return finding("one seed is too few", "watch", text, numbers=means)
    if best.lowest > next_best.highest:
        return finding(first, "good", f"{text}; no seed overlaps.", numbers=means)
    return finding("no clear difference", "watch", f"{text}; their seeds overlap.", numbers=means)


def _differences_from_first(runs: Runs) -> Finding:
    rule = "Paired difference of the held-out reward from the first run; a difference if its 95% interval excludes 0."
    (base, first), *others = runs.items()
    gains = {
        label: row.paired.difference
        for label, run in others
        for row in paired_runs(first, run)[0]
        if row.statistic == run.reward_statistic
    }
    finding = partial(Finding, "Against the first run", rule=rule)
    if not gains:
        return finding("not known", "muted", "No other run was evaluated on the same problems as the first run.")
    apart = sum(gain.excludes_zero for gain in gains.values())
    text = "; ".join(f"{name} minus {base}: {signed_interval(gain)}" for name, gain in gains.items()) + "."
    if not_compared := [label for label, _ in others if label not in gains]:
        text += f" Not evaluated on the same problems: {', '.join(not_compared)}."
    values = {label: asdict(gain) for label, gain in gains.items()}
    return finding(f"{apart} of {len(gains)} differ", "" if apart else "watch", text, numbers=values)


def run_table(runs: Runs, groups: Groups) -> Table:
    """Return a table with a row for each run: setting, seed, steps, held-out reward, tokens and time."""
    setting = {id(run): label for label, group in groups.items() for run in group}
    rows = []
    for label, run in runs.items():
        held_out: list[Interval | None] = [found for _, found in run.held_out(run.reward_statistic)] or [None]
        steps = Cell(f"{run.last_step} of {run.config.total_steps}", run.last_step)
        identity = label, setting[id(run)], algorithm_of(run.config), run.config.seed
        totals = (None if series is None else series.iloc[-1] for series in (run.tokens, run.seconds))
        rows.append((*identity, steps, held_out[0], held_out[-1], *totals))
    return table("runs", "Results by run",
                 {"Run": "code", "Setting": "text", "Algorithm": "text", "Seed": "number", "Steps": "number",
                  "Held-out reward, first": "number", "last": "number", "Tokens": "number",
                  "Training time": "seconds"}, rows)  # fmt: skip


def settings_table(runs: Runs) -> Table:
    """Return a table of the settings that differ, with the value of each run."""
    differing = differing_settings(list(runs.values()))
    meanings = {key: describe_setting(key) for key in differing} | {CODE: "Fingerprint of the user's code"}
    rows: list[Row] = [
        (key, *(Cell(plain_text(each), each) for each in row), meanings[key]) for key, row in differing.items()
    ]
    note = "All other settings are equal; names, tags, paths and tracking are not compared. "
    note += "Settings that a resume may change, such as runtime.*, do not separate groups."
    return table("settings", "Settings that differ",
                 {"Setting": "code", **dict.fromkeys(runs, "code"), "Meaning": "text"}, rows, note)  # fmt: skip


def seed_table(groups: Groups) -> Table:
    """Return a table of the last held-out metrics of each group of runs: mean, deviation and range over seeds."""
    rows = []
    for label, group in groups.items():
        for statistic, values in _final_scores(group).items():
            found = spread_of(values)
            mean, deviation = (found.mean, found.deviation) if found.num_seeds > 1 else (found.mean.value, None)
            rows.append((label, statistic, found.num_seeds, mean, deviation, found.lowest, found.highest))
    note = "Mean with the 95% interval of Student's t over seeds; runs of the same seed are averaged first."
    return table("seeds", "Over seeds",
                 {"Setting": "text", "Metric": "code", "Seeds": "number", "Mean": "score", "Deviation": "score",
                  "Lowest": "score", "Highest": "score"}, rows, note)  # fmt: skip
