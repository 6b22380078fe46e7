"""Reading and checking of a sweep's file, first its form, then the settings of its points."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from rlcore.config import sweep
from rlcore.config.base import FILE_ENDINGS, keys_of
from rlcore.config.check import rule_text
from rlcore.config.compose import CONF_DIR, GROUPS, compose, compose_many, group_members
from rlcore.config.fingerprint import fingerprint, fixed_settings, run_id
from rlcore.config.problems import Problem, did_you_mean, format_value, settings_error
from rlcore.config.run import RunConfig, all_keys, is_key, section_names
from rlcore.config.sweep import Budget, Point, SweepSpec, format_point, point_overrides

SWEEPS_DIR = CONF_DIR / "sweep"
_WORDS = tuple(name.rpartition(".")[2] for name, _ in keys_of(SweepSpec)) + tuple(SweepSpec.model_fields)
MAX_POINTS = 10_000
NOT_SWEPT = {
    "seed": "Write the seeds as seeds: [1, 2]",
    "experiment": "A sweep varies one experiment; write a sweep for each",
    "name": "It names a run and changes nothing of it",
    "run_id": "It names a run and changes nothing of it",
    "tags": "They label a run and change nothing of it",
    "paths": "All runs of a sweep have one root; set it for the sweep: paths.root=...",
    "tracking": "All runs of a sweep are tracked in one place; set it for the sweep",
}
"""Keys that no point may have, and the remedy."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep.

    `base`: the settings without any point. `points`: those of a grid or a list in order, none of a search.
    """

    spec: SweepSpec
    overrides: tuple[str, ...]
    base: RunConfig
    points: tuple[Point, ...]

    @property
    def sweep_id(self) -> str:
        """Name of the sweep's folder. It does not depend on the budget or the number of points of a search."""
        spec = self.spec.model_dump(mode="json", exclude={"budget", "experiment", "overrides"})
        for search in ("random", "optuna"):
            if spec[search] is not None:
                del spec[search]["num_points"]
        base = self.base
        more = {"name": base.name, "total_steps": base.trainer.total_steps, "metric": self.metric_of(base)}
        digest = fingerprint("sweep", {"spec": spec, "base": fixed_settings(base), **more})
        return f"{self.spec.name}-{digest[:8]}"

    @property
    def folder(self) -> Path:
        """The sweep's folder."""
        return Path(self.base.paths.root).resolve() / "sweeps" / self.sweep_id

    @property
    def num_points(self) -> int:
        """Requested points. The sweep's study may have more from an earlier call."""
        return len(self.points) if self.spec.search is None else self.spec.search.num_points

    def rungs(self, config: RunConfig) -> tuple[int, ...]:
        """Return the steps at which a point with these settings is compared, ending with its last step."""
        total = config.trainer.total_steps
        every = total if self.spec.pruning is None else self.spec.pruning.every_steps
        return (*range(every, total, every), total)

    def overrides_of(self, point: Point, seed: int) -> list[str]:
        """Return the settings of one run on top of the experiment."""
        return [*self.overrides, *point_overrides(point), f"seed={seed}"]

    def unused_settings(self) -> list[str]:
        """Return a line for each setting, shared or swept, that has no effect in any point."""
        swept = {key for point in self.points for key in point} | self.spec.space.keys()
        return compose(self.overrides, experiment=self.spec.experiment).unused_settings(swept)

    def metric_of(self, config: RunConfig) -> str:
        """Return the objective's name below `val-core/<data source>/`."""
        return self.spec.objective.metric or f"reward/mean@{config.validation.samples_per_problem}"


