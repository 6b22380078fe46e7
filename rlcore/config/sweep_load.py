"""From a sweep's file to a checked `Sweep`: every mistake in it and in its points is told at once."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from rlcore.config import sweep_checks as checks
from rlcore.config.compose import CONF_DIR, FILE_ENDINGS, idle_settings, judge_settings
from rlcore.config.fingerprint import fingerprint, lasting_settings
from rlcore.config.problems import Problem, did_you_mean, settings_error, shown
from rlcore.config.run import RunConfig
from rlcore.config.sweep import (
    SEARCHES,
    Budget,
    Halving,
    Objective,
    OptunaSearch,
    Point,
    Pruning,
    RandomSearch,
    Range,
    SweepSpec,
)
from rlcore.config.sweep_points import edges_of, points_of, written

SWEEPS_DIR = CONF_DIR / "sweep"
_SECTIONS = (SweepSpec, Objective, Range, RandomSearch, OptunaSearch, Pruning, Halving, Budget)
_WORDS = tuple(name for section in _SECTIONS for name in section.model_fields)

_STAND_INS: Mapping[int | str, JsonValue] = {"name": "unnamed", "num_points": 1}
"""For what is missing in a file, or wrong, so that the rest of it can be checked."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has been checked.

    `base`: settings without any point. `points`: all of them in order; none where Optuna chooses as it goes. `rungs`:
    steps at which points are compared, the last of them the end.
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

    def overrides_of(self, point: Point, seed: int) -> list[str]:
        """The settings of one run, beyond the experiment."""
        return [*self.overrides, *written(point), f"seed={seed}"]

    def idle_settings(self) -> list[str]:
        """What all points share, or is swept, and has no effect in any: a line each."""
        swept = {key for point in self.points for key in point} | self.spec.space.keys()
        return idle_settings(self.base, self.overrides, experiment=self.spec.experiment, swept=swept)

    def metric_of(self, config: RunConfig) -> str:
        """The objective's name below `val-core/<data source>/`."""
        return self.spec.objective.metric or f"reward/mean@{config.validation.samples_per_problem}"


def sweep_names() -> tuple[str, ...]:
    """Names of the sweeps in `conf/sweep`, sorted."""
    return tuple(sorted(file.stem for file in SWEEPS_DIR.glob("*.yaml")))


def load_sweep(source: str, overrides: Sequence[str] = (), *, budget: Budget | None = None) -> Sweep:
    """Read a sweep and check it, and every point, without loading anything heavy.

    Args:
        source: a name in `conf/sweep`, or the path of a file that ends in .yaml.
        overrides: settings that all points share; one that the file has too goes before the file's.
        budget: what it says replaces what the file says.

    Raises:
        ConfigError: one message with every mistake.
    """
    problems: list[Problem] = []
    spec = _parsed(_content(_file_of(source)), problems)
    if budget is not None:
        changed = spec.budget.model_copy(update=budget.model_dump(exclude_none=True))
        spec = spec.model_copy(update={"budget": changed})
    if spec.experiment is not None and spec.experiment.endswith(FILE_ENDINGS):
        # Whoever works on its runs may stand elsewhere.
        spec = spec.model_copy(update={"experiment": str(Path(spec.experiment).absolute())})
    replaced = {_key(text) for text in overrides}
    shared = (*(text for text in spec.overrides if _key(text) not in replaced), *overrides)
    of_search = [] if problems and not spec.says_a_search else list(checks.of_search(spec))
    points = points_of(spec) if not of_search else []
    # What is empty because its entries are wrong is told by those.
    of_search = [one for one in of_search if not any(told.key.startswith(f"{one.key}.") for told in problems)]
    problems += [*of_search, *checks.of_keys(spec, points), *checks.of_seeds(spec, shared)]
    base, configs = _judged(spec, shared, points, problems)
    rungs = checks.rungs_of(spec, base)
    if not problems and spec.optuna is None:
        problems += checks.twice(points, configs)
    problems += [*checks.of_metric(spec, configs), *checks.of_rungs(spec, rungs, configs)]
    _stop_if(problems)
    return Sweep(spec, shared, base, tuple(points), rungs)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _judged(
    spec: SweepSpec, shared: Sequence[str], points: Sequence[Point], problems: list[Problem]
) -> tuple[RunConfig, list[RunConfig]]:
    """The settings that all points share and those of each point, as far as they are sound; what is not is added."""
    swept = {key for point in points for key in point} | spec.space.keys()
    given = [key for key in map(_key, shared) if key in swept]
    problems += [Problem(key, "is swept, and given for all points", key, "Keep one") for key in given]
    told = {problem.key.removeprefix(f"{search}.") for problem in problems for search in SEARCHES}
    every = edges_of(spec.space) if spec.optuna is not None else points
    checked = [{key: value for key, value in point.items() if key not in told} for point in every]
    judged = judge_settings([shared, *([*shared, *written(point)] for point in checked)], experiment=spec.experiment)
    (base, of_all), of_points = judged[0], judged[1:]
    problems += of_all
    problems += checks.of_points(checked, [[one for one in found if one not in of_all] for _, found in of_points])
    return base, [config for config, _ in of_points]


