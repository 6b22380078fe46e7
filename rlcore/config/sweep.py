"""What a sweep is: which points of which settings are tried, how they are compared, and when to stop."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlcore.config.base import Section

Point = Mapping[str, JsonValue]
"""Dotted keys or groups, and their values: what one point says beyond the experiment."""
SEARCHES = ("grid", "list", "random", "optuna")
"""How points are chosen; a sweep has exactly one of them."""


class Range(Section):
    """Numbers from `low` to `high`, both included; whole ones where both ends are whole."""

    low: int | float
    """Least value."""
    high: int | float
    """Largest value."""
    log: bool = False
    """Drawn evenly over orders of magnitude, as a learning rate should be."""
    step: int | float | None = Field(default=None, gt=0)
    """Distance of neighbouring values from `low` on; None: any value."""

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs numbers above 0, got low={self.low}")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude one another")
        return self


Values = tuple[JsonValue, ...] | Range
"""What a setting may be: one of a list, or a number of a range."""
Space = dict[str, Values]


class RandomSearch(Section):
    """Points drawn independently of one another."""

    num_points: int = Field(ge=1)
    """Points to draw. A larger number keeps the points drawn before."""
    seed: int = Field(default=1, ge=0)
    """Fixes the draws."""
    space: Space = Field(min_length=1)
    """Settings and what they may be."""


class Pruning(Section):
    """Points that are worse than the median of the others at the same step are not trained further."""

    every_steps: int = Field(ge=1)
    """Steps between two looks: a multiple of trainer.steps_per_chunk and of validation.every_steps."""
    startup_points: int = Field(default=4, ge=1)
    """Points that are finished before the first one is pruned."""


class OptunaSearch(Section):
    """Each point chosen by Optuna's TPE from what is known of those before."""

    num_points: int = Field(ge=1)
    """Points to try. A larger number goes on from those tried before."""
    seed: int = Field(default=1, ge=0)
    """Fixes what is drawn, given the same scores."""
    space: Space = Field(min_length=1)
    """Settings and what they may be."""
    startup_points: int = Field(default=10, ge=1)
    """Points drawn at random before TPE has enough to learn from."""
    points_at_once: int = Field(default=1, ge=1)
    """Points asked for at a time, to train side by side on several workers."""
    pruning: Pruning | None = None
    """None: every point is trained to its end."""


class Halving(Section):
    """Successive halving: all points a little, the best of them more, the best of those still more."""

    first_steps: int = Field(ge=1)
    """Steps of every point: a multiple of trainer.steps_per_chunk and of validation.every_steps."""
    keep_one_in: int = Field(default=3, ge=2)
    """Of so many points the best goes on, to so many times the steps."""


class Budget(Section):
    """What one call may spend. What is found finished costs nothing; the next call goes on where this one ends."""

    runs: int | None = Field(default=None, ge=1)
    """Runs that are worked on."""
    steps: int | None = Field(default=None, ge=1)
    """Training steps."""
    hours: float | None = Field(default=None, gt=0)
    """Hours after which no further run is begun."""


class Objective(Section):
    """By what points are compared: the mean over seeds of a held-out figure at the last step."""

    metric: str | None = None
    """A figure of the validation, such as reward/greedy; None: reward/mean@k, as everywhere."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Which end is the better one."""


class SweepSpec(Section):
    """A sweep's file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_\-]{0,63}$")
    """First part of the sweep's id."""
    experiment: str | None = None
    """What is varied: a name in conf/experiment, or the path of a file; None: the defaults."""
    overrides: tuple[str, ...] = ()
    """Settings that all points share, as on the command line."""
    seeds: tuple[int, ...] = Field(default=(1,), min_length=1)
    """Each point is run with each of them, and its score is the mean."""
    objective: Objective = Objective()
    grid: dict[str, tuple[JsonValue, ...]] | None = None
    """Every combination of these values."""
    list: tuple[dict[str, JsonValue], ...] | None = None
    """These points."""
    random: RandomSearch | None = None
    optuna: OptunaSearch | None = None
    halving: Halving | None = None
    """Stops poor points early; for grid, list and random."""
    budget: Budget = Budget()

    @property
    def says_a_search(self) -> bool:
        """Whether it says how points are chosen."""
        return any(getattr(self, name) is not None for name in SEARCHES)

    @property
    def search(self) -> str:
        """Which of `SEARCHES` it is."""
        return next(name for name in SEARCHES if getattr(self, name) is not None)

    @property
    def space(self) -> Mapping[str, Values]:
        """What is drawn from, for random and optuna."""
        drawn = self.random or self.optuna
        return {} if drawn is None else drawn.space
