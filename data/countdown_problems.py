"""Countdown problems, each solvable by construction, dealt to two splits that share no multiset of numbers.

Small spaces (the demo's 5,326 problems) are enumerated by a solver, so that every problem that exists can be had and
a request for more says how many there are. Large ones are drawn, chunk by chunk (`data.countdown_draws`). Chunks are
taken in their order, so the rows do not depend on how many processes drew them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations_with_replacement, count
from math import comb, inf
from pathlib import Path

import numpy as np

from data.countdown_draws import CHUNK, Problem, draw_chunk
from data.countdown_solver import solve
from rlcore.config.data import CountdownData
from rlcore.errors import DataError

# Rough cost of solving all of a space, in combinations of two values; above it problems are drawn instead.
_MAX_ENUMERATED = 4_000_000
# Combinations that the solver makes for one multiset of n numbers (measured, without equal values).
_COST = {2: 6, 3: 150, 4: 3_500, 5: 90_000, 6: 3_000_000}
# Multisets whose problems are counted where there are too many to enumerate, the most that one may cost, and how far
# beyond the estimate a wish must be to be refused without a draw (its error is a few percent).
_SAMPLED = 200
_MAX_SAMPLED_COST = 10_000
_SAMPLE_MARGIN = 1.25
# Of the multisets: fewer problems than that exist in no range that anybody asks for, and nothing is counted.
_FEW_SHARE = 0.1
# Chunks between two looks, and the share of new ones among wanted problems below which the space counts as used up.
_STALL_CHUNKS = 32
_STALL_SHARE = 0.01
# Below it, starting processes costs more than it saves.
_MIN_ROWS_FOR_PROCESSES = 50_000
# Chunks that a process has been told: one it works at, one that waits.
_CHUNKS_AHEAD = 2

_TRAIN, _VALIDATION = "train", "validation"

Multiset = tuple[int, ...]


def generate(settings: CountdownData, seed: int, *, num_processes: int | None = None) -> Mapping[str, list[Problem]]:
    """Problems of both splits in their final order. No multiset of numbers occurs in both, no problem twice.

    `num_processes` changes the time it takes and nothing else; None takes what the size is worth, one a core at most.

    Raises:
        DataError: the settings contradict each other, or allow fewer problems than asked.
    """
    _require_sound(settings)
    if _is_enumerated(settings):
        found = _from_whole_space(settings, seed)
    else:
        found = _Dealer(settings, seed).deal(_chunks(settings, seed, _processes(settings, num_processes)))
    return {split: _shuffled(problems, seed, split) for split, problems in found.items()}


def require_enough(settings: CountdownData, seed: int) -> None:
    """There are as many problems as asked for: counted where the space is enumerated, else by a sample of it.

    Raises:
        DataError: the settings contradict each other, or allow fewer problems than asked.
    """
    _require_sound(settings)
    if _is_enumerated(settings):
        _from_whole_space(settings, seed)
        return
    span = settings.number_high - settings.number_low + 1
    for counts, quota in zip(_classes(settings), _quotas(settings), strict=True):
        if sum(quota.values()) < _FEW_SHARE * sum(comb(span + n - 1, n) for n in counts):
            continue
        total = sum(_num_problems(n, settings) for n in counts)
        if (asked := sum(quota.values())) > _SAMPLE_MARGIN * total:
            _refuse_for_size(settings, counts, asked, round(total), about=True)


def _num_problems(n: int, settings: CountdownData) -> float:
    """About how many problems of n numbers exist; infinite where a sample would cost more than a draw of all."""
    if _COST[n] > _MAX_SAMPLED_COST:
        return inf
    span = settings.number_high - settings.number_low + 1
    places = np.random.default_rng(n)
    targets = 0
    for _ in range(_SAMPLED):  # one multiset as good as another: n places among span + n - 1
        chosen = np.sort(places.choice(span + n - 1, size=n, replace=False)) - np.arange(n) + settings.number_low
        targets += sum(
            bottom == 1 and settings.target_low <= top <= settings.target_high
            for top, bottom in solve(tuple(chosen.tolist()), settings.operations)
        )
    return comb(span + n - 1, n) * targets / _SAMPLED


def _is_enumerated(settings: CountdownData) -> bool:
    counts = range(settings.min_numbers, settings.max_numbers + 1)
    span = settings.number_high - settings.number_low + 1
    return sum(_COST[n] * comb(span + n - 1, n) for n in counts) <= _MAX_ENUMERATED


def _require_sound(settings: CountdownData) -> None:
    problems = []
    for low, high in (("min_numbers", "max_numbers"), ("number_low", "number_high"), ("target_low", "target_high")):
        a, b = getattr(settings, low), getattr(settings, high)
        if a > b:
            problems.append(f"data.{low} must not be above data.{high}, got {a} and {b}")
    n = settings.max_numbers
    # An unreduced numerator is a sum of at most 2^(n-1) products of the n numbers; it must fit 63 bits.
    if settings.number_high**n * 2 ** (n - 1) >= 2**63:
        highest = int((2**63 / 2 ** (n - 1)) ** (1 / n)) - 1
        problems.append(f"data.number_high must be at most {highest} with {n} numbers, got {settings.number_high}")
    if not settings.operations:
        problems.append("data.operations must name at least one operation")
    if problems:
        raise DataError("; ".join(problems))


def _shuffled(problems: list[Problem], seed: int, split: str) -> list[Problem]:
    order = np.random.default_rng((seed, 2, split == _TRAIN)).permutation(len(problems))
    return [problems[index] for index in order.tolist()]


def _sizes(settings: CountdownData) -> Mapping[str, int]:
    return {_TRAIN: settings.train_size, _VALIDATION: settings.validation_size}


def _classes(settings: CountdownData) -> list[tuple[int, ...]]:
    """Counts of numbers that share a quota: each its own where difficulties are balanced, else all together."""
    counts = tuple(range(settings.min_numbers, settings.max_numbers + 1))
    return [(n,) for n in counts] if settings.balance_difficulty else [counts]


def _quotas(settings: CountdownData) -> list[Mapping[str, int]]:
    """Rows of each split for each class, as equal as whole numbers can be."""
    parts = len(_classes(settings))
    return [
        {split: size // parts + (index < size % parts) for split, size in _sizes(settings).items()}
        for index in range(parts)
    ]


# ---------------------------------------------------------------- small spaces: solved whole


def _from_whole_space(settings: CountdownData, seed: int) -> dict[str, list[Problem]]:
    """Problems out of all that exist, dealt to the splits multiset by multiset."""
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
            _refuse_for_size(settings, counts, asked, total)
        held_out, rest = _deal(groups, quota[_VALIDATION] * total // asked, rng)
        for split, pool in ((_TRAIN, rest), (_VALIDATION, held_out)):
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
        problems.append(Problem(shown, target, targets[target], distractor, value).proved())
    return problems


def _refuse_for_size(
    settings: CountdownData, counts: Sequence[int], asked: int, total: int, *, about: bool = False
) -> None:
    only = f"only about {total:,}" if about else f"only {total:,}"
    raise DataError(
        f"data.train_size + data.validation_size: {asked:,} problems asked for, but {only} exist with "
        f"{' or '.join(map(str, counts))} numbers of {settings.number_low}..{settings.number_high}, operations "
        f"{' '.join(settings.operations)} and targets {settings.target_low}..{settings.target_high}. Ask for fewer, or "
        "widen the ranges"
    )


def _deal(
    groups: list[list[Problem]], num_held_out: int, rng: np.random.Generator
) -> tuple[list[Problem], list[Problem]]:
    """Whole groups at random until exactly `num_held_out` problems are set apart, if whole groups can make it."""
    held_out: list[Problem] = []
    rest: list[Problem] = []
    for index in rng.permutation(len(groups)).tolist():
        fits = len(held_out) + len(groups[index]) <= num_held_out
        (held_out if fits else rest).extend(groups[index])
    return held_out, rest


def _sample(pool: list[Problem], size: int, split: str, rng: np.random.Generator) -> list[Problem]:
    if len(pool) < size:
        raise DataError(
            f"data.{split}_size: {size:,} asked for, but the splits, which share no multiset of numbers, leave "
            f"{len(pool):,}. Ask for fewer, or widen the ranges of numbers and targets"
        )
    return [pool[index] for index in sorted(rng.permutation(len(pool))[:size].tolist())]


# ---------------------------------------------------------------- large spaces: drawn


def _processes(settings: CountdownData, num_processes: int | None) -> int:
    if num_processes is not None:
        return num_processes
    if sum(_sizes(settings).values()) < _MIN_ROWS_FOR_PROCESSES:
        return 1
    # The cores that this process may use; where the system cannot say, all.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(settings: CountdownData, seed: int, num_processes: int) -> Iterator[list[Problem]]:
    """Chunk after chunk without end, drawn here or by several processes."""
    if num_processes == 1:
        yield from (draw_chunk(settings, seed, chunk) for chunk in count())
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(settings, seed)) for _ in range(num_processes)]
        for chunk in range(_CHUNKS_AHEAD * num_processes):
            _tell(workers[chunk % num_processes], chunk)
        for chunk in count():
            worker = workers[chunk % num_processes]
            assert worker.stdout is not None
            line = worker.stdout.readline()
            if not line:
                raise DataError(f"countdown: a drawing process ended (exit code {worker.wait()}); run again")
            yield [
                Problem(tuple(numbers), *rest) for numbers, *rest in json.loads(line)
            ]  # proved where they were drawn
            _tell(worker, chunk + _CHUNKS_AHEAD * num_processes)


@contextmanager
def _worker(settings: CountdownData, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A process that draws; it is ended with the block."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "data.countdown_draws", settings.model_dump_json(), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _tell(worker: subprocess.Popen[str], chunk: int) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{chunk}\n")
    worker.stdin.flush()


class _Dealer:
    """Deals drawn problems to splits and classes until all quotas are full."""

    def __init__(self, settings: CountdownData, seed: int) -> None:
        self._seed = seed
        self._class_of = {n: index for index, counts in enumerate(_classes(settings)) for n in counts}
        self._quotas = _quotas(settings)
        self._found: list[dict[str, list[Problem]]] = [{_TRAIN: [], _VALIDATION: []} for _ in self._quotas]
        self._seen: set[tuple[Multiset, int]] = set()
        self._num_wanted = self._num_new = 0
        sizes = _sizes(settings)
        held_out = sizes[_VALIDATION]
        # Three standard deviations more than its share, so that the held-out split is full before the training split.
        self._share = min(0.5, (held_out + 3 * held_out**0.5 + 3) / sum(sizes.values()))

    def deal(self, chunks: Iterator[list[Problem]]) -> dict[str, list[Problem]]:
        """Take chunks until every quota is full."""
        for number, problems in enumerate(chunks, start=1):
            for problem in problems:
                self._take(problem)
            if all(len(found[split]) == size for split, size, found in self._state()):
                return {
                    split: [problem for found in self._found for problem in found[split]]
                    for split in (_TRAIN, _VALIDATION)
                }
            if number % _STALL_CHUNKS == 0:
                if self._num_new <= _STALL_SHARE * self._num_wanted:
                    self._refuse(number * CHUNK)
                self._num_wanted = self._num_new = 0
        raise AssertionError("the stream of chunks is endless")

    def _state(self) -> Iterator[tuple[str, int, dict[str, list[Problem]]]]:
        for quota, found in zip(self._quotas, self._found, strict=True):
            for split, size in quota.items():
                yield split, size, found

    def _take(self, problem: Problem) -> None:
        multiset = tuple(sorted(problem.numbers))
        index = self._class_of[len(multiset)]
        split = _VALIDATION if _unit_hash(multiset, self._seed) < self._share else _TRAIN
        found = self._found[index][split]
        if len(found) == self._quotas[index][split]:
            return
        self._num_wanted += 1
        if (multiset, problem.target) not in self._seen:
            self._seen.add((multiset, problem.target))
            found.append(problem)
            self._num_new += 1

    def _refuse(self, num_draws: int) -> None:
        had = ", ".join(f"{len(found[split]):,} of {size:,} for {split}" for split, size, found in self._state())
        raise DataError(
            f"countdown: {num_draws:,} draws gave {had} problems, and less than one in a hundred is still new. These "
            "settings allow hardly more: ask for fewer rows (data.train_size, data.validation_size), or widen the "
            "ranges of numbers, targets and operations"
        )


def _unit_hash(multiset: Multiset, seed: int) -> float:
    """A number in [0, 1) that depends on the multiset and the seed alone (splitmix64)."""
    state = seed
    for number in multiset:
        state = (state * 1_000_003 + number + 1) & 0xFFFFFFFFFFFFFFFF
    state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 31)) / 2**64
