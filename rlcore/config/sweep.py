"""Settings of a sweep: the points, their comparison, and when to stop."""

import itertools
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from rlcore.config.base import Section
from rlcore.config.problems import override_value

Point = Mapping[str, JsonValue]
"""Dotted keys or groups of one point, and their values."""
SEARCHES = ("grid", "list", "random", "optuna")
"""Ways to choose points; a sweep has exactly one of them."""


class Range(Section):
    """Numbers from `low` to `high`, both included (with `step`, up to the last step), integers if both ends are
    integers."""

    low: int | float
    """Least value."""
    high: int | float
    """Largest value."""
    log: bool = False
    """Drawn evenly over orders of magnitude, as for a learning rate."""
    step: int | float | None = Field(default=None, gt=0)
    """Distance of neighbouring values from `low` on; None: any value."""

    @property
    def is_whole(self) -> bool:
        """True if its values are integers."""
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
"""Locations of mistakes in the values of a space, in addition to their key."""
Values = Annotated[
    Annotated[tuple[JsonValue, ...], Tag(VALUES)] | Annotated[Range, Tag(RANGE)],
    Discriminator(lambda said: RANGE if isinstance(said, dict | Range) else VALUES),
]
"""Values of a setting: a list of them, or a range of numbers."""
Space = dict[str, Values]


class RandomSearch(Section):
    """Points drawn independently by Optuna's RandomSampler."""

    num_points: int = Field(ge=1)
    """Points to try. A larger number adds to those tried before."""
    seed: int = Field(default=1, ge=0)
    """Fixes the draws."""
    space: Space = Field(min_length=1)
    """Settings and their values."""


class Pruning(Section):
    """Early stopping of poor points: each is compared with those that reached the same step before it."""

    every_steps: int = Field(ge=1)
    """Steps between two comparisons: a multiple of trainer.steps_per_chunk and of validation.every_steps."""
    pruner: Literal["paired", "median", "percentile", "successive_halving", "hyperband", "threshold"] = "paired"
    """paired: drops a point that the best one beats on the same held-out problems, by the interval of the paired
    difference, unless it is among the best n / (k + 1) of n points at the k-th comparison. The others are Optuna's."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Level of the paired interval, 0 to 1. A lower one drops more points earlier."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of Optuna's pruner, such as reduction_factor: 3."""

    @model_validator(mode="after")
    def _options_match_pruner(self) -> Self:
        if self.pruner == "paired" and self.options:
            raise ValueError("options are arguments of Optuna's pruners, and pruner is paired: leave them out")
        if self.pruner != "paired" and "confidence" in self.model_fields_set:
            raise ValueError(f"confidence is read by pruner: paired alone, and pruner is {self.pruner}: leave it out")
        return self


class OptunaSearch(RandomSearch):
    """Points chosen by Optuna's TPE from the scores of earlier ones. The seed fixes them for equal scores."""

    startup_points: int = Field(default=10, ge=1)
    """Points drawn at random before TPE begins."""
    points_at_once: int = Field(default=1, ge=1)
    """Points trained concurrently with --on-workers."""


class Budget(Section):
    """Limits of one call. Finished runs cost nothing, and the next call continues."""

    runs: int | None = Field(default=None, ge=1)
    """Most runs."""
    steps: int | None = Field(default=None, ge=1)
    """Training steps."""
    hours: float | None = Field(default=None, gt=0)
    """Hours after which no further run starts."""


class Objective(Section):
    """The score of a point: the mean over seeds of a held-out metric at the last step."""

    metric: str | None = None
    """A metric of the validation, such as reward/greedy; None: reward/mean@k."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Direction of improvement."""


class SweepSpec(Section):
    """A sweep's file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_\-]{0,63}$")
    """First part of the sweep's id."""
    experiment: str | None = None
    """Base of all points: a name in conf/experiment, or the path of a file; None: the defaults."""
    overrides: tuple[str, ...] = ()
    """Settings that all points share, as on the command line."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = (1,)
    """Seeds of each point, whose score is the mean over them."""
    objective: Objective = Objective()
    grid: dict[str, tuple[JsonValue, ...]] | None = None
    """Every combination of these values."""
    list: tuple[dict[str, JsonValue], ...] | None = None
    """These points."""
    random: RandomSearch | None = None
    optuna: OptunaSearch | None = None
    pruning: Pruning | None = None
    """None: every point is trained to its end."""
    budget: Budget = Budget()

    @property
    def searches(self) -> tuple[str, ...]:
        """Names of the search in the file: exactly one, if it is valid."""
        return tuple(name for name in SEARCHES if getattr(self, name) is not None)

    @property
    def search(self) -> RandomSearch | None:
        """The random or Optuna search, None where the file lists its points."""
        return self.random or self.optuna

    @property
    def space(self) -> Mapping[str, Values]:
        """Space of the search, empty without one."""
        return {} if self.search is None else self.search.space


def points_of(spec: SweepSpec) -> list[Point]:
    """Return the points of a grid or a list, in order. A search draws its points during the sweep."""
    if spec.grid is not None:
        return [dict(zip(spec.grid, values, strict=True)) for values in itertools.product(*spec.grid.values())]
    return list(spec.list or ())


def edge_points(space: Mapping[str, Values]) -> list[Point]:
    """Return points that contain every end and choice of a space at least once, to be checked before the search."""
    ends = {
        key: [values.low, values.high] if isinstance(values, Range) else list(values) for key, values in space.items()
    }
    first = {key: values[0] for key, values in ends.items() if values}
    found = [first | {key: value} for key, values in ends.items() for value in values]
    return [point for number, point in enumerate(found) if point not in found[:number]]


def point_overrides(point: Point) -> list[str]:
    """Return a point as overrides.

    >>> point_overrides({"optim.lr": 1e-5, "algo": "dapo", "data.operations": ["+", "-"], "filter.overlong": "off"})
    ['optim.lr=1e-05', 'algo=dapo', "data.operations=['+','-']", "filter.overlong='off'"]
    """
    return [f"{key}={override_value(value)}" for key, value in point.items()]


def format_point(point: Point) -> str:
    """Return a point as one line.

    >>> format_point({"optim.lr": 1e-5, "algo": "dapo"})
    'optim.lr=1e-05 algo=dapo'
    """
    return " ".join(point_overrides(point))
