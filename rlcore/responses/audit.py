"""Evaluation of a scorer without torch: an audit with worthless responses, and rescoring of stored responses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlcore.errors import DataError
from rlcore.responses.query import Query, find_responses
from rlcore.rollout.scoring import ScoringPool
from rlcore.score import Score

HALF_MARKS = 0.5
"""The lowest score that counts as a reward. A wrong answer in the correct form may earn less."""
_MAX_EXAMPLES = 3
_ROWS_PER_BATCH = 2_000
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with some of its stored responses, best first."""

    prompt: str
    ground_truth_json: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A response that should earn nothing, and its score."""

    kind: str
    case: Case
    answer: str
    score: Score


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A kind of response that earned too much. `num_tried` is the number of scored responses of this kind."""

    kind: str
    num_tried: int
    paid: tuple[Trial, ...]

    def __str__(self) -> str:
        best = max(self.paid, key=lambda trial: trial.score.total)
        return (
            f"{self.kind}: {len(self.paid)} of {self.num_tried} earned a score, up to {best.score.total:g}; e.g. "
            f"to {_quote(best.case.prompt)} the response {_quote(best.answer)}"
        )


EMPTY, JUNK, COPIED, FORM, OTHERS = (
    "empty response", "junk", "copy of the prompt", "form without content", "response to another problem"
)  # fmt: skip
_FIXED: dict[str, tuple[str, ...]] = {
    EMPTY: ("", " \n"),
    JUNK: ("asdf qwer !!", "0 0 0 0 0 0 0 0", "Let me think step by step. Therefore, the final answer is correct."),
    FORM: ("<answer></answer>", "<think></think><answer></answer>", "#### ", "\\boxed{}", "```python\n```"),
}
_ZERO_SCORE_KINDS = (EMPTY, JUNK)


def audit_reward(cases: Sequence[Case], pool: ScoringPool) -> tuple[AuditFinding, ...]:
    """Score worthless responses to each problem, and return the kinds of responses that the scorer rewards.

    The kinds are empty text, junk, a copy of the prompt, an answer form without content, and responses to another
    problem. Empty text and junk are rewarded if they score above 0. The other kinds are rewarded from `HALF_MARKS` on.
    """
    tried: list[tuple[str, Case, str]] = []
    for place, case in enumerate(cases):
        later = (*cases[place + 1 :], *cases[:place])
        other = next((one for one in later if one.ground_truth_json != case.ground_truth_json), case)
        others = [text for text in other.answers if text not in case.answers]
        texts = {**_FIXED, COPIED: [case.prompt], OTHERS: others}
        tried += [(kind, case, text) for kind, answers in texts.items() for text in answers]
    scores = pool.score([text for _, _, text in tried], [case.ground_truth_json for _, case, _ in tried])
    trials: dict[str, list[Trial]] = {}
    for one, score in zip(tried, scores, strict=True):
        trials.setdefault(one[0], []).append(Trial(*one, score))
    paid = {kind: tuple(filter(_is_rewarded, mine)) for kind, mine in trials.items()}
    return tuple(AuditFinding(kind, len(mine), paid[kind]) for kind, mine in trials.items() if paid[kind])


def _is_rewarded(trial: Trial) -> bool:
    total = trial.score.total
    return trial.score.failure is None and (total > 0 if trial.kind in _ZERO_SCORE_KINDS else total >= HALF_MARKS)


def cases_of(folder: Path, num_cases: int) -> list[Case]:
    """Return the problems with the highest-scored stored responses. Raises DataError if no response is stored."""
    found = find_responses(folder, Query(sort="-score"))
    problems = found.light.select(["data_source", "prompt_id"]).to_pandas().groupby(
        ["data_source", "prompt_id"], sort=False, dropna=False
    )  # fmt: skip
    number = problems.ngroup()
    chosen = [place for place in problems.head(_MAX_EXAMPLES).index if number[place] < num_cases]
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for row in found.rows(chosen):
        cases.setdefault((row["prompt"], row["ground_truth"]), {})[row["answer"]] = None
    if not cases:
        raise DataError(
            "the run has no stored responses to audit its scorer with (answers.every_steps); run it further"
        )
    return [Case(*problem, tuple(answers)) for problem, answers in cases.items()]


