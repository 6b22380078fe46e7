"""Judges a scorer by answers that are there: old answers scored anew, and answers that must not score. No torch."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlcore.answers.query import KeptAnswers, Query
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.rollout.scoring_worker import SCORER_KEY
from rlcore.score import Score

HALF_MARKS = 0.5
"""A wrong answer in the right form may earn something; from here on it counts as paid."""
_MOST_EXAMPLES = 3
_ROWS_AT_ONCE = 2_000
_EQUAL = 1e-9


# ---------------------------------------------------------------- the audit


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and some answers that a model gave to it, best first."""

    prompt: str
    ground_truth_json: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """An answer that should earn nothing, and what it earned."""

    kind: str
    case: Case
    answer: str
    score: Score


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of answer that earned more than it should. `num_tried` answers of the kind were scored."""

    kind: str
    num_tried: int
    paid: tuple[Trial, ...]

    def __str__(self) -> str:
        best = max(self.paid, key=lambda trial: trial.score.total)
        return (
            f"{self.kind}: {len(self.paid)} of {self.num_tried} scored, up to {best.score.total:g}; to the problem "
            f"{_short(best.case.prompt)} the answer {_short(best.answer)}"
        )


EMPTY, JUNK, COPIED, FORM, OTHERS = (
    "empty answer", "junk", "copy of the prompt", "form without content", "answer to another problem"
)  # fmt: skip
_FIXED: dict[str, tuple[str, ...]] = {
    EMPTY: ("", " \n"),
    JUNK: ("asdf qwer !!", "0 0 0 0 0 0 0 0", "Let me think step by step. Therefore, the final answer is correct."),
    FORM: ("<answer></answer>", "<think></think><answer></answer>", "#### ", "\\boxed{}", "```python\n```"),
}
_NOTHING = (EMPTY, JUNK)
"""Kinds that should earn nothing at all."""


def audit_reward(cases: Sequence[Case], pool: ScoringPool) -> tuple[Finding, ...]:
    """Score answers that must not score, and return what did, by kind.

    Tried on each problem: nothing, junk, its own prompt, the usual forms without content, and the answers to the next
    problem whose ground truth is another one. The first two should score 0 or less, the others less than half marks.
    """
    tried: list[tuple[str, Case, str]] = []
    for place, case in enumerate(cases):
        tried += [(kind, case, text) for kind, texts in _FIXED.items() for text in texts]
        tried.append((COPIED, case, case.prompt))
        later = (*cases[place + 1 :], *cases[:place])
        other = next((one for one in later if one.ground_truth_json != case.ground_truth_json), None)
        if other is not None:
            tried += [(OTHERS, case, text) for text in other.answers if text not in case.answers]
    scores = pool.score([text for _, _, text in tried], [case.ground_truth_json for _, case, _ in tried])
    trials = [Trial(*one, score) for one, score in zip(tried, scores, strict=True)]
    found = []
    for kind in dict.fromkeys(kind for kind, _, _ in tried):
        mine = [trial for trial in trials if trial.kind == kind]
        paid = tuple(trial for trial in mine if _is_paid(kind, trial.score))
        if paid:
            found.append(Finding(kind, len(mine), paid))
    return tuple(found)


def _is_paid(kind: str, score: Score) -> bool:
    if score.failure is not None:
        return False
    return score.total > 0 if kind in _NOTHING else score.total >= HALF_MARKS


def audit_text(scorer: str, findings: Sequence[Finding]) -> str:
    """The findings as a person reads them."""
    return f"{scorer} pays for what is no answer: {'; '.join(map(str, findings))}"


def cases_of(answers: KeptAnswers, num_cases: int) -> list[Case]:
    """The problems with the answers of the highest score, with their best answers.

    Raises:
        DataError: the run has kept no answers.
    """
    numbers = answers.find(Query(sort="score", descending=True))
    light = answers.light(numbers)
    best: dict[tuple[str | None, int], list[int]] = {}
    for number, source, prompt_id in zip(
        numbers.to_pylist(), light["data_source"].to_pylist(), light["prompt_id"].to_pylist(), strict=True
    ):
        mine = best.setdefault((source, prompt_id), [])
        if len(mine) < _MOST_EXAMPLES:
            mine.append(number)
        if len(best) > num_cases:
            best.popitem()
            break
    if not best:
        raise DataError("the run has kept no answers to audit its scorer with (answers.every_steps); run it further")
    found = []
    for numbers_of_one in best.values():
        rows = answers.rows(numbers_of_one)
        texts = tuple(dict.fromkeys(row["answer"] for row in rows))
        found.append(Case(rows[0]["prompt"], rows[0]["ground_truth"], texts))
    return found


# ---------------------------------------------------------------- old answers scored anew


@dataclass(frozen=True, slots=True)
class Change:
    """An answer that a new scorer scores otherwise. A score is None where its scorer failed."""

    step: int
    prompt: str
    answer: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        old, new = ("none" if score is None else f"{score:g}" for score in (self.before, self.after))
        return f"step {self.step}: {old} -> {new}: to {_short(self.prompt)} the answer {_short(self.answer)}"


@dataclass(frozen=True, slots=True)
class Rescored:
    """What a new scorer would have changed. Means are over the answers that have both scores.

    A group is the answers of one training step to one prompt: `num_groups_changed` counts those whose scores, less
    their mean, would have been others, so that the step would have learned something else. `num_groups_flat` counts
    those in which all scores are equal, before and after. `num_failed`: answers that the new scorer failed on."""

    num_answers: int
    num_changed: int
    num_failed: int
    mean_before: float
    mean_after: float
    num_groups: int
    num_groups_changed: int
    num_groups_flat: tuple[int, int]
    largest: tuple[Change, ...]


def rescore(answers: KeptAnswers, query: Query, pool: ScoringPool) -> Rescored:
    """Score the chosen answers by the pool's scorer and compare.

    A penalty for length that the run took off a score (part `overlong`) is taken off the new one too.

    Raises:
        DataError: no answer is chosen.
    """
    numbers = answers.find(query).to_pylist()
    if not numbers:
        raise DataError("no kept answer is chosen; loosen the filters, or look at answers.every_steps of the run")
    changes: list[Change] = []
    pairs: list[tuple[float, float]] = []
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    num_changed = num_failed = 0
    for begin in range(0, len(numbers), _ROWS_AT_ONCE):
        rows = answers.rows(numbers[begin : begin + _ROWS_AT_ONCE])
        scores = pool.score([row["answer"] for row in rows], [_own_truth(row["ground_truth"]) for row in rows])
        for row, score in zip(rows, scores, strict=True):
            before, after = row["score"], _total(score, row["parts"])
            num_failed += after is None
            if before is not None and after is not None:
                pairs.append((before, after))
                if row["validation"] is None:
                    groups.setdefault((row["step"], row["prompt_id"]), []).append((before, after))
            if (before is None) != (after is None) or abs((before or 0) - (after or 0)) > _EQUAL:
                num_changed += 1
                changes.append(Change(row["step"], row["prompt"], row["answer"], before, after))
        changes = sorted(changes, key=_size, reverse=True)[:_MOST_EXAMPLES]
    return Rescored(
        num_answers=len(numbers),
        num_changed=num_changed,
        num_failed=num_failed,
        mean_before=fmean(old for old, _ in pairs) if pairs else math.nan,
        mean_after=fmean(new for _, new in pairs) if pairs else math.nan,
        num_groups=len(groups),
        num_groups_changed=sum(_differs(group) for group in groups.values()),
        num_groups_flat=(_num_flat(groups.values(), 0), _num_flat(groups.values(), 1)),
        largest=tuple(changes),
    )


def _own_truth(ground_truth_json: str) -> str:
    """A ground truth without the name of a mixture's scorer."""
    truth = json.loads(ground_truth_json)
    return json.dumps({name: value for name, value in truth.items() if name != SCORER_KEY}, ensure_ascii=False)


def _total(score: Score, parts: Sequence[tuple[str, float]]) -> float | None:
    return None if score.failure is not None else score.total + dict(parts).get("overlong", 0.0)


def _size(change: Change) -> float:
    if change.before is None or change.after is None:
        return math.inf
    return abs(change.after - change.before)


def _differs(group: Sequence[tuple[float, float]]) -> bool:
    old, new = ([pair[which] for pair in group] for which in (0, 1))
    middle = (fmean(old), fmean(new))
    return any(abs((a - middle[0]) - (b - middle[1])) > _EQUAL for a, b in group)


def _num_flat(groups: Iterable[Sequence[tuple[float, float]]], which: int) -> int:
    return sum(max(pair[which] for pair in group) - min(pair[which] for pair in group) <= _EQUAL for group in groups)


def _short(text: str, limit: int = 120) -> str:
    """One line, quoted.

    >>> _short("a\\nb"), _short("x" * 9, limit=4)
    ("'a\\\\nb'", "'xxxx...'")
    """
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
