"""An audit that checks whether a scorer rewards worthless responses. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import DataError
from rlcore.responses.query import Query, find_responses
from rlcore.rollout.scoring import ScoringPool
from rlcore.score import Score

HALF_MARKS = 0.5  # a wrong answer in the correct form may earn less
_MAX_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with some of its stored responses, sorted by score from the highest to the lowest."""

    prompt: str
    ground_truth_json: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A worthless response to a problem and the score that the scorer gave it."""

    kind: str
    case: Case
    answer: str
    score: Score


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A kind of worthless response that the scorer rewards. `num_tried`: the number of scored responses of this kind.
    `paid`: the rewarded responses of this kind."""

    kind: str
    num_tried: int
    paid: tuple[Trial, ...]

    def __str__(self) -> str:
        best = max(self.paid, key=lambda trial: trial.score.total)
        return (
            f"{self.kind}: {len(self.paid)} of {self.num_tried} earned a score, up to {best.score.total:g}; e.g. "
            f"to {_quote(best.case.prompt)} the response {_quote(best.answer)}"
        )


EMPTY, JUNK, FORM = "empty response", "junk", "form without content"
COPIED, OTHERS = "copy of the prompt", "response to another problem"
_FIXED: dict[str, tuple[str, ...]] = {
    EMPTY: ("", " \n"),
    JUNK: ("asdf qwer !!", "0 0 0 0 0 0 0 0", "Let me think step by step. Therefore, the final answer is correct."),
    FORM: ("<answer></answer>", "<think></think><answer></answer>", "#### ", "\\boxed{}", "```python\n```"),
}
_ZERO_SCORE_KINDS = (EMPTY, JUNK)


def audit_reward(cases: Sequence[Case], pool: ScoringPool) -> tuple[AuditFinding, ...]:
    """Score several kinds of worthless responses to each problem, and return the kinds that the scorer rewards. Empty
    text and junk count as rewarded if they score above 0. Other kinds count as rewarded if they score at least 0.5
    (`HALF_MARKS`), because a wrong answer in the correct form may earn less."""
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
    found = (AuditFinding(kind, len(mine), tuple(filter(_is_rewarded, mine))) for kind, mine in trials.items())
    return tuple(finding for finding in found if finding.paid)


def _is_rewarded(trial: Trial) -> bool:
    total = trial.score.total
    return trial.score.failure is None and (total > 0 if trial.kind in _ZERO_SCORE_KINDS else total >= HALF_MARKS)


def cases_of(folder: Path, num_cases: int) -> list[Case]:
    """Return the `num_cases` problems whose stored responses have the highest scores, or all problems if there are
    fewer. Raises DataError if no response is stored."""
    found = find_responses(folder, Query(sort="-score"))
    keys = ["data_source", "prompt_id"]
    problems = found.light.select(keys).to_pandas().groupby(keys, sort=False, dropna=False)
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


def _quote(text: str, limit: int = 120) -> str:
    r"""Return the text in quotes and in one line, truncated to `limit` characters.

    >>> _quote("a\nb"), _quote("x" * 9, limit=4)
    ("'a\\nb'", "'xxxx...'")
    """
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
