"""Responses to held-out problems and the result of a validation, stored as `validation/<name>.json` in a run's
folder."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rlcore.config import EvaluationConfig
from rlcore.errors import DataError
from rlcore.evaluation import stats
from rlcore.evaluation.stats import Array, Interval
from rlcore.score import HELD_OUT_REWARD, Score
from rlcore.storage.documents import first_problem
from rlcore.storage.publish import write_json_atomically

FORMAT_VERSION = 1

K = TypeVar("K", int, str)

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Response:
    """One response to a problem. `parts`: the components of its score. `num_tokens` includes the end token. `logprob`:
    the sum of the sampled tokens' log-probabilities, in nats. `said`: the answer that the scorer extracted. `failure`:
    the reason for a missing score. Metrics ignore a response without a score."""

    text: str
    score: float
    parts: Mapping[str, float]
    num_tokens: int
    finish_reason: Literal["stop", "length"]
    logprob: float | None = None
    said: str | None = None
    failure: str | None = None

    @property
    def vote(self) -> str:
        """The response's final answer as a key for majority votes. Responses with equal answers have the same key."""
        return vote(self.text) if self.said is None else self.said

    @property
    def solved(self) -> bool:
        """True if the part `correct` is at least 1, or if there is no such part and the total is at least 1."""
        return Score(self.score, self.parts).solved


@dataclass(frozen=True)
class ProblemResult:
    """All responses to one held-out problem. `difficulty` is 0 if the task defines none."""

    prompt_id: int
    difficulty: int
    prompt_text: str
    ground_truth_json: str
    greedy: Response | None
    samples: tuple[Response, ...]
    data_source: str = ""

    @property
    def scored_samples(self) -> tuple[Response, ...]:
        """The samples that have a score."""
        return tuple(response for response in self.samples if response.failure is None)

    @property
    def is_scored(self) -> bool:
        """False if the greedy response has no score, or if the problem has samples and none of them has a score."""
        return (bool(self.scored_samples) or not self.samples) and (self.greedy is None or self.greedy.failure is None)

    @property
    def num_solved(self) -> int:
        """The number of correct samples, c."""
        return sum(response.solved for response in self.scored_samples)

    @property
    def mean_score(self) -> float:
        """The mean score of the samples, or 0 if no sample has a score."""
        return sum(response.score for response in self.scored_samples) / max(1, len(self.scored_samples))


def vote(text: str) -> str:
    """Return the final answer in a response's text, without white space, as a key for majority votes.

    The answer is the content of the last `<answer>`, otherwise the text after the last `####`, otherwise the whole
    text.

    >>> vote("so <answer> 3 + 4 </answer>"), vote("it is #### 7"), vote("3 + 4")
    ('3+4', '7', '3+4')
    """
    tagged: list[str] = _TAGGED.findall(text)
    said = tagged[-1] if tagged else text.rpartition("####")[2]
    return "".join(said.split())


def num_samples(problems: Sequence[ProblemResult]) -> int:
    """Return the number of samples per problem (0 if there are no problems). Raises DataError if the numbers differ."""
    counts = {len(problem.samples) for problem in problems}
    if len(counts) > 1:
        raise DataError(f"problems of a validation: each needs the same number of samples, got {sorted(counts)}")
    return max(counts, default=0)


