"""From a sweep's file to a checked `Sweep`: every mistake in it and in its points is told at once."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from rlcore.config import sweep
from rlcore.config.base import FILE_ENDINGS, keys_of
from rlcore.config.check import rule_of
from rlcore.config.compose import CONF_DIR, GROUPS, compose, group_members, judge_settings
from rlcore.config.fingerprint import fingerprint, lasting_settings, run_id
from rlcore.config.problems import Problem, did_you_mean, settings_error, shown
from rlcore.config.run import RunConfig, all_keys, is_key, section_names
from rlcore.config.sweep import Budget, Point, SweepSpec, shown_point, written

SWEEPS_DIR = CONF_DIR / "sweep"
_WORDS = tuple(name.rpartition(".")[2] for name, _ in keys_of(SweepSpec)) + tuple(SweepSpec.model_fields)
MOST_POINTS = 10_000
NOT_SWEPT = {
    "seed": "Write the seeds as seeds: [1, 2]",
    "experiment": "A sweep varies one experiment; write a sweep for each",
    "name": "It names a run and changes nothing of it",
    "run_id": "It names a run and changes nothing of it",
    "tags": "They label a run and change nothing of it",
    "paths": "All runs of a sweep lie under one root; set it for the sweep: paths.root=...",
    "tracking": "All runs of a sweep are tracked in one place; set it for the sweep",
}
"""Keys that no point may have, and what to do instead."""
_STAND_INS: Mapping[tuple[int | str, ...], JsonValue] = {
    ("name",): "unnamed",
    ("random", "num_points"): 1,
    ("optuna", "num_points"): 1,
}
"""Values for required keys that are missing or wrong, by their path, so that the rest of the file can be checked."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has been checked.

    `base` are the settings without any point, `points` all of them in order (none where Optuna chooses them during the
    sweep), `rungs` the steps at which points are compared, ending with the last step.
    """

    spec: SweepSpec
    overrides: tuple[str, ...]
    base: RunConfig
    points: tuple[Point, ...]
    rungs: tuple[int, ...]

    @property
    def sweep_id(self) -> str:
        """Name of the sweep's folder. A budget, or more points, go on with the same sweep."""
        spec = self.spec.model_dump(mode="json", exclude={"budget", "experiment", "overrides"})
        for search in ("random", "optuna"):
            if spec[search] is not None:
                del spec[search]["num_points"]
        base = self.base
        more = {"name": base.name, "total_steps": base.trainer.total_steps, "metric": self.metric_of(base)}
        digest = fingerprint("sweep", {"spec": spec, "base": lasting_settings(base), **more})
        return f"{self.spec.name}-{digest[:8]}"

    @property
    def num_points(self) -> int:
        """Points that are wanted; the sweep's study may know more, of an earlier call."""
        return len(self.points) if self.spec.optuna is None else self.spec.optuna.num_points

    def overrides_of(self, point: Point, seed: int) -> list[str]:
        """The settings of one run, beyond the experiment."""
        return [*self.overrides, *written(point), f"seed={seed}"]

    def idle_settings(self) -> list[str]:
        """A line for each setting, shared or swept, that has no effect in any point."""
        swept = {key for point in self.points for key in point} | self.spec.space.keys()
        return compose(self.overrides, experiment=self.spec.experiment).idle_settings(swept)

    def metric_of(self, config: RunConfig) -> str:
        """The objective's name below `val-core/<data source>/`."""
        return self.spec.objective.metric or f"reward/mean@{config.validation.samples_per_problem}"


