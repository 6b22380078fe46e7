"""Answers to held-out problems and a validation made of them, as `validation/<name>.json` of a run holds it."""

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
from rlcore.evaluation.stats import (
    Array,
    Interval,
    PairedDifference,
    majority,
    mean_intervals,
    paired_difference,
    pass_all_at_k,
    pass_at_k,
)
from rlcore.score import Score
from rlcore.storage.documents import first_problem
from rlcore.storage.publish import write_json_atomically

FORMAT_VERSION = 1

K = TypeVar("K", int, str)

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Response:
    """One answer. `parts` are the named components of its score, `num_tokens` counts the end token.

    `logprob` is the sum of its tokens' log-probabilities at sampling time (nats), None where it was not recorded.
    `said` is the answer that the scorer found in the text, None where it returned none.
    `failure` is why there is no score, None where there is one; an answer without a score is in no figure.
    """

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
        """Key for majority votes: equal for equal answers."""
        return vote(self.text) if self.said is None else self.said

    @property
    def solved(self) -> bool:
        """Whether the answer is right: by the part `correct` if there is one, else by a full score (1)."""
        return Score(self.score, self.parts).solved


@dataclass(frozen=True)
class ProblemResult:
    """All answers to one held-out problem. `difficulty` is the task's own measure, 0 where it has none.

    `data_source` is '' in files written before there were mixtures: that of the whole validation.
    """

    prompt_id: int
    difficulty: int
    prompt_text: str
    ground_truth_json: str
    greedy: Response | None
    samples: tuple[Response, ...]
    data_source: str = ""

    @property
    def scored_samples(self) -> tuple[Response, ...]:
        """Samples that have a score."""
        return tuple(answer for answer in self.samples if answer.failure is None)

    @property
    def is_scored(self) -> bool:
        """Whether a sample has a score, if there are samples, and the greedy answer, if there is one."""
        return (bool(self.scored_samples) or not self.samples) and (self.greedy is None or self.greedy.failure is None)

    @property
    def num_solved(self) -> int:
        """c: samples that are right."""
        return sum(answer.solved for answer in self.scored_samples)

    @property
    def mean_score(self) -> float:
        """Mean score of the samples, 0 without any."""
        return sum(answer.score for answer in self.scored_samples) / max(1, len(self.scored_samples))


def vote(text: str) -> str:
    """Key for majority votes where the scorer returned none, without white space: the last `<answer>`, else the text
    after the last `####`, else the whole text.

    >>> vote("so <answer> 3 + 4 </answer>"), vote("it is #### 7"), vote("3 + 4")
    ('3+4', '7', '3+4')
    """
    tagged: list[str] = _TAGGED.findall(text)
    said = tagged[-1] if tagged else text.rpartition("####")[2]
    return "".join(said.split())


def num_samples(problems: Sequence[ProblemResult]) -> int:
    """k: sampled answers to each problem; 0 without problems.

    Raises:
        DataError: problems have different numbers of samples.
    """
    counts = {len(problem.samples) for problem in problems}
    if len(counts) > 1:
        raise DataError(f"problems of a validation: each needs the same number of samples, got {sorted(counts)}")
    return counts.pop() if counts else 0


def problem_statistics(problems: Sequence[ProblemResult]) -> dict[str, Array]:
    """Each statistic's value for each problem, Float[P], by its name below `val-core/<data_source>/`.

    Sampled statistics need samples, greedy ones a greedy answer to every problem. Answers without a score do not
    count: of k samples with two failures the statistics are those of k - 2.

    Args:
        problems: each of which `is_scored`.

    Raises:
        DataError: problems have different numbers of samples.
    """
    k = num_samples(problems)
    found: dict[str, Array] = {}
    if k:
        solved = np.array([problem.num_solved for problem in problems])
        answers = np.array([len(problem.scored_samples) for problem in problems])
        found = {
            f"reward/mean@{k}": np.array([problem.mean_score for problem in problems]),
            f"reward/pass@{k}": pass_at_k(answers, solved, answers),
            f"reward/pass_all@{k}": pass_all_at_k(answers, solved, answers),
            f"reward/maj@{k}": np.array(
                [
                    majority([a.vote for a in each.scored_samples], [float(a.solved) for a in each.scored_samples])
                    for each in problems
                ]
            ),
            f"acc/mean@{k}": solved / answers,
        }
    greedy = [problem.greedy for problem in problems if problem.greedy is not None]
    if greedy and len(greedy) == len(problems):
        found["reward/greedy"] = np.array([answer.score for answer in greedy])
        found["acc/greedy"] = np.array([float(answer.solved) for answer in greedy])
    return found