def problem_statistics(problems: Sequence[ProblemResult]) -> dict[str, Array]:
    """Return one value per problem (Float[P]) for each statistic. The name of a statistic is the name of its metric
    without the prefix `val-core/<data_source>/`. Samples without a score are ignored. Greedy statistics are left out
    unless every problem has a greedy response. Raises DataError if problems have different numbers of samples."""
    k = num_samples(problems)
    found: dict[str, Array] = {}
    if k:
        solved = np.array([problem.num_solved for problem in problems])
        counts = np.array([len(problem.scored_samples) for problem in problems])
        votes = [[(one.vote, float(one.solved)) for one in problem.scored_samples] for problem in problems]
        found = {
            f"reward/mean_at_{k}": np.array([problem.mean_score for problem in problems]),
            f"reward/pass_at_{k}": stats.pass_at_k(counts, solved, counts),
            f"reward/pass_all_at_{k}": stats.pass_all_at_k(counts, solved, counts),
            f"reward/maj_at_{k}": np.array([stats.majority(*zip(*each, strict=True)) for each in votes]),
            f"acc/mean_at_{k}": solved / counts,
        }
    greedy = [problem.greedy for problem in problems if problem.greedy is not None]
    if greedy and len(greedy) == len(problems):
        found["reward/greedy"] = np.array([response.score for response in greedy])
        found["acc/greedy"] = np.array([float(response.solved) for response in greedy])
    return found


@dataclass(frozen=True)
class ValidationResult:
    """The result of one model on held-out problems, with the same number of responses to each problem.

    `name` is `before`, `after` or a step such as `step-000020`. `data_source` is `all` for several sources. `suite` is
    a fingerprint of the suite's rows, sampling and scoring, or '' for the run's held-out problems."""

    name: str
    step: int
    policy_version: int
    data_source: str
    problems: tuple[ProblemResult, ...]
    settings: EvaluationConfig
    suite: str = ""

    @property
    def num_samples(self) -> int:
        """The number of samples for each problem, k."""
        return num_samples(self.problems)

    @property
    def reward_statistic(self) -> str:
        """The name of the statistic that is the held-out reward. It is the mean score of the samples, or the greedy
        score if there are no samples."""
        return f"reward/mean_at_{self.num_samples}" if self.num_samples else "reward/greedy"

    @property
    def scored_only(self) -> "ValidationResult":
        """The result restricted to the problems for which `is_scored` is true."""
        return replace(self, problems=tuple(problem for problem in self.problems if problem.is_scored))

    def intervals_of(self, columns: Mapping[str, Array]) -> dict[str, Interval]:
        """Return each column's mean over all problems, and the confidence interval of this mean. A column has one value
        per problem (Float[P])."""
        if not columns:
            return {}
        table, settings = np.stack(list(columns.values()), axis=1), self.settings
        found = stats.mean_intervals(table, confidence=settings.confidence, num_resamples=settings.num_resamples)
        return dict(zip(columns, found, strict=True))

    @property
    def failures(self) -> list[str]:
        """The reasons for missing scores, one for each response without a score."""
        responses = (each for problem in self.problems for each in (*problem.samples, problem.greedy))
        return [each.failure for each in responses if each is not None and each.failure is not None]

    @cached_property
    def intervals(self) -> Mapping[str, Interval]:
        """The mean and interval of each statistic of `problem_statistics` over the scored problems."""
        return self.intervals_of(problem_statistics(self.scored_only.problems))

    def by_source(self) -> dict[str, "ValidationResult"]:
        """Return the part of this result for each data source, sorted by name, or {} if there is only one data
        source."""
        parts = self._parts(lambda problem: problem.data_source)
        return {name: replace(part, data_source=name) for name, part in parts.items()} if len(parts) > 1 else {}

    def by_difficulty(self) -> dict[int, "ValidationResult"]:
        """Return the part of this result for each difficulty, easiest first. Problems that are not scored are left
        out."""
        return self.scored_only._parts(lambda problem: problem.difficulty)

    def _parts(self, key: Callable[[ProblemResult], K]) -> dict[K, "ValidationResult"]:
        ordered = sorted(self.problems, key=key)  # a stable sort, which keeps the order of problems in a group
        return {value: replace(self, problems=tuple(group)) for value, group in groupby(ordered, key)}

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics by name (see `rlcore/tracking/metrics.md`). Metrics whose names end in `/ci_low` or
        `/ci_high` are the bounds of a confidence interval. The first metric is the held-out reward, except in the
        result of a suite. If there are several data sources, each source has its own metrics, and `val-core/all/...`
        covers all sources together."""
        reward = self.intervals.get(self.reward_statistic) if not self.suite else None
        summary = {} if reward is None else {HELD_OUT_REWARD: reward.value}
        parts = [part.metrics() for part in self.by_source().values()]
        summary |= {name: value for part in parts for name, value in part.items() if name != HELD_OUT_REWARD}
        for statistic, interval in self.intervals.items():
            name = f"val-core/{self.data_source}/{statistic}"
            summary |= {name: interval.value, f"{name}/ci_low": interval.low, f"{name}/ci_high": interval.high}
        if self.failures:
            summary[f"val-aux/{self.data_source}/num_unscored"] = float(len(self.failures))
        return summary

    def write(self, path: Path) -> None:
        """Write this result as a JSON file, atomically. Raises DiskSpaceError if the disk is full."""
        document: dict[str, Any] = _RESULT.dump_python(self, mode="json")
        write_json_atomically(path, {"format_version": FORMAT_VERSION, **document})

    @classmethod
    def read(cls, path: Path) -> "ValidationResult":
        """Read a file that `write` wrote. Raises DataError if the file is missing, damaged or of another format."""
        try:
            document = _DOCUMENT.validate_json(path.read_bytes())
            version = document.pop("format_version", None)
            if version == FORMAT_VERSION:
                return _RESULT.validate_python(document)
        except (OSError, ValidationError) as error:
            raise DataError(f"{path}: is not a validation result ({first_problem(error)}); validate again") from error
        raise DataError(
            f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}; read it with the version of "
            "Millrace that wrote it, or validate again"
        )


_DOCUMENT = TypeAdapter(dict[str, Any])
_RESULT = TypeAdapter(ValidationResult)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One statistic of two validations on their common problems. Differences are `second - first`."""

    statistic: str
    num_problems: int
    first: Interval
    second: Interval
    paired: stats.PairedDifference