@dataclass(frozen=True, slots=True)
class Change:
    """A stored response with a changed score. A score is None if its scorer failed."""

    step: int
    prompt: str
    answer: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        old, new = ("none" if score is None else f"{score:g}" for score in (self.before, self.after))
        return f"step {self.step}: {old} -> {new}: to {_quote(self.prompt)} the response {_quote(self.answer)}"


@dataclass(frozen=True, slots=True)
class RescoreResult:
    """The effect of a new scorer on stored responses. The means cover the responses with an old and a new score.

    A group contains the responses of one training step to one occurrence of a prompt. `num_groups_changed`: the number
    of groups with changed advantages (score minus group mean), and therefore another gradient. `num_groups_flat`: the
    number of groups whose scores are all equal, before and after. `num_failed`: the number of responses on which the
    new scorer failed.
    """

    num_answers: int
    num_changed: int
    num_failed: int
    mean_before: float
    mean_after: float
    num_groups: int
    num_groups_changed: int
    num_groups_flat: tuple[int, int]
    largest: tuple[Change, ...]


def rescore(folder: Path, query: Query, pool: ScoringPool, truth_of: Callable[[str], str] = str) -> RescoreResult:
    """Score the selected stored responses again with the scorer of `pool`, and compare the old and new scores.

    `truth_of`: a function that converts a stored ground truth for the new scorer, both as JSON. The stored penalty
    `overlong` is added to the new score too. Raises DataError if no response is selected.
    """
    import pandas as pd  # not needed for the trainer's audit

    answers = find_responses(folder, query)
    if not len(answers):
        raise DataError("no stored response is selected; loosen the filters, or check answers.every_steps of the run")
    after: list[float | None] = []
    for begin in range(0, len(answers), _ROWS_PER_BATCH):
        rows = answers.rows(range(len(answers))[begin : begin + _ROWS_PER_BATCH])
        scores = pool.score([row["answer"] for row in rows], [truth_of(row["ground_truth"]) for row in rows])
        after += [
            None if score.failure is not None else score.total + dict(row["parts"]).get("overlong", 0.0)
            for row, score in zip(rows, scores, strict=True)
        ]
    both = pd.DataFrame({"before": answers.light["score"].to_numpy(), "after": np.array(after, dtype=float)})
    size = both.after.sub(both.before).abs().mask(both.before.isna() != both.after.isna(), np.inf).fillna(0.0)
    largest = size[size > _EQUAL].nlargest(_MAX_EXAMPLES).index.tolist()
    scored = both.dropna()
    where = ["step", "prompt_id", "sample_index", "part", "place"]
    kept = find_responses(folder, Query(kind="training")).light.select(where).to_pandas().sort_values(where[3:])
    # A prompt may occur twice in a step at the end of an epoch. All stored responses determine the occurrence.
    kept["time"] = kept.groupby(where[:3]).cumcount()
    learned = answers.light.select(where).to_pandas().merge(kept, how="left").dropna(subset="time")
    keys = [learned.step, learned.prompt_id, learned.time]
    in_training = scored[scored.index.isin(learned.index)]
    groups = in_training.groupby(keys)
    less_mean = in_training - groups.transform("mean")
    differs = less_mean.after.sub(less_mean.before).abs() > _EQUAL
    flat = groups.max() - groups.min() <= _EQUAL
    return RescoreResult(
        num_answers=len(answers),
        num_changed=int((size > _EQUAL).sum()),
        num_failed=int(both.after.isna().sum()),
        mean_before=float(scored.before.mean()),
        mean_after=float(scored.after.mean()),
        num_groups=groups.ngroups,
        num_groups_changed=int(differs.groupby(keys).any().sum()),
        num_groups_flat=(int(flat.before.sum()), int(flat.after.sum())),
        largest=tuple(
            Change(row["step"], row["prompt"], row["answer"], row["score"], after[place])
            for place, row in zip(largest, answers.rows(largest), strict=True)
        ),
    )


def _quote(text: str, limit: int = 120) -> str:
    r"""Return the text in quotes and in one line, truncated to `limit` characters.

    >>> _quote("a\nb"), _quote("x" * 9, limit=4)
    ("'a\\nb'", "'xxxx...'")
    """
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
