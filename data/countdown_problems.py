"""Countdown problems that are solvable by construction. The two splits share no multiset of numbers.

If the set of possible problems is small, it is enumerated (5,326 in the demo). Otherwise random equations are drawn in
chunks, each with a generator seeded by (seed, chunk). With `data.targets=uniform`, numbers and targets are drawn
independently."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, count, permutations
from math import comb, gcd

import numpy as np
from numpy.typing import NDArray

from data.arithmetic import Rational, Term, apply, evaluate, join
from rlcore.config.data import CountdownData
from rlcore.errors import DataError

_MAX_ENUMERATED = 4_000_000  # combinations of two values for which a whole space is solved
_COST = {2: 6, 3: 150, 4: 3_500, 5: 90_000, 6: 3_000_000}  # combinations that the solver tries for n numbers
# After each `_STALL_CHUNKS` chunks, a smaller share of new problems means that the space is exhausted.
_STALL_CHUNKS = 32
_STALL_SHARE = 0.01
CHUNK = 4_096  # equations that are drawn together
_DISTRACTOR_TRIES = 16  # each try succeeds for a third of the rows
_MOST_TARGETS = 32  # uniform targets that are tried with one draw of numbers
_TRIES_FOR_ONE = 8  # equations drawn for each wrong equation of a search
_TRAIN, _VALIDATION = "train", "validation"
_SIGNS = "+-*/"

Multiset = tuple[int, ...]
# one operation: the indices of both values and of its sign in `_SIGNS`; the result replaces the first value
Merge = tuple[int, int, int]
Fraction = tuple[NDArray[np.int64], NDArray[np.int64]]  # numerators and denominators [M]


@dataclass(frozen=True, slots=True)
class Problem:
    """A countdown problem with its solution. `distractor` is an equation for another target, or ''."""

    numbers: tuple[int, ...]
    target: int
    solution: str
    distractor: str
    distractor_value: int

    @property
    def difficulty(self) -> int:
        """Return the number of operations in the solution."""
        return len(self.numbers) - 1

    def wrong_tries(self, most: int, operations: Sequence[str], seed: int) -> list[str]:
        """Return at most `most` equations that use all numbers but miss the target.

        The last equation is the one whose value is nearest to the target.
        """
        rng = random.Random(f"{seed} {self.numbers} {self.target}")
        wanted = rng.randint(0, most)
        found: dict[int, str] = {}
        for _ in range(_TRIES_FOR_ONE * wanted):
            slots = [((number, 1), Term(str(number), 3)) for number in self.numbers]
            while len(slots) > 1:
                (left, a), (right, b) = (slots.pop(rng.randrange(len(slots))) for _ in range(2))
                operation = rng.choice(operations)
                value = _apply(left, operation, right)
                if value is None or value[0] < 0 or value[1] > 1:
                    break
                slots.append((value, join(a, operation, b)))
            else:
                found[slots[0][0][0]] = slots[0][1].text
        found.pop(self.target, None)
        return [found[value] for value in sorted(found, key=lambda value: abs(value - self.target))[:wanted]][::-1]

    def __post_init__(self) -> None:
        found = evaluate(self.solution)  # as the scorer does
        if found is None or found.value != self.target or sorted(found.numbers) != sorted(self.numbers):
            raise AssertionError(f"{self} does not solve itself")


def generate(settings: CountdownData, seed: int) -> Mapping[str, list[Problem]]:
    """Return the problems of both splits in their final order. Raises DataError if the settings allow too few."""
    found = require_enough(settings, seed) or _deal(settings, seed)
    shuffled = {}
    for split, problems in found.items():
        order = np.random.default_rng((seed, 2, split == _TRAIN)).permutation(len(problems))
        shuffled[split] = [problems[index] for index in order.tolist()]
    return shuffled


def require_enough(settings: CountdownData, seed: int) -> dict[str, list[Problem]] | None:
    """Return the problems of both splits, or None if there are too many possible problems to enumerate them.

    Raises DataError if `data.number_high` is so large that 64-bit integers could overflow, or if there are too few
    problems."""
    n = settings.max_numbers
    # An unreduced numerator is a sum of at most 2^(n-1) products of the n numbers and must fit in 63 bits.
    if settings.number_high**n * 2 ** (n - 1) >= 2**63:
        highest = int((2**63 / 2 ** (n - 1)) ** (1 / n)) - 1
        raise DataError(f"data.number_high must be at most {highest} with {n} numbers, got {settings.number_high}")
    span = settings.number_high - settings.number_low
    cost = sum(_COST[n] * comb(span + n, n) for n in range(settings.min_numbers, settings.max_numbers + 1))
    return _enumerate_problems(settings, seed) if cost <= _MAX_ENUMERATED else None


def _classes(settings: CountdownData) -> list[tuple[int, ...]]:
    """Return the difficulty classes, which get equal shares of the rows. A class is a tuple of counts: problems of the
    class (3, 4) have 3 or 4 numbers."""
    counts = tuple(range(settings.min_numbers, settings.max_numbers + 1))
    return [(n,) for n in counts] if settings.balance_difficulty else [counts]


def _quotas(settings: CountdownData) -> list[Mapping[str, int]]:
    parts, sizes = len(_classes(settings)), {_TRAIN: settings.train_size, _VALIDATION: settings.validation_size}
    return [{split: n // parts + (index < n % parts) for split, n in sizes.items()} for index in range(parts)]


def _enumerate_problems(settings: CountdownData, seed: int) -> dict[str, list[Problem]]:
    rng = np.random.default_rng((seed, 0))
    found: dict[str, list[Problem]] = {_TRAIN: [], _VALIDATION: []}
    for counts, quota in zip(_classes(settings), _quotas(settings), strict=True):
        if not any(quota.values()):
            continue  # fewer rows than classes
        values = range(settings.number_low, settings.number_high + 1)
        groups = [
            problems
            for n in counts
            for numbers in combinations_with_replacement(values, n)
            if (problems := _problems_of(numbers, settings, rng))
        ]
        total, asked = sum(map(len, groups)), sum(quota.values())
        if total < asked:
            raise DataError(
                f"data.train_size + data.validation_size: {asked:,} problems asked for, but only {total:,} exist with "
                f"{' or '.join(map(str, counts))} numbers of {settings.number_low}..{settings.number_high}, operations "
                f"{' '.join(settings.operations)} and targets {settings.target_low}..{settings.target_high}. Ask for "
                "fewer, or widen the ranges"
            )
        pools: dict[str, list[Problem]] = {_TRAIN: [], _VALIDATION: []}
        for index in rng.permutation(len(groups)).tolist():
            fits = len(pools[_VALIDATION]) + len(groups[index]) <= quota[_VALIDATION] * total // asked
            pools[_VALIDATION if fits else _TRAIN].extend(groups[index])
        for split, pool in pools.items():
            found[split] += _sample(pool, quota[split], split, rng)
    return found


def _problems_of(numbers: Multiset, settings: CountdownData, rng: np.random.Generator) -> list[Problem]:
    solved = solve(numbers, settings.operations)
    low, high = settings.target_low, settings.target_high
    targets = {top: term.text for (top, bottom), term in solved.items() if bottom == 1 and low <= top <= high}
    ordered = sorted(targets)
    problems = []
    for position, target in enumerate(ordered):
        shown = numbers if settings.template == "bare" else tuple(rng.permutation(numbers).tolist())
        distractor, value = "", 0
        if len(ordered) > 1:
            other = int(rng.integers(len(ordered) - 1))
            value = ordered[other + (other >= position)]
            distractor = targets[value]
        problems.append(Problem(shown, target, targets[target], distractor, value))
    return problems


def _sample(pool: list[Problem], size: int, split: str, rng: np.random.Generator) -> list[Problem]:
    if len(pool) < size:
        raise DataError(
            f"data.{split}_size: {size:,} asked for, but the splits, which share no multiset of numbers, leave "
            f"{len(pool):,}. Ask for fewer, or widen the ranges of numbers and targets"
        )
    return [pool[index] for index in sorted(rng.permutation(len(pool))[:size].tolist())]


def solve(numbers: tuple[int, ...], operations: tuple[str, ...]) -> dict[Rational, Term]:
    """Return every value that an equation using all the numbers can have, with the shortest equation for each value."""
    size = len(numbers)
    reached: list[dict[Rational, Term]] = [{} for _ in range(2**size)]
    for index, number in enumerate(numbers):
        reached[1 << index] = {(number, 1): Term(str(number), 3)}
    for mask in range(1, 2**size):
        part = (mask - 1) & mask
        while part:
            for left, a in reached[part].items():
                for right, b in reached[mask ^ part].items():
                    for operation in operations:
                        value = _apply(left, operation, right)
                        if value is None:
                            continue
                        found, term = reached[mask].get(value), join(a, operation, b)
                        if found is None or len(term.text) < len(found.text):
                            reached[mask][value] = term
            part = (part - 1) & mask
    return reached[-1]


def _apply(left: Rational, operation: str, right: Rational) -> Rational | None:
    """Return the reduced result of an operation, with a positive denominator. Return None for a division by zero."""
    top, bottom = apply(left, operation, right)
    divisor = gcd(top, bottom) if bottom > 0 else -gcd(top, bottom)
    return (top // divisor, bottom // divisor) if bottom else None


def _random_equations(
    rng: np.random.Generator, numbers: np.ndarray, operations: tuple[str, ...]
) -> tuple[Fraction, NDArray[np.int8]]:
    """Draw for each row of `numbers` [M, n] an equation that uses all n numbers. Return the values of the equations,
    and their steps [M, n-1, 3]. A step has the positions of two numbers and the operation that combines them."""
    rows, n = numbers.shape
    every = np.arange(rows)
    top, bottom = numbers.copy(), np.ones_like(numbers)
    plan = np.empty((rows, n - 1, 3), dtype=np.int8)
    codes = np.array([_SIGNS.index(operation) for operation in operations], dtype=np.int8)
    for step, left in enumerate(range(n, 1, -1)):
        i = rng.integers(left, size=rows)
        j = rng.integers(left - 1, size=rows)
        j += j >= i
        code = codes[rng.integers(len(codes), size=rows)]
        plan[:, step] = np.stack([i, j, code], axis=1)
        pair = (top[every, i], bottom[every, i]), (top[every, j], bottom[every, j])
        results = zip(*(apply(pair[0], sign, pair[1]) for sign in _SIGNS), strict=True)
        top[every, i], bottom[every, i] = (np.choose(code, result) for result in results)
        top[every, j], bottom[every, j] = top[:, left - 1], bottom[:, left - 1]
    return (top[:, 0], bottom[:, 0]), plan


def equations_for(
    numbers: NDArray[np.int64], targets: NDArray[np.int64], operations: tuple[str, ...]
) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """Search for equations that use the n numbers in each row of `numbers` [M, n] and reach the T targets in the same
    row of `targets` [M, T].

    All equations are tried (3,888 for 4 numbers). Return the steps [M, T, n-1, 3] of the first equation for each target
    (see `_random_equations`), and a mask [M, T] of the solved targets.
    """
    rows, n = numbers.shape
    plan, solved = np.zeros((*targets.shape, n - 1, 3), dtype=np.int8), np.zeros(targets.shape, dtype=bool)
    farthest = np.abs(targets).max()

    def visit(slots: list[Fraction], made: list[Merge]) -> None:
        for sign in operations:
            for i, j in permutations(range(len(slots)), 2):
                if sign in "+*" and i > j:
                    continue
                merges = [*made, (i, j, _SIGNS.index(sign))]
                left = list(slots)
                left[i] = apply(slots[i], sign, slots[j])
                left[j] = left[-1]
                left.pop()
                if len(left) > 1:
                    visit(left, merges)
                    continue
                top, bottom = left[0]
                near = np.flatnonzero(np.abs(top / bottom) <= farthest + 1)  # few, for the division is slow
                value, rest = np.divmod(top[near], bottom[near])
                near, value = near[rest == 0], value[rest == 0]
                row, column = np.nonzero((targets[near] == value[:, None]) & ~solved[near])
                plan[near[row], column], solved[near[row], column] = merges, True

    with np.errstate(divide="ignore", invalid="ignore"):
        visit([(column, np.ones(rows, dtype=np.int64)) for column in numbers.T.copy()], [])
    return plan, solved


def _equation(numbers: list[int], plan: list[list[int]]) -> str:
    slots = [Term(str(number), 3) for number in numbers]
    for i, j, code in plan:
        slots[i] = join(slots[i], _SIGNS[code], slots[j])
        slots[j] = slots[-1]
        slots.pop()
    return slots[0].text


def _whole_values(values: Fraction, settings: CountdownData) -> tuple[np.ndarray, np.ndarray]:
    """Return the values as integers [M], and a mask [M] that is True for whole values within the range of targets."""
    top, bottom = values
    value, rest = np.divmod(top, np.where(bottom == 0, 1, bottom))
    return value, (bottom != 0) & (rest == 0) & (value >= settings.target_low) & (value <= settings.target_high)


def _distractors(
    rng: np.random.Generator, numbers: np.ndarray, target: np.ndarray, settings: CountdownData
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw an equation for another target in each row. Return steps, values, and a mask of rows without an equation."""
    rows, n = numbers.shape
    plan, found = np.zeros((rows, n - 1, 3), dtype=np.int8), np.zeros_like(target)
    still = np.arange(rows)
    for _ in range(_DISTRACTOR_TRIES):
        values, merges = _random_equations(rng, numbers[still], settings.operations)
        value, whole = _whole_values(values, settings)
        good = whole & (value != target[still])
        plan[still[good]], found[still[good]] = merges[good], value[good]
        still = still[~good]
    return plan, found, np.isin(np.arange(rows), still)