def pass_curve(result: ValidationResult) -> dict[int, Interval]:
    """Return the mean pass_at_k and its confidence interval for k = 1, 2, 4, ... and for k equal to the number of
    samples. The keys are the values of k."""
    result = result.scored_only
    k = result.num_samples
    ks = sorted({*(2**power for power in range(k.bit_length())), k} - {0})
    right = [problem.num_solved for problem in result.problems]
    counts = [len(problem.scored_samples) for problem in result.problems]
    found = result.intervals_of({str(k): stats.pass_at_k(counts, right, np.minimum(k, counts)) for k in ks})
    return {int(k): interval for k, interval in found.items()}


def compare(first: ValidationResult, second: ValidationResult) -> tuple[Comparison, ...]:
    """Compare two validations on the scored problems that both contain. Each statistic that both validations have gives
    one comparison. Raises DataError if the validations share no scored problem, or if two problems with the same id
    differ."""
    first, second = first.scored_only, second.scored_only
    known = {problem.prompt_id: problem for problem in second.problems}
    pairs = [(problem, known[problem.prompt_id]) for problem in first.problems if problem.prompt_id in known]
    if not pairs:
        raise DataError(
            f"validations {first.name} and {second.name}: share no problem that is scored in both, so nothing can be "
            "paired"
        )
    for one, other in pairs:
        if one.ground_truth_json != other.ground_truth_json or first.data_source != second.data_source:
            raise DataError(
                f"validations {first.name} and {second.name}: problem {one.prompt_id} is not the same in both; "
                "compare validations of the same dataset"
            )
    first = replace(first, problems=tuple(one for one, _ in pairs))
    second = replace(second, problems=tuple(other for _, other in pairs))
    first_values, second_values = problem_statistics(first.problems), problem_statistics(second.problems)
    settings = second.settings
    pair = partial(stats.paired_difference, confidence=settings.confidence, num_resamples=settings.num_resamples)
    return tuple(
        Comparison(name, len(pairs), first.intervals[name], second.intervals[name], pair(values, second_values[name]))
        for name, values in first_values.items()
        if name in second_values
    )