def load_sweep(source: str, overrides: Sequence[str] = (), *, budget: Budget | None = None) -> Sweep:
    """Read a sweep and check it, and every point, without heavy imports.

    Args:
        source: a name in `conf/sweep`, or the path of a file that ends in .yaml.
        overrides: settings that all points share. They replace the file's.
        budget: replaces values of the file's budget.

    Raises:
        ConfigError: one message with every mistake in the file, or if there is none, in the settings.
    """
    spec = _parse(_content(source))
    if budget is not None:
        changed = spec.budget.model_copy(update=budget.model_dump(exclude_none=True))
        spec = spec.model_copy(update={"budget": changed})
    if spec.experiment is not None and spec.experiment.endswith(FILE_ENDINGS):
        # Workers may have another working directory.
        spec = spec.model_copy(update={"experiment": str(Path(spec.experiment).absolute())})
    replaced = {_key(text) for text in overrides}
    shared = (*(text for text in spec.overrides if _key(text) not in replaced), *overrides)
    if problems := [*_search_problems(spec), *_key_problems(spec, shared), *_seed_problems(spec, shared)]:
        raise settings_error(problems)
    points = sweep.points_of(spec)
    tried = points or sweep.edge_points(spec.space)
    judged = compose_many(
        [shared, *([*shared, *point_overrides(point)] for point in tried)], experiment=spec.experiment
    )
    (base, of_all), of_points = judged[0], judged[1:]
    found = Sweep(spec, shared, base, tuple(points))
    configs = [config for config, _ in of_points]
    problems = [*of_all, *_point_problems(tried, [[one for one in more if one not in of_all] for _, more in of_points])]
    if not problems:
        problems += _duplicate_problems(tried, configs)
    problems += [*_metric_problems(spec, configs), *_rung_problems(found, configs)]
    if problems:
        raise settings_error(list(dict.fromkeys(problems)))
    return found


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


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


def _parse(content: Mapping[str, Any]) -> SweepSpec:
    """Parse the file to a `SweepSpec`, or raise one error with all mistakes in its form."""
    try:
        # Strict JSON, as for settings: neither true nor "5" is a number.
        return SweepSpec.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        raise settings_error([_form_problem(detail) for detail in error.errors(include_url=False)]) from None


def _form_problem(detail: ErrorDetails) -> Problem:
    loc = [str(part) for part in detail["loc"] if part not in (sweep.VALUES, sweep.RANGE)]
    got, kind, key = detail["input"], detail["type"], ".".join(loc)
    if kind == "tuple_type" and sweep.VALUES in detail["loc"]:
        return Problem(
            key, "must be a list of values, or a range", format_value(got), "Write [1, 2] or {low: 1, high: 2}"
        )
    if kind == "extra_forbidden":
        words = tuple(SweepSpec.model_fields) if len(loc) == 1 else _WORDS
        remedy = f"{did_you_mean(loc[-1], words)}docs/sweeps.md lists what a sweep may say"
        return Problem(key, "there is nothing of that name in a sweep", format_value(got), remedy)
    return Problem(
        key, "is missing" if kind == "missing" else rule_text(detail), format_value(got), "See docs/sweeps.md"
    )


def _search_problems(spec: SweepSpec) -> Iterable[Problem]:
    """Check that the sweep has one way to choose points, and values to try."""
    said = spec.searches
    if not said:
        remedy = f"Say one of {', '.join(sweep.SEARCHES)}; docs/sweeps.md shows each"
        yield Problem("sweep", "is empty: it says nothing to try", spec.name, remedy)
    if len(said) > 1:
        yield Problem("sweep", "says more than one way to choose points", ", ".join(said), "Keep one of them")
    listed = {f"list.{number}": point for number, point in enumerate(spec.list or (), 1)}
    spread = {f"{said[0]}.{key}": values for key, values in {**(spec.grid or {}), **spec.space}.items()}
    for name, values in {"seeds": spec.seeds, "grid": spec.grid, "list": spec.list, **listed, **spread}.items():
        if values in ({}, ()):
            yield Problem(
                name, "is empty: there is nothing to try", format_value(values), "Name a setting and its values"
            )
    size = math.prod(len(values) for values in (spec.grid or {}).values())
    if size > MAX_POINTS:
        remedy = "Draw some of them by random or optuna"
        yield Problem("grid", f"must have at most {MAX_POINTS:,} points", f"{size:,}", remedy)


