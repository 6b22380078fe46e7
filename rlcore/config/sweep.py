"""The settings of a sweep (its points, their comparison, its budget), and functions that read and check a sweep's
file."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rlcore.config.base import FILE_ENDINGS, GROUPS, Section, group_members, keys_of, member_file
from rlcore.config.check import read_yaml, rule_text
from rlcore.config.compose import compose, swept_values
from rlcore.config.fingerprint import fingerprint, fixed_settings, run_id
from rlcore.config.problems import Problem, did_you_mean, format_value, override_value, settings_error
from rlcore.config.run import RunConfig, all_keys, is_key, section_names

Point = Mapping[str, JsonValue]
"""One combination of settings in a sweep: dotted keys or groups, with their values."""
SEARCHES = ("grid", "list", "optuna")
"""The keys of a sweep's file that choose its points. A file has at most one of them."""


class Range(Section):
    """The numbers from `low` to `high`, both included. They are integers if `low`, `high` and `step` are integers."""

    low: int | float
    """The smallest value."""
    high: int | float
    """The largest value."""
    log: bool = False
    """Draw from a log-uniform distribution, as is usual for a learning rate."""
    step: int | float | None = Field(default=None, gt=0)
    """The distance between two neighboring values, counted from `low`. If null, any value may be drawn."""

    @property
    def is_whole(self) -> bool:
        """True if all values of the range are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float)

    @model_validator(mode="after")
    def _is_valid_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs numbers above 0, got low={self.low}")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude one another")
        return self


VALUES, RANGE = "of a list", "of a range"
"""The tags by which pydantic distinguishes a list of values from a range. pydantic adds the tag to the location of an
error."""
Values = Annotated[
    Annotated[tuple[JsonValue, ...], Tag(VALUES)] | Annotated[Range, Tag(RANGE)],
    Discriminator(lambda said: RANGE if isinstance(said, dict | Range) else VALUES),
]
"""The values of one setting in a sweep: a list of values, or a range of numbers."""


class OptunaSearch(Section):
    """A search by Optuna's TPE sampler. Its points depend only on the seed and the scores of earlier points."""

    num_points: int = Field(ge=1)
    """The number of points to try. If a later call of `millrace sweep` has a larger number, the search continues with
    further points."""
    seed: int = Field(default=1, ge=0)
    """The seed of the search."""
    space: dict[str, Values] = Field(min_length=1)
    """The settings that vary, with their values."""
    startup_points: int = Field(default=10, ge=1)
    """The number of random points before TPE begins. If this number is `num_points` or more, all points are random."""
    points_at_once: int = Field(default=1, ge=1)
    """The number of points that are trained concurrently if --on-workers is given."""


