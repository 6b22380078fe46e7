"""Answers to held-out problems and a validation made of them, as `validation/<name>.json` of a run holds it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rlcore.config import ValidationConfig
from rlcore.errors import DataError
from rlcore.evaluation.stats import Array, Interval, bootstrap_intervals, majority, pass_all_at_k, pass_at_k
from rlcore.storage.publish import write_json_atomically

FORMAT_VERSION = 1
FULL_MARKS = 1.0
"""Score of a solved problem where the scorer names no part `correct`."""

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
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
    def solved(self) -> bool:
        """Whether the answer is right: by the part `correct` if there is one, else by a full score (1)."""
        return self.parts.get("correct", self.score) >= FULL_MARKS

    @property
    def vote(self) -> str:
        """Key for majority votes: equal for equal answers."""
        return vote(self.text) if self.said is None else self.said


@dataclass(frozen=True)
class ProblemResult:
    """All answers to one held-out problem. `difficulty` is the task's own measure, 0 where it has none.

    `data_source` is '' in files written before there were mixtures: that of the whole validation.
    """

    prompt_id: int
    difficulty: int
    prompt_text: str
    ground_truth_json: str
    greedy: Answer | None
    samples: tuple[Answer, ...]
    data_source: str = ""

    @property
    def scored(self) -> tuple[Answer, ...]:
        """Samples that have a score."""
        return tuple(answer for answer in self.samples if answer.failure is None)

    @property
    def has_figures(self) -> bool:
        """Whether a sample has a score, if there are samples, and the greedy answer, if there is one."""
        return (bool(self.scored) or not self.samples) and (self.greedy is None or self.greedy.failure is None)

    @property
    def num_unscored(self) -> int:
        """Answers that the scorer failed on."""
        return len(self.samples) - len(self.scored) + (self.greedy is not None and self.greedy.failure is not None)

    @property
    def num_solved(self) -> int:
        """c: samples that are right."""
        return sum(answer.solved for answer in self.scored)

    @property
    def mean_score(self) -> float:
        """Mean score of the samples, 0 without any."""
        return sum(answer.score for answer in self.scored) / max(1, len(self.scored))


def vote(text: str) -> str:
    """Key for majority votes where the scorer returned none, without white space: the last `<answer>`, else the text
    after the last `####`, else the whole text.

    >>> vote("so <answer> 3 + 4 </answer>"), vote("it is #### 7"), vote("3 + 4")
    ('3+4', '7', '3+4')
    """
    tagged: list[str] = _TAGGED.findall(text)
    said = tagged[-1] if tagged else text.rpartition("####")[2]
    return "".join(said.split())


def num_samples_of(problems: Sequence[ProblemResult]) -> int:
    """k: sampled answers to each problem; 0 without problems.

    Raises:
        DataError: problems have different numbers of samples.
    """
    counts = {len(problem.samples) for problem in problems}
    if len(counts) > 1:
        raise DataError(f"problems of a validation: each needs the same number of samples, got {sorted(counts)}")
    return counts.pop() if counts else 0


def per_problem(problems: Sequence[ProblemResult]) -> dict[str, Array]:
    """Each statistic's value for each problem, Float[P], by its name below `val-core/<data_source>/`.

    Sampled statistics need samples, greedy ones a greedy answer to every problem. Answers without a score do not
    count: of k samples with two failures the statistics are those of k - 2.

    Args:
        problems: each of which `has_figures`.

    Raises:
        DataError: problems have different numbers of samples.
    """
    k = num_samples_of(problems)
    found: dict[str, Array] = {}
    if k:
        solved = np.array([problem.num_solved for problem in problems])
        answers = np.array([len(problem.scored) for problem in problems])
        found = {
            f"reward/mean@{k}": np.array([problem.mean_score for problem in problems]),
            f"reward/pass@{k}": pass_at_k(answers, solved, answers),
            f"reward/pass_all@{k}": pass_all_at_k(answers, solved, answers),
            f"reward/maj@{k}": np.array(
                [majority([a.vote for a in each.scored], [float(a.solved) for a in each.scored]) for each in problems]
            ),
            f"acc/mean@{k}": solved / answers,
        }
    greedy = [problem.greedy for problem in problems if problem.greedy is not None]
    if greedy and len(greedy) == len(problems):
        found["reward/greedy"] = np.array([answer.score for answer in greedy])
        found["acc/greedy"] = np.array([float(answer.solved) for answer in greedy])
    return found


def core_name(data_source: str, statistic: str) -> str:
    """A statistic's full metric name.

    >>> core_name("countdown", "reward/mean@4")
    'val-core/countdown/reward/mean@4'
    """
    return f"val-core/{data_source}/{statistic}"


@dataclass(frozen=True)
class ValidationResult:
    """One model judged on held-out problems, each answered the same number of times.

    `name` is `before`, `after` or `step-000020`; `step` and `policy_version` say which weights were judged.
    `data_source` is that of all problems, `all` where they come from several.
    """

    name: str
    step: int
    policy_version: int
    data_source: str
    problems: tuple[ProblemResult, ...]
    settings: ValidationConfig

    @property
    def num_samples(self) -> int:
        """k: sampled answers to each problem."""
        return num_samples_of(self.problems)

    @property
    def with_figures(self) -> "ValidationResult":
        """The result over the problems that figures are made of: those with a score."""
        return replace(self, problems=tuple(problem for problem in self.problems if problem.has_figures))

    def intervals_of(self, columns: Mapping[str, Array]) -> dict[str, Interval]:
        """Mean over problems and bootstrap interval of each column, Float[P], by this validation's settings."""
        if not columns:
            return {}
        table = np.stack(list(columns.values()), axis=1)
        confidence, num_resamples = self.settings.confidence, self.settings.num_resamples
        found = bootstrap_intervals(table, confidence=confidence, num_resamples=num_resamples)
        return dict(zip(columns, found, strict=True))

    @property
    def num_unscored(self) -> int:
        """Answers that the scorer failed on; they are in no figure."""
        return sum(problem.num_unscored for problem in self.problems)

    @cached_property
    def intervals(self) -> Mapping[str, Interval]:
        """Each statistic with its bootstrap interval over problems, by its name below `val-core/<data_source>/`."""
        return self.intervals_of(per_problem(self.with_figures.problems))

    def by_source(self) -> tuple["ValidationResult", ...]:
        """The result of each data source, in the order of their names; empty where there is only one."""
        groups: dict[str, list[ProblemResult]] = {}
        for problem in self.problems:
            groups.setdefault(problem.data_source, []).append(problem)
        if len(groups) < 2:
            return ()
        return tuple(replace(self, data_source=name, problems=tuple(groups[name])) for name in sorted(groups))

    def summary(self) -> Mapping[str, float]:
        """The figures of this validation under their metric names, each with `/ci_low` and `/ci_high`.

        `val-core/<data_source>/reward/` has `mean@k` (mean score of the k samples), `pass@k`, `pass_all@k`, `maj@k`
        (shares of problems solved, see `rlcore.evaluation.stats`) and `greedy` (score of the greedy answer);
        `val-core/<data_source>/acc/` has `mean@k` and `greedy` over solved (1) or not (0). With several sources there
        are figures of each, and of all problems as `val-core/all/...`. `val-aux/<data_source>/num_unscored` counts
        answers without a score, where there are any.
        """
        summary = {name: value for part in self.by_source() for name, value in part.summary().items()}
        for statistic, interval in self.intervals.items():
            name = core_name(self.data_source, statistic)
            summary |= {name: interval.value, f"{name}/ci_low": interval.low, f"{name}/ci_high": interval.high}
        if self.num_unscored:
            summary[f"val-aux/{self.data_source}/num_unscored"] = float(self.num_unscored)
        return summary

    def renamed(self, name: str) -> "ValidationResult":
        """This result under another name."""
        return replace(self, name=name)

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
        except (OSError, ValidationError) as error:
            raise DataError(f"{path}: is no validation result ({_first_line(error)}); validate again") from error
        version = document.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}; read it with the version of "
                "Millrace that wrote it, or validate again"
            )
        try:
            return _RESULT.validate_python(document)
        except ValidationError as error:
            raise DataError(f"{path}: is no validation result ({_first_line(error)}); validate again") from error


_DOCUMENT = TypeAdapter(dict[str, Any])
_RESULT = TypeAdapter(ValidationResult)


def _first_line(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg']}"