def load_sweep(source: str, overrides: Sequence[str] = (), *, budget: Budget | None = None) -> Sweep:
    """Read a sweep and check it, and every point, without loading anything heavy.

    Args:
        source: a name in `conf/sweep`, or the path of a file that ends in .yaml.
        overrides: settings that all points share; one that the file has too goes before the file's.
        budget: replaces values of the file's budget.

    Raises:
        ConfigError: one message with every mistake.
    """
    problems: list[Problem] = []
    spec = _parsed(_content(source), problems)
    if budget is not None:
        changed = spec.budget.model_copy(update=budget.model_dump(exclude_none=True))
        spec = spec.model_copy(update={"budget": changed})
    if spec.experiment is not None and spec.experiment.endswith(FILE_ENDINGS):
        # Workers may have another working directory.
        spec = spec.model_copy(update={"experiment": str(Path(spec.experiment).absolute())})
    replaced = {_key(text) for text in overrides}
    shared = (*(text for text in spec.overrides if _key(text) not in replaced), *overrides)
    of_search = [] if problems and not spec.searches else list(_of_search(spec))
    points = sweep.points_of(spec) if not of_search else []
    # A space that is empty because its entries are wrong has their problems already.
    of_search = [one for one in of_search if not any(told.key.startswith(f"{one.key}.") for told in problems)]
    problems += [*of_search, *_of_keys(spec, points), *_of_seeds(spec, shared)]
    base, configs = _judged(spec, shared, points, problems)
    total = base.trainer.total_steps
    every = spec.pruning.every_steps if spec.pruning is not None else total
    rungs = (*range(every, total, every), total)
    if not problems and spec.optuna is None:
        problems += _twice(points, configs)
    problems += [*_of_metric(spec, configs), *_of_rungs(spec, rungs, configs)]
    if problems:
        raise settings_error(list(dict.fromkeys(problems)))
    return Sweep(spec, shared, base, tuple(points), rungs)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _judged(
    spec: SweepSpec, shared: Sequence[str], points: Sequence[Point], problems: list[Problem]
) -> tuple[RunConfig, list[RunConfig]]:
    """The sound parts of the settings that all points share, and of those of each point; adds their problems."""
    swept = {key for point in points for key in point} | spec.space.keys()
    given = [key for key in map(_key, shared) if key in swept]
    problems += [Problem(key, "is swept, and given for all points", key, "Keep one") for key in given]
    told = {problem.key.removeprefix(f"{search}.") for problem in problems for search in sweep.SEARCHES}
    every = sweep.edges_of(spec.space) if spec.optuna is not None else points
    checked = [{key: value for key, value in point.items() if key not in told} for point in every]
    judged = judge_settings([shared, *([*shared, *written(point)] for point in checked)], experiment=spec.experiment)
    (base, of_all), of_points = judged[0], judged[1:]
    problems += of_all
    problems += _of_points(checked, [[one for one in found if one not in of_all] for _, found in of_points])
    return base, [config for config, _ in of_points]


# ---------------------------------------------------------------------- the file


def _content(source: str) -> dict[str, Any]:
    file = Path(source) if source.endswith(FILE_ENDINGS) else SWEEPS_DIR / f"{source}.yaml"
    if not file.is_file():
        names = group_members("sweep")
        remedy = f"{did_you_mean(source, names)}There are {', '.join(names)}"
        raise settings_error([Problem("sweep", "must be the path of a file, or a name in conf/sweep", source, remedy)])
    try:
        found = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        problem = Problem("sweep", f"cannot be read ({reason})", str(file), "Mend the file; docs/sweeps.md")
        raise settings_error([problem]) from error
    if not isinstance(found, dict):
        raise settings_error([Problem("sweep", "must be a mapping", str(file), "docs/sweeps.md shows the form")])
    content = {str(name): value for name, value in found.items()}
    sections = content.keys() & {*RunConfig.model_fields} - {*SweepSpec.model_fields}
    if "defaults" in content or (sections and not content.keys() & {*sweep.SEARCHES, "experiment"}):
        remedy = f"Run it by millrace run experiment={source}; docs/sweeps.md shows a sweep's file"
        raise settings_error([Problem("sweep", "must be a sweep's file, and this is an experiment's", source, remedy)])
    return content


def _parsed(content: Mapping[str, Any], problems: list[Problem]) -> SweepSpec:
    """The file without its mistakes, which are added to `problems`."""
    content, is_first = json.loads(json.dumps(content, default=str)), True  # its keys are texts, as in pydantic's paths
    while True:
        text = json.dumps(content)
        try:
            # Strict JSON, as for settings: neither true nor "5" is a number.
            return SweepSpec.model_validate_json(text, strict=True)
        except ValidationError as error:
            details = error.errors(include_url=False)
        if is_first:  # later ones follow from the removals
            problems += map(_of_detail, details)
        is_first = False
        places = {_place(content, detail["loc"]) for detail in details}
        for path in sorted(places, reverse=True):  # the entries of a list from its end
            _take_out(content, path)
        if json.dumps(content) == text:
            raise settings_error(problems)