class Pruning(Section):
    """The early stopping of poor points. Each point is compared with the points that have already reached the same
    step.

    A point is dropped if the best point is significantly better on the same held-out problems: the confidence interval
    of the paired difference is above 0. At the k-th comparison of n points, the best n / (k + 1) points are never
    dropped."""

    every_steps: int = Field(ge=1)
    """The number of steps between two comparisons, a multiple of trainer.steps_per_chunk and validation.every_steps."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """The confidence level of the interval, from 0 to 1. With a lower level, more points are dropped early."""


class Budget(Section):
    """The limits of one call of `millrace sweep`. Runs that earlier calls finished do not count. The next call
    continues the sweep."""

    runs: int | None = Field(default=None, ge=1)
    """The largest number of runs that one call of `millrace sweep` may start."""
    steps: int | None = Field(default=None, ge=1)
    """The largest total number of training steps, over all runs, in one call of `millrace sweep`."""
    hours: float | None = Field(default=None, gt=0)
    """No further run starts once this number of hours has passed since the start of the call."""


class Objective(Section):
    """The score of a point: a held-out metric at the last step, averaged over the point's seeds."""

    metric: str | None = None
    """A metric of the validation, such as reward/greedy. If null, the metric is reward/mean_at_k."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """The direction in which the metric improves."""


class SweepSpec(Section):
    """The content of a sweep's file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_\-]{0,63}$")
    """The first part of the id of the sweep."""
    experiment: str | None = None
    """The experiment of all points: a name in conf/experiment, or the path of a file. Null: the default settings."""
    overrides: tuple[str, ...] = ()
    """The settings that all points share, written as on the command line."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = (1,)
    """The seeds with which each point is trained. The score of a point is the mean over its seeds."""
    objective: Objective = Objective()
    grid: dict[str, tuple[JsonValue, ...]] | None = None
    """Settings with a list of values each. Every combination of the values is a point."""
    list: tuple[dict[str, JsonValue], ...] | None = None
    """The points. Each entry has the settings of one point."""
    optuna: OptunaSearch | None = None
    pruning: Pruning | None = None
    """The early stopping of poor points. If null, every point is trained to its last step."""
    budget: Budget = Budget()

    @property
    def searches(self) -> tuple[str, ...]:
        """The keys of the file that define the points, such as `grid`. A valid file has at most one such key."""
        return tuple(name for name in SEARCHES if getattr(self, name) is not None)

    @property
    def space(self) -> Mapping[str, Values]:
        """The settings that Optuna varies, with their values. The mapping is empty if the sweep does not use Optuna."""
        return {} if self.optuna is None else self.optuna.space


def points_of(spec: SweepSpec) -> list[Point]:
    """Return the points of a grid or list in order. Return [] for Optuna, which chooses points later, and [{}] if only
    seeds vary."""
    if spec.grid is not None:
        return [dict(zip(spec.grid, values, strict=True)) for values in itertools.product(*spec.grid.values())]
    return list(spec.list or ([] if spec.searches else [{}]))


def multirun_content(overrides: Sequence[str]) -> dict[str, JsonValue]:
    """Return the content of a sweep's file that runs every combination of the values in overrides such as `seed=1,2,3`.
    Raises ConfigError if no override has several values."""
    several = {_key(text): values for text in overrides if (values := swept_values(text))}
    for text in overrides:
        if re.match(r"[^=]+=(glob|interval)\(", text):
            remedy = "List the values, as in a,b. A sweep's file can search in a range (docs/sweeps.md)"
            raise settings_error([Problem(_key(text), "must list its values with --multirun", text, remedy)])
    if not several:
        remedy = "Give one, as in seed=1,2,3 or optim.lr=1e-4,1e-3"
        raise settings_error(
            [Problem("--multirun", "needs a setting with several values", " ".join(overrides), remedy)]
        )
    shared = [text for text in overrides if _key(text) not in several]
    experiment = next((text.partition("=")[2].strip("'\"") for text in shared if _key(text) == "experiment"), None)
    content: dict[str, JsonValue] = {"name": re.sub(r"[^a-z0-9_\-]", "-", Path(experiment or "defaults").stem.lower())}
    if experiment is not None:
        is_file = experiment.endswith(FILE_ENDINGS)
        content["experiment"] = str(Path(experiment).absolute()) if is_file else experiment
    content["overrides"] = [text for text in shared if _key(text) != "experiment"]
    if "seed" in several:
        content["seeds"] = several.pop("seed")
    if several:
        content["grid"] = {**several}
    return content


def edge_points(space: Mapping[str, Values]) -> list[Point]:
    """Return points with which the settings of a search are checked before the search starts. Together, the points
    contain both ends of each range and all values of each list."""
    ends = {
        key: [values.low, values.high] if isinstance(values, Range) else list(values) for key, values in space.items()
    }
    first = {key: values[0] for key, values in ends.items() if values}
    found = [first | {key: value} for key, values in ends.items() for value in values]
    return [point for number, point in enumerate(found) if point not in found[:number]]


def point_overrides(point: Point) -> list[str]:
    """Return the settings of a point as a list of overrides.

    >>> point_overrides({"optim.lr": 1e-5, "data.operations": ["+", "-"], "filter.overlong": "off"})
    ['optim.lr=1e-05', "data.operations=['+','-']", "filter.overlong='off'"]
    """
    return [f"{key}={override_value(value)}" for key, value in point.items()]


def format_point(point: Point) -> str:
    """Return the overrides of a point as one line of text, or "the same settings" if the point has none."""
    return " ".join(point_overrides(point)) or "the same settings"


_WORDS = tuple(name.rpartition(".")[2] for name, _ in keys_of(SweepSpec)) + tuple(SweepSpec.model_fields)
MAX_POINTS = 10_000
NOT_SWEPT = {
    "seed": "Write the seeds as seeds: [1, 2]",
    "experiment": "A sweep varies one experiment; run each by itself, then millrace compare RUN RUN",
    "name": "It names a run and changes nothing of it",
    "run_id": "It names a run and changes nothing of it",
    "tags": "They label a run and change nothing of it",
    "paths": "All runs of a sweep have one workspace; set it for the sweep: paths.root=...",
    "tracking": "All runs of a sweep are tracked in one place; set it for the sweep",
}
"""The keys that a point must not set, each with the remedy."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep with checked settings. `base`: the settings that all points share. `points`: empty for Optuna, which
    chooses them later."""

    spec: SweepSpec
    overrides: tuple[str, ...]
    base: RunConfig
    points: tuple[Point, ...]

    @property
    def sweep_id(self) -> str:
        """The name of the sweep's folder. It depends neither on the budget nor on the number of points of a search."""
        spec = self.spec.model_dump(mode="json", exclude={"budget", "experiment", "overrides"})
        if spec["optuna"] is not None:
            del spec["optuna"]["num_points"]
        base = self.base
        more = {"name": base.name, "total_steps": base.trainer.total_steps, "metric": self.metric_of(base)}
        digest = fingerprint("sweep", {"spec": spec, "base": fixed_settings(base), **more})
        return f"{self.spec.name}-{digest[:8]}"

    @property
    def folder(self) -> Path:
        """The folder `sweeps/<sweep_id>` below `paths.root`."""
        return Path(self.base.paths.root).resolve() / "sweeps" / self.sweep_id

    @property
    def num_points(self) -> int:
        """The number of requested points. Optuna's study has more points if an earlier call requested more."""
        return len(self.points) if self.spec.optuna is None else self.spec.optuna.num_points

    def rungs(self, config: RunConfig) -> tuple[int, ...]:
        """Return the steps at which points with these settings are compared, the last step included. Without `pruning`,
        this is only the last step."""
        total = config.trainer.total_steps
        every = total if self.spec.pruning is None else self.spec.pruning.every_steps
        return (*range(every, total, every), total)

    def overrides_of(self, point: Point, seed: int) -> list[str]:
        """Return the overrides of one run: the settings that all points share, the point's settings and the seed."""
        return [*self.overrides, *point_overrides(point), f"seed={seed}"]

    def unused_settings(self) -> list[str]:
        """Return a warning for each setting, shared or swept, that has no effect in any of the sweep's points."""
        swept = {key for point in self.points for key in point} | self.spec.space.keys()
        return compose(self.overrides, experiment=self.spec.experiment).unused_settings(swept)

    def metric_of(self, config: RunConfig) -> str:
        """Return the name of the objective's metric without the prefix `val-core/<data source>/`."""
        return self.spec.objective.metric or f"reward/mean_at_{config.validation.samples_per_problem}"