def draw_chunk(settings: CountdownData, seed: int, chunk: int) -> list[Problem]:
    """Return the problems of one chunk. They depend only on the settings, the seed and the chunk number."""
    rng = np.random.default_rng((seed, 1, chunk))
    if settings.targets == "uniform":
        counts = range(settings.min_numbers, settings.max_numbers + 1)
        found = [problem for n in counts for problem in _with_uniform_targets(settings, rng, n)]
        return [found[index] for index in rng.permutation(len(found)).tolist()]
    num_counts = settings.max_numbers - settings.min_numbers + 1
    n = settings.min_numbers + chunk % num_counts
    numbers = rng.integers(settings.number_low, settings.number_high + 1, size=(CHUNK, n))
    values, plan = _random_equations(rng, numbers, settings.operations)
    target, good = _whole_values(values, settings)
    return _problems(settings, rng, numbers[good], target[good], plan[good])


def _with_uniform_targets(settings: CountdownData, rng: np.random.Generator, n: int) -> list[Problem]:
    """Draw problems of n numbers with targets that are independent of the numbers."""
    numbers = rng.integers(settings.number_low, settings.number_high + 1, size=(CHUNK, n))
    num_targets = min(_MOST_TARGETS, 1 + (settings.target_high - settings.target_low) // _MOST_TARGETS)
    targets = rng.integers(settings.target_low, settings.target_high + 1, size=(CHUNK, num_targets))
    plan, solved = equations_for(numbers, targets, settings.operations)
    return _problems(settings, rng, numbers[np.nonzero(solved)[0]], targets[solved], plan[solved])


def _problems(
    settings: CountdownData,
    rng: np.random.Generator,
    numbers: NDArray[np.int64],
    target: NDArray[np.int64],
    plan: NDArray[np.int8],
) -> list[Problem]:
    """Create problems from numbers [M, n], targets [M] and the steps of their equations [M, n-1, 3]."""
    other, other_value, is_open = _distractors(rng, numbers, target, settings)
    order = rng.permuted(np.broadcast_to(np.arange(numbers.shape[1]), numbers.shape), axis=1)
    shown = np.sort(numbers, axis=1) if settings.template == "bare" else np.take_along_axis(numbers, order, axis=1)
    columns = (shown, numbers, target, plan, other, other_value, is_open)
    return [
        Problem(tuple(seen), goal, _equation(row, steps), "" if none else _equation(row, wrong), value)
        for seen, row, goal, steps, wrong, value, none in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _deal(settings: CountdownData, seed: int) -> dict[str, list[Problem]]:
    """Draw problems until each split has enough problems of each difficulty class. The numbers of a problem determine
    its split."""
    class_of = {n: index for index, counts in enumerate(_classes(settings)) for n in counts}
    quotas = [(split, size) for quota in _quotas(settings) for split, size in quota.items()]
    found = [list[Problem]() for _ in quotas]  # two lists for each class
    seen: set[tuple[Multiset, int]] = set()
    held_out, num_wanted, num_new = settings.validation_size, 0, 0
    # The share is three standard deviations too high, so that the held-out split is full before the training split.
    share = min(0.5, (held_out + 3 * held_out**0.5 + 3) / (settings.train_size + held_out))
    for chunk in count():
        for problem in draw_chunk(settings, seed, chunk):
            multiset = tuple(sorted(problem.numbers))
            place = 2 * class_of[len(multiset)] + (_unit_hash(multiset, seed) < share)
            if len(found[place]) == quotas[place][1]:
                continue
            num_wanted += 1
            if (multiset, problem.target) not in seen:
                seen.add((multiset, problem.target))
                found[place].append(problem)
                num_new += 1
        if all(len(problems) == size for problems, (_, size) in zip(found, quotas, strict=True)):
            break
        if (chunk + 1) % _STALL_CHUNKS == 0:
            if num_new <= _STALL_SHARE * num_wanted:
                _refuse((chunk + 1) * CHUNK, zip(found, quotas, strict=True))
            num_wanted = num_new = 0
    return {split: list(chain.from_iterable(found[place::2])) for place, split in enumerate((_TRAIN, _VALIDATION))}


def _refuse(num_draws: int, classes: Iterable[tuple[list[Problem], tuple[str, int]]]) -> None:
    had = ", ".join(f"{len(found):,} of {size:,} for {split}" for found, (split, size) in classes)
    raise DataError(
        f"countdown: {num_draws:,} draws gave {had} problems, and less than one in a hundred is still new. These "
        "settings allow hardly more: ask for fewer rows (data.train_size, data.validation_size), or widen the "
        "ranges of numbers, targets and operations"
    )


def _unit_hash(multiset: Multiset, seed: int) -> float:
    """Return a number in [0, 1) that depends only on a multiset of numbers and the seed (splitmix64)."""
    state = seed
    for number in multiset:
        state = (state * 1_000_003 + number + 1) & 0xFFFFFFFFFFFFFFFF
    state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 31)) / 2**64
