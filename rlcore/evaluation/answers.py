"""Answers to held-out problems, and each statistic's value for one problem."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlcore.errors import DataError
from rlcore.evaluation.stats import Array, majority, pass_all_at_k, pass_at_k

FULL_MARKS = 1.0
"""Score of a solved problem where the scorer names no part `correct`."""

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """One answer. `parts` are the named components of its score, `num_tokens` counts the end token.

    `logprob` is the sum of its tokens' log-probabilities when they were drawn (nats), None where nobody kept it.
    `said` is the answer that its scorer found in the text, None where the scorer found none or does not say.
    `failure` is why the scorer gave no score, None where it gave one; without a score the answer is in no figure.
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
        """Whether the answer is right: the part `correct` says so, else the score is full (1)."""
        return self.parts.get("correct", self.score) >= FULL_MARKS

    @property
    def vote(self) -> str:
        """What it says, for majority votes: equal for answers that say the same."""
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
    """What an answer says where its scorer does not tell: its last `<answer>`, else what follows its last `####`, else
    all of it. Without spaces, so that answers differ only by what they say.

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

    Sampled statistics are missing without samples, greedy ones unless every problem has a greedy answer. An answer
    without a score is as if it had not been drawn: of k samples with two failures the statistics are those of k - 2.

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
            f"reward/maj@{k}": np.array([_majority_solved(problem) for problem in problems]),
            f"acc/mean@{k}": solved / answers,
        }
    greedy = [problem.greedy for problem in problems if problem.greedy is not None]
    if greedy and len(greedy) == len(problems):
        found["reward/greedy"] = np.array([answer.score for answer in greedy])
        found["acc/greedy"] = np.array([float(answer.solved) for answer in greedy])
    return found


def _majority_solved(problem: ProblemResult) -> float:
    return majority(
        [answer.vote for answer in problem.scored],
        [float(answer.solved) for answer in problem.scored],
    )