def load_sweep(
    source: str | Mapping[str, Any], overrides: Sequence[str] = (), *, budget: Budget | None = None
) -> Sweep:
    """Read a sweep from a name in `conf/sweep`, a .yaml file or its content, and check the settings of every point.

    `overrides` and `budget` replace the values in the file. The checks cover first the file's keys and types,
    then the choice of points, and then the points' settings. Raises ConfigError with all mistakes that the first
    failing check finds."""
    spec = _parse(_content(source) if isinstance(source, str) else source)
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
    points = points_of(spec)
    tried = points or edge_points(spec.space)
    shared_only, *checked = (
        compose([*shared, *point_overrides(point)], experiment=spec.experiment) for point in ({}, *tried)
    )
    base, of_all = shared_only.config, shared_only.problems
    found = Sweep(spec, shared, base, tuple(points))
    configs = [each.config for each in checked]
    of_points = [[one for one in each.problems if one not in of_all] for each in checked]
    problems = [*of_all, *_point_problems(tried, of_points)]
    if not problems:
        problems += _duplicate_problems(tried, configs)
    problems += [*_metric_problems(spec, configs), *_rung_problems(found, configs)]
    if problems:
        raise settings_error(list(dict.fromkeys(problems)))
    return found


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _content(source: str) -> dict[str, Any]:
    file = Path(source) if source.endswith(FILE_ENDINGS) else member_file("sweep", source)
    if not file.is_file():
        names = group_members("sweep")
        remedy = f"{did_you_mean(source, names)}There are {', '.join(names)}"
        raise settings_error([Problem("sweep", "must be the path of a file, or a name in conf/sweep", source, remedy)])
    content = read_yaml(file)
    if isinstance(content, str):
        raise settings_error([Problem("sweep", content, str(file), "docs/sweeps.md shows the form")])
    sections = content.keys() & {*RunConfig.model_fields} - {*SweepSpec.model_fields}
    if "defaults" in content or (sections and not content.keys() & {*SEARCHES, "experiment"}):
        remedy = f"Run it by millrace run experiment={source}; docs/sweeps.md shows a sweep's file"
        raise settings_error([Problem("sweep", "must be a sweep's file, and this is an experiment's", source, remedy)])
    return content


def _parse(content: Mapping[str, Any]) -> SweepSpec:
    try:
        # Strict JSON, as for settings: neither true nor "5" is a number.
        return SweepSpec.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        raise settings_error([_form_problem(detail) for detail in error.errors(include_url=False)]) from None


def _form_problem(detail: ErrorDetails) -> Problem:
    loc = [str(part) for part in detail["loc"] if part not in (VALUES, RANGE)]
    kind = detail["type"]
    rule, remedy = "is missing" if kind == "missing" else rule_text(detail), "See docs/sweeps.md"
    if kind == "tuple_type" and VALUES in detail["loc"]:
        rule, remedy = "must be a list of values, or a range", "Write [1, 2] or {low: 1, high: 2}"
    elif kind == "extra_forbidden":
        words = tuple(SweepSpec.model_fields) if len(loc) == 1 else _WORDS
        rule, remedy = (
            "a sweep has no such key",
            f"{did_you_mean(loc[-1], words)}docs/sweeps.md lists the keys of a sweep",
        )
    return Problem(".".join(loc), rule, format_value(detail["input"]), remedy)