@dataclass(frozen=True)
class ValidationResult:
    """One model judged on held-out problems, each answered the same number of times.

    `name` is `before`, `after` or `step-000020`; `step` and `policy_version` say which weights were judged.
    `data_source` is that of all problems, `all` where they come from several. `suite`: fingerprint of the suite that
    the problems are of, with its limits and its scorer; '' for the run's own held-out problems.
    """

    name: str
    step: int
    policy_version: int
    data_source: str
    problems: tuple[ProblemResult, ...]
    settings: EvaluationConfig
    suite: str = ""

    @property
    def num_samples(self) -> int:
        """k: sampled answers to each problem."""
        return num_samples(self.problems)

    @property
    def reward_statistic(self) -> str:
        """The statistic that stands for the held-out reward: the samples' mean, else the greedy answer's score."""
        return f"reward/mean@{self.num_samples}" if self.num_samples else "reward/greedy"

    @property
    def scored_only(self) -> "ValidationResult":
        """The result over the problems that figures are made of: those with a score."""
        return replace(self, problems=tuple(problem for problem in self.problems if problem.is_scored))

    def intervals_of(self, columns: Mapping[str, Array]) -> dict[str, Interval]:
        """Mean over problems and interval of each column, Float[P], by this validation's settings."""
        if not columns:
            return {}
        table = np.stack(list(columns.values()), axis=1)
        confidence, num_resamples = self.settings.confidence, self.settings.num_resamples
        found = mean_intervals(table, confidence=confidence, num_resamples=num_resamples)
        return dict(zip(columns, found, strict=True))

    @property
    def failures(self) -> list[str]:
        """Why an answer has no score, for each that the scorer failed on; it is in no figure."""
        answers = [each for problem in self.problems for each in (*problem.samples, problem.greedy) if each is not None]
        return [answer.failure for answer in answers if answer.failure is not None]

    @cached_property
    def intervals(self) -> Mapping[str, Interval]:
        """Each statistic with its interval over problems, by its name below `val-core/<data_source>/`."""
        return self.intervals_of(problem_statistics(self.scored_only.problems))

    def by_source(self) -> dict[str, "ValidationResult"]:
        """The result of each data source, in the order of their names; empty where there is only one."""
        parts = self._parts(lambda problem: problem.data_source)
        return {name: replace(part, data_source=name) for name, part in parts.items()} if len(parts) > 1 else {}

    def by_difficulty(self) -> dict[int, "ValidationResult"]:
        """The result of each difficulty, easiest first, over the problems that figures are made of."""
        return self.scored_only._parts(lambda problem: problem.difficulty)

    def _parts(self, key: Callable[[ProblemResult], K]) -> dict[K, "ValidationResult"]:
        """The result of the problems of each key, in order of the keys."""
        ordered = sorted(self.problems, key=key)  # a stable sort: problems of a part stay in their order
        return {value: replace(self, problems=tuple(group)) for value, group in groupby(ordered, key)}

    def metrics(self) -> Mapping[str, float]:
        """The figures of this validation under their metric names (`rlcore/tracking/metrics.md` defines them), each
        with `/ci_low` and `/ci_high`; of several sources those of each, and of all problems as `val-core/all/...`.
        """
        summary = {name: value for part in self.by_source().values() for name, value in part.metrics().items()}
        for statistic, interval in self.intervals.items():
            name = f"val-core/{self.data_source}/{statistic}"
            summary |= {name: interval.value, f"{name}/ci_low": interval.low, f"{name}/ci_high": interval.high}
        if self.failures:
            summary[f"val-aux/{self.data_source}/num_unscored"] = float(len(self.failures))
        return summary

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all.

        Raises:
            DiskSpaceError: there is no room.
        """
        document: dict[str, Any] = _RESULT.dump_python(self, mode="json")
        write_json_atomically(path, {"format_version": FORMAT_VERSION, **document})

    @classmethod
    def read(cls, path: Path) -> "ValidationResult":
        """What `write` wrote.

        Raises:
            DataError: the file is missing, damaged or of another format.
        """
        try:
            document = _DOCUMENT.validate_json(path.read_bytes())
            version = document.pop("format_version", None)
            if version == FORMAT_VERSION:
                return _RESULT.validate_python(document)
        except (OSError, ValidationError) as error:
            raise DataError(f"{path}: is no validation result ({first_problem(error)}); validate again") from error
        raise DataError(
            f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}; read it with the version of "
            "Millrace that wrote it, or validate again"
        )


_DOCUMENT = TypeAdapter(dict[str, Any])
_RESULT = TypeAdapter(ValidationResult)


# ------------------------------------------------------------------ figures by number of answers, and two validations


@dataclass(frozen=True, slots=True)
class Comparison:
    """One statistic of two validations on the problems that both have; differences are `second - first`."""

    statistic: str
    num_problems: int
    first: Interval
    second: Interval
    paired: PairedDifference


def pass_curve(result: ValidationResult) -> dict[int, Interval]:
    """pass@k for k = 1, 2, 4, ... and all samples, each with its interval."""
    result = result.scored_only
    num_samples = result.num_samples
    if not num_samples:
        return {}
    ks = sorted({*(2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples), num_samples})
    right = [problem.num_solved for problem in result.problems]
    answers = [len(problem.scored_samples) for problem in result.problems]
    found = result.intervals_of({str(k): pass_at_k(answers, right, np.minimum(k, answers)) for k in ks})
    return {int(k): interval for k, interval in found.items()}


def compare(first: ValidationResult, second: ValidationResult) -> tuple[Comparison, ...]:
    """Every statistic that both validations have, paired over the problems that both have.

    Raises:
        DataError: they share no problem that has figures in both, or a problem of the same id asks for something else.
    """
    first, second = first.scored_only, second.scored_only
    known = {problem.prompt_id: problem for problem in second.problems}
    pairs = [(problem, known[problem.prompt_id]) for problem in first.problems if problem.prompt_id in known]
    if not pairs:
        raise DataError(
            f"validations {first.name} and {second.name}: share no problem that has figures in both, so nothing can be "
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
    pair = partial(paired_difference, confidence=settings.confidence, num_resamples=settings.num_resamples)
    found = []
    for name in (name for name in first_values if name in second_values):
        paired = pair(first_values[name], second_values[name])
        found.append(Comparison(name, len(pairs), first.intervals[name], second.intervals[name], paired))
    return tuple(found)