def _stop_if(problems: Iterable[Problem]) -> None:
    found = list(dict.fromkeys(problems))
    if found:
        raise settings_error(found)


# ---------------------------------------------------------------------- the file


def _file_of(source: str) -> Path:
    file = Path(source) if source.endswith(FILE_ENDINGS) else SWEEPS_DIR / f"{source}.yaml"
    if not file.is_file():
        remedy = f"{did_you_mean(source, sweep_names())}There are {', '.join(sweep_names())}"
        _stop_if([Problem("sweep", "must be the path of a file, or a name in conf/sweep", source, remedy)])
    return file


def _content(file: Path) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        _stop_if([Problem("sweep", f"cannot be read ({reason})", str(file), "Mend the file; docs/sweeps.md")])
        raise AssertionError from error
    if not isinstance(found, dict):
        _stop_if([Problem("sweep", "must be a mapping", str(file), "docs/sweeps.md shows the form")])
        raise AssertionError
    return {str(name): value for name, value in found.items()}


def _parsed(content: Mapping[str, Any], problems: list[Problem]) -> SweepSpec:
    """The file without what is wrong in it, which is added to `problems`."""
    content, is_first = deepcopy(dict(content)), True
    while True:
        try:
            # Strict JSON, as for settings: true is no number and "5" is none either.
            return SweepSpec.model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            details = error.errors(include_url=False)
        if is_first:  # later ones follow from what was taken out
            problems += [problem for detail in details if (problem := _of_detail(detail)) is not None]
        is_first = False
        places = {_place(content, detail["loc"]) for detail in details}
        for path in sorted(places, reverse=True):  # the entries of a list from its end
            _take_out(content, path)


def _place(content: Any, loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """Where in the file a mistake is: pydantic puts the kinds of a union into its place, which are no part of it."""
    path: list[int | str] = []
    for part in loc:
        known = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
        if part in known:
            content = content[part]
            path.append(part)
    return (*path, loc[-1]) if loc[-1] in _STAND_INS and path[-1:] != [loc[-1]] else tuple(path)


def _take_out(content: Any, path: Sequence[int | str]) -> None:
    """Remove one part; what must be there is stood in for."""
    *outer, last = path
    for part in outer:
        content = content[part]
    if last in _STAND_INS:
        content[last] = _STAND_INS[last]
    else:
        del content[last]


def _of_detail(detail: ErrorDetails) -> Problem | None:
    loc = [str(part) for part in detail["loc"]]
    got, kind = detail["input"], detail["type"]
    # A space's values are a list or a range: of the two complaints only the fitting one is told.
    branch = next((part for part in loc if part.startswith(("tuple[", "function-after["))), None)
    if branch is not None:
        loc.remove(branch)
        if kind == "tuple_type" and isinstance(got, dict):
            return None
        if kind in ("model_type", "model_attributes_type") and isinstance(got, list):
            return None
        if kind in ("tuple_type", "model_type", "model_attributes_type"):
            remedy = "Write [1, 2] or {low: 1, high: 2}"
            return Problem(".".join(loc), "must be a list of values, or a range", shown(got), remedy)
    key = ".".join(loc)
    if kind == "extra_forbidden":
        words = tuple(SweepSpec.model_fields) if len(loc) == 1 else _WORDS
        remedy = f"{did_you_mean(loc[-1], words)}docs/sweeps.md lists what a sweep may say"
        return Problem(key, "there is nothing of that name in a sweep", shown(got), remedy)
    rule = (
        detail["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String should", "must")
    )
    return Problem(key, "is missing" if kind == "missing" else rule, shown(got), "See docs/sweeps.md")