def _key_problems(spec: SweepSpec, shared: Sequence[str]) -> Iterable[Problem]:
    """Check that every swept key may be swept, and is not also given for all points."""
    keys = dict.fromkeys([*(spec.grid or ()), *(key for point in spec.list or () for key in point), *spec.space])
    for key in keys:
        owner = key.partition(".")[0]
        name = f"{spec.searches[0]}.{key}"
        if owner in NOT_SWEPT:
            yield Problem(name, "cannot be swept", key, NOT_SWEPT[owner])
        elif not (key in GROUPS or is_key(key) or key in section_names()):
            remedy = f"{did_you_mean(key, [*all_keys(), *GROUPS])}docs/settings.md lists every key"
            yield Problem(name, "there is no such setting", key, remedy)
    for key in map(_key, shared):
        if key in keys:
            yield Problem(key, "is swept, and given for all points", key, "Keep one")


def _seed_problems(spec: SweepSpec, shared: Sequence[str]) -> Iterable[Problem]:
    """Check that the seeds differ, and are given once."""
    twice = sorted({seed for seed in spec.seeds if spec.seeds.count(seed) > 1})
    if twice:
        yield Problem("seeds", "must differ", format_value(spec.seeds), f"Name {', '.join(map(str, twice))} once")
    for text in shared:
        if _key(text) in ("seed", "run_id"):
            yield Problem("overrides", "seed and run_id differ from run to run", text, "Say seeds: [...] instead")


def _point_problems(points: Sequence[Point], found: Sequence[Sequence[Problem]]) -> Iterable[Problem]:
    """Yield each mistake once, with its points."""
    where: dict[Problem, list[Point]] = {}
    for point, problems in zip(points, found, strict=True):
        for problem in problems:
            where.setdefault(problem, []).append(point)
    for problem, owners in where.items():
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        rule = f"{problem.rule} (point {format_point(owners[0])}{more})"
        yield Problem(problem.key, rule, problem.got, problem.remedy)


def _duplicate_problems(points: Sequence[Point], configs: Sequence[RunConfig]) -> Iterable[Problem]:
    """Check that no two points have the same run id."""
    first: dict[str, Point] = {}
    for point, config in zip(points, configs, strict=True):
        before = first.setdefault(run_id(config), point)
        if before is not point:
            got = f"{format_point(before)} and {format_point(point)}"
            remedy = "Leave one out; keys that do not change a run's numbers make no other run, see docs/sweeps.md"
            yield Problem("sweep", "has two points that are the same run", got, remedy)


def _metric_problems(spec: SweepSpec, configs: Iterable[RunConfig]) -> Iterable[Problem]:
    """Check that the validation of each point has the objective's metric."""
    metric = spec.objective.metric
    for config in configs:
        k = config.validation.samples_per_problem
        known = [f"reward/{name}@{k}" for name in ("mean", "pass", "pass_all", "maj")] + [f"acc/mean@{k}"]
        known += ["reward/greedy", "acc/greedy"] if config.validation.greedy else []
        if metric is not None and metric not in known:
            remedy = f"{did_you_mean(metric, known)}There are {', '.join(known)}"
            yield Problem("objective.metric", "must be a figure of the validation", metric, remedy)


def _rung_problems(found: Sweep, configs: Iterable[RunConfig]) -> Iterable[Problem]:
    """Check that there is a checkpoint and a validation where points are compared."""
    if (pruning := found.spec.pruning) is None:
        return
    first, key = pruning.every_steps, "pruning.every_steps"
    for config in configs:
        if first >= config.trainer.total_steps:
            remedy = "Lower it, or leave out the early stopping"
            yield Problem(key, "must be below trainer.total_steps", str(first), remedy)
        for name, every in (("trainer.steps_per_chunk", config.trainer.steps_per_chunk),
                            ("validation.every_steps", config.validation.every_steps)):  # fmt: skip
            if every == 0 or first % every:
                rule, remedy = f"must be a multiple of {name} ({every})", f"Add {name}={first} to overrides"
                yield Problem(key, rule, str(first), remedy)
