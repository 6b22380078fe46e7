"""The forms of a rule."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from rlcore.config.base import Bound, Section, covers
from rlcore.config.problems import Problem, shown
from rlcore.config.run import RunConfig, all_keys, value_at

Check = Callable[[RunConfig], Problem | None]
_ALLOWS: dict[str, Callable[[Any, Any], bool]] = {
    "divide": lambda value, bound: bound % value == 0,
    "be at most": lambda value, bound: value <= bound,
    "be at least": lambda value, bound: value >= bound,
    "be under": lambda value, bound: value < bound,
}
_MOST_DIVISORS = 12


@dataclass(frozen=True, slots=True)
class Rule:
    """A check, its name, and the keys or sections that it reads."""

    name: str
    reads: tuple[str, ...]
    check: Check

    def reads_any(self, keys: Collection[str]) -> bool:
        """Whether the rule reads one of these keys or sections, a part of one, or a section that holds one."""
        return any(covers(key, read) or covers(read, key) for read in self.reads for key in keys)


def row(name: str, key: str, with_keys: str, says: str, holds: Callable[[RunConfig], bool], remedy: str) -> Rule:
    """A rule about one key, given others (in one text, with spaces); the problem shows the values of all."""
    others = tuple(with_keys.split())

    def check(config: RunConfig) -> Problem | None:
        return None if holds(config) else Problem(key, says, got(config, key, *others), remedy)

    # The task decides which keys the data's section has.
    return Rule(name, tuple("data" if each == "data.task" else each for each in (key, *others)), check)


def rule(*reads: str) -> Callable[[Check], Rule]:
    """Declare a function as a rule that reads these keys."""
    return lambda check: Rule(check.__name__, reads, check)


def bounds() -> Iterator[Rule]:
    """The rules that fields declare by `Bound`, the keys of the data first."""
    for name, (field, *_) in all_keys().items():
        for bound in (each for each in field.metadata if isinstance(each, Bound)):
            yield _bound_rule(name, bound)


def _bound_rule(key: str, bound: Bound) -> Rule:
    says = f"must {bound.words} {bound.others}"

    def check(config: RunConfig) -> Problem | None:
        value, *others = (value_at(config, name) for name in (key, *bound.names))
        if value is None or None in others or (bound.only_with and not value_at(config, bound.only_with)):
            return None
        number = prod(others) if bound.words == "divide" else sum(others)
        if _ALLOWS[bound.words](value, number):
            return None
        whole = divisors(number) if bound.words == "divide" else ""  # a bound of another kind may be no whole number
        remedy = bound.remedy.format(bound=number, divisors=whole)
        return Problem(key, says, got(config, key, *bound.names), remedy)

    reads = (key, *bound.names, *([bound.only_with] if bound.only_with else []))
    return Rule(f"{key} {says}", reads, check)


def got(config: RunConfig, key: str, *others: str) -> str:
    """Values of keys in words: `48 with batch_size 64`."""
    values = [f"{name.rpartition('.')[2]} {_shown(value_at(config, name))}" for name in others]
    return " with ".join([_shown(value_at(config, key)), *([", ".join(values)] if values else [])])


def divisors(number: int) -> str:
    """The largest divisors of a number, in order."""
    low = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    found = sorted({*low, *(number // each for each in low)})
    return ", ".join(map(str, found[-_MOST_DIVISORS:]))


def _shown(value: Any) -> str:
    return "its settings" if isinstance(value, Section) else shown(value)