def _search_problems(spec: SweepSpec) -> Iterable[Problem]:
    said = spec.searches
    if not said and len(spec.seeds) < 2:
        remedy = f"Give several seeds, or use one of {', '.join(SEARCHES)}; docs/sweeps.md shows each"
        yield Problem("sweep", "is empty: it has nothing to try", spec.name, remedy)
    if len(said) > 1:
        yield Problem("sweep", "has more than one way to choose points", ", ".join(said), "Keep one of them")
    listed = {f"list.{number}": point for number, point in enumerate(spec.list or (), 1)}
    spread = {f"{said[0] if said else ''}.{key}": values for key, values in {**(spec.grid or {}), **spec.space}.items()}
    for name, values in {"seeds": spec.seeds, "grid": spec.grid, "list": spec.list, **listed, **spread}.items():
        if values in ({}, ()):
            yield Problem(
                name, "is empty: there is nothing to try", format_value(values), "Name a setting and its values"
            )
    size = math.prod(len(values) for values in (spec.grid or {}).values())
    if size > MAX_POINTS:
        remedy = "Draw some of them by optuna"
        yield Problem("grid", f"must have at most {MAX_POINTS:,} points", f"{size:,}", remedy)


def _key_problems(spec: SweepSpec, shared: Sequence[str]) -> Iterable[Problem]:
    keys = dict.fromkeys([*(spec.grid or ()), *(key for point in spec.list or () for key in point), *spec.space])
    for key in keys:
        owner, got = key.partition(".")[0], f"{key} in {spec.searches[0]}"
        if owner in NOT_SWEPT:
            yield Problem(key, "cannot be swept", got, NOT_SWEPT[owner])
        elif not (key in GROUPS or is_key(key) or key in section_names()):
            remedy = f"{did_you_mean(key, [*all_keys(), *GROUPS])}docs/settings.md lists every key"
            yield Problem(key, "there is no such setting", got, remedy)
    for key in map(_key, shared):
        if key in keys:
            yield Problem(key, "is swept, and given for all points", key, "Keep one")


def _seed_problems(spec: SweepSpec, shared: Sequence[str]) -> Iterable[Problem]:
    twice = sorted({seed for seed in spec.seeds if spec.seeds.count(seed) > 1})
    if twice:
        yield Problem("seeds", "must differ", format_value(spec.seeds), f"Name {', '.join(map(str, twice))} once")
    for text in shared:
        if _key(text) in ("seed", "run_id"):
            yield Problem("overrides", "seed and run_id differ from run to run", text, "Write seeds: [...] instead")


def _point_problems(points: Sequence[Point], found: Sequence[Sequence[Problem]]) -> Iterable[Problem]:
    where: dict[Problem, list[Point]] = {}
    for point, problems in zip(points, found, strict=True):
        for problem in problems:
            where.setdefault(problem, []).append(point)
    for problem, owners in where.items():
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        rule = f"{problem.rule} (point {format_point(owners[0])}{more})"
        yield Problem(problem.key, rule, problem.got, problem.remedy)


def _duplicate_problems(points: Sequence[Point], configs: Sequence[RunConfig]) -> Iterable[Problem]:
    first: dict[str, Point] = {}
    for point, config in zip(points, configs, strict=True):
        before = first.setdefault(run_id(config), point)
        if before is not point:
            got = f"{format_point(before)} and {format_point(point)}"
            remedy = "Leave one out; keys that do not change a run's numbers make no other run, see docs/sweeps.md"
            yield Problem("sweep", "has two points that are the same run", got, remedy)


def _metric_problems(spec: SweepSpec, configs: Iterable[RunConfig]) -> Iterable[Problem]:
    metric = spec.objective.metric
    for config in configs:
        k = config.validation.samples_per_problem
        known = [f"reward/{name}_at_{k}" for name in ("mean", "pass", "pass_all", "maj")] + [f"acc/mean_at_{k}"]
        known += ["reward/greedy", "acc/greedy"] if config.validation.greedy else []
        if metric is not None and metric not in known:
            remedy = f"{did_you_mean(metric, known)}There are {', '.join(known)}"
            yield Problem("objective.metric", "must be a metric of the validation", metric, remedy)


def _rung_problems(found: Sweep, configs: Iterable[RunConfig]) -> Iterable[Problem]:
    configs = list(configs)
    if any(config.is_supervised for config in configs):
        yield Problem("trainer.total_steps", "must be 1 or more in a sweep", "0", "Start millrace sft for each run")
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