def _place(content: Any, loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """Path of a mistake in the file; pydantic's has the members of unions too, which are no part of it."""
    path: list[int | str] = []
    for part in loc:
        known = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
        if part in known:
            content = content[part]
            path.append(part)
    return tuple(loc) if tuple(loc) in _STAND_INS else tuple(path)


def _take_out(content: Any, path: tuple[int | str, ...]) -> None:
    """Remove one part, or put its stand-in there."""
    *outer, last = path
    for part in outer:
        content = content[part]
    if path in _STAND_INS:
        content[last] = _STAND_INS[path]
    else:
        del content[last]


def _of_detail(detail: ErrorDetails) -> Problem:
    loc = [str(part) for part in detail["loc"] if part not in (sweep.VALUES, sweep.RANGE)]
    got, kind, key = detail["input"], detail["type"], ".".join(loc)
    if kind == "tuple_type" and sweep.VALUES in detail["loc"]:
        return Problem(key, "must be a list of values, or a range", shown(got), "Write [1, 2] or {low: 1, high: 2}")
    if kind == "extra_forbidden":
        words = tuple(SweepSpec.model_fields) if len(loc) == 1 else _WORDS
        remedy = f"{did_you_mean(loc[-1], words)}docs/sweeps.md lists what a sweep may say"
        return Problem(key, "there is nothing of that name in a sweep", shown(got), remedy)
    return Problem(key, "is missing" if kind == "missing" else rule_of(detail), shown(got), "See docs/sweeps.md")


# ---------------------------------------------------------------------- checks


def _of_search(spec: SweepSpec) -> Iterable[Problem]:
    """The sweep has one way to choose points, and something to try."""
    said = spec.searches
    if not said:
        remedy = f"Say one of {', '.join(sweep.SEARCHES)}; docs/sweeps.md shows each"
        return [Problem("sweep", "is empty: it says nothing to try", spec.name, remedy)]
    if len(said) > 1:
        return [Problem("sweep", "says more than one way to choose points", ", ".join(said), "Keep one of them")]
    problems = []
    spread: Mapping[str, Any] = spec.grid if spec.grid is not None else spec.space
    if (spec.grid is not None and not spec.grid) or (spec.list is not None and not spec.list):
        problems.append(Problem(said[0], "is empty: there is nothing to try", "nothing", "Name a setting and values"))
    for number, point in enumerate(spec.list or (), 1):
        if not point:
            problems.append(Problem(f"list.{number}", "is an empty point", "{}", "Name a setting and its value"))
    for key, values in spread.items():
        if isinstance(values, tuple) and not values:
            problems.append(Problem(f"{said[0]}.{key}", "is empty: there is nothing to try", "[]", "Name its values"))
    size = math.prod(len(values) for values in (spec.grid or {}).values())
    if size > MOST_POINTS:
        remedy = "Draw some of them by random or optuna"
        problems.append(Problem("grid", f"must have at most {MOST_POINTS:,} points", f"{size:,}", remedy))
    return [*problems, *_of_pruning(spec)]


def _of_pruning(spec: SweepSpec) -> Iterable[Problem]:
    """What is said of the pruner belongs to it, and it has something to compare with."""
    pruning = spec.pruning
    if pruning is None:
        return
    if pruning.pruner == "paired":
        if pruning.options:
            got, remedy = shown(pruning.options), "Leave them out, or name one of Optuna's pruners"
            yield Problem("pruning.options", "are arguments of Optuna's pruners, and pruner is paired", got, remedy)
    elif "confidence" in pruning.model_fields_set:
        remedy = "Leave it out, or say pruner: paired"
        yield Problem("pruning.confidence", "is read by pruner: paired alone", shown(pruning.confidence), remedy)
    if pruning.pruner in ("median", "percentile") and spec.optuna is None:
        rule = f"compares with finished points, and those of {spec.searches[0]} are trained side by side"
        yield Problem("pruning.pruner", rule, pruning.pruner, "Say paired or successive_halving")
    needed = {"successive_halving": "min_resource", "hyperband": "max_resource"}.get(pruning.pruner)
    if needed is not None and spec.optuna is None and not isinstance(pruning.options.get(needed), int):
        rule = f"must say {needed} in steps: Optuna takes it from finished points, and there are none when it compares"
        yield Problem("pruning.options", rule, shown(pruning.options), f"Write options: {{{needed}: STEPS}}")


def _of_keys(spec: SweepSpec, points: Sequence[Point]) -> Iterable[Problem]:
    """Every key that is swept is a setting that may be swept."""
    keys = dict.fromkeys([*(key for point in points for key in point), *spec.space])
    for key in keys:
        owner = key.partition(".")[0]
        name = f"{spec.searches[0]}.{key}"
        if owner in NOT_SWEPT:
            yield Problem(name, "cannot be swept", key, NOT_SWEPT[owner])
        elif not (key in GROUPS or is_key(key) or key in section_names()):
            remedy = f"{did_you_mean(key, [*all_keys(), *GROUPS])}docs/settings.md lists every key"
            yield Problem(name, "there is no such setting", key, remedy)


def _of_seeds(spec: SweepSpec, shared: Sequence[str]) -> Iterable[Problem]:
    """The seeds differ, and are given in one place."""
    twice = sorted({seed for seed in spec.seeds if spec.seeds.count(seed) > 1})
    if twice:
        yield Problem("seeds", "must differ", shown(spec.seeds), f"Name {', '.join(map(str, twice))} once")
    wrong = [seed for seed in spec.seeds if not 0 <= seed < 2**31]
    if wrong:
        yield Problem("seeds", "must be from 0 to 2**31 - 1", shown(wrong), "Choose other seeds")
    for text in shared:
        if _key(text) in ("seed", "run_id"):
            yield Problem("overrides", "seed and run_id differ from run to run", text, "Say seeds: [...] instead")


def _of_points(points: Sequence[Point], found: Sequence[Sequence[Problem]]) -> Iterable[Problem]:
    """Each mistake once, with the points that have it."""
    where: dict[Problem, list[Point]] = {}
    for point, problems in zip(points, found, strict=True):
        for problem in problems:
            where.setdefault(problem, []).append(point)
    for problem, owners in where.items():
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        rule = f"{problem.rule} (point {shown_point(owners[0])}{more})"
        yield Problem(problem.key, rule, problem.got, problem.remedy)


def _twice(points: Sequence[Point], configs: Sequence[RunConfig]) -> Iterable[Problem]:
    """Points with the same run id would be the same run."""
    first: dict[str, Point] = {}
    for point, config in zip(points, configs, strict=True):
        before = first.setdefault(run_id(config), point)
        if before is point:
            continue
        got = shown_point(point) if before == point else f"{shown_point(before)} and {shown_point(point)}"
        rule = "has the same point twice" if before == point else "has two points that are the same run"
        remedy = "Leave one out; what differs may not change the numbers of a run, see docs/sweeps.md"
        yield Problem("sweep", rule, got, "Leave one out" if before == point else remedy)


def _of_metric(spec: SweepSpec, configs: Iterable[RunConfig]) -> Iterable[Problem]:
    """The validation of each point has the figure by which points are compared."""
    metric = spec.objective.metric
    for config in configs:
        k = config.validation.samples_per_problem
        known = [f"reward/{name}@{k}" for name in ("mean", "pass", "pass_all", "maj")] + [f"acc/mean@{k}"]
        known += ["reward/greedy", "acc/greedy"] if config.validation.greedy else []
        if metric is not None and metric not in known:
            remedy = f"{did_you_mean(metric, known)}There are {', '.join(known)}"
            yield Problem("objective.metric", "must be a figure of the validation", metric, remedy)


def _of_rungs(spec: SweepSpec, rungs: Sequence[int], configs: Iterable[RunConfig]) -> Iterable[Problem]:
    """There is a checkpoint and a validation where points are compared."""
    early = rungs[:-1]
    key = "pruning.every_steps"
    if spec.pruning is not None and not early:
        remedy = "Lower it, or leave out the early stopping"
        yield Problem(key, "must be below trainer.total_steps", str(rungs[-1]), remedy)
    for config in configs:
        if config.trainer.total_steps != rungs[-1] and early:
            rule = "must be the same for all points where poor ones are stopped early"
            yield Problem("trainer.total_steps", rule, str(config.trainer.total_steps), "Do not sweep it")
        for name, every in (("trainer.steps_per_chunk", config.trainer.steps_per_chunk),
                            ("validation.every_steps", config.validation.every_steps)):  # fmt: skip
            if early and (every == 0 or early[0] % every):
                remedy = f"Add {name}={early[0]} to overrides"
                yield Problem(key, f"must be a multiple of {name} ({every})", str(early[0]), remedy)
