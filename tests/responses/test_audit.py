"""Audit of a scorer."""

from pathlib import Path

import pytest

from rlcore.config import RewardConfig
from rlcore.responses.audit import COPIED, EMPTY, FORM, JUNK, OTHERS, Case, audit_reward, cases_of
from rlcore.responses.query import Query, find_responses
from rlcore.rollout.scoring import ScoringPool
from rlcore.tracking.journal import load_journal
from tests.helpers.running import small
from tests.helpers.sessions import run_to_the_end

SCORERS = "tests.rollout.odd_scorers"
CASES = [
    Case("make 3; say it as <answer>3</answer>", '{"is": 3}', ("1 + 2", "3")),
    Case("make 7", '{"is": 7}', ("3 + 4",)),
    Case("make 7 again", '{"is": 7}', ("7",)),
]


def pool(scorer: str) -> ScoringPool:
    return ScoringPool(f"{SCORERS}:{scorer}", RewardConfig())


@pytest.mark.parametrize(
    ("scorer", "kinds"),
    [
        ("pays_for_a_phrase", {OTHERS}),
        ("pays_for_form", {FORM, COPIED}),
        ("pays_for_nothing", {EMPTY}),
        ("is_right", set()),
    ],
)
def test_audit_finds_loophole_with_example(scorer: str, kinds: set[str]) -> None:
    found = {finding.kind: finding for finding in audit_reward(CASES, pool(scorer))}
    assert found.keys() == kinds
    for finding in found.values():
        assert 0 < len(finding.paid) <= finding.num_tried
        assert all(trial.score.total > 0 for trial in finding.paid)
    if scorer == "pays_for_a_phrase":
        text = str(found[OTHERS])
        assert text.startswith("response to another problem: 3 of 5 earned a score, up to 1; e.g. to 'make 3")
    assert JUNK not in found


def test_problems_with_same_truth_share_responses() -> None:
    same = [Case("a", '{"is": "B"}', ("B",)), Case("b", '{"is": "B"}', ("B", "so B"))]
    assert audit_reward(same, pool("is_right")) == ()


def test_run_reports_loophole_before_first_step(tmp_path: Path) -> None:
    run = small(tmp_path, f"data.scorer={SCORERS}:pays_for_a_phrase", steps=2)
    run_to_the_end(run)
    events = load_journal(run.layout.journal).events
    (event,) = [event for event in events if event.name == "reward_audit"]
    assert "scorer_failed" not in {event.name for event in events}, "audit responses are not counted"
    assert event.step == 0
    assert event.data["kinds"] == [OTHERS]
    assert "pays_for_a_phrase pays for responses that are no answers" in str(event.data["text"])
    best = find_responses(run.layout.answers, Query(sort="-score")).rows(range(5))
    assert [row["score"] for row in best] == [1.0] * 5
    assert all("+" in row["answer"] for row in best)
    (found,) = audit_reward(cases_of(run.layout.answers, 8), pool("pays_for_a_phrase"))
    assert found.kind == OTHERS


def test_audit_and_responses_can_be_disabled(tmp_path: Path) -> None:
    words = ("reward.audit=false", "answers.every_steps=0", f"data.scorer={SCORERS}:pays_for_a_phrase")
    run = small(tmp_path, *words, steps=2)
    run_to_the_end(run)
    assert not [event for event in load_journal(run.layout.journal).events if event.name == "reward_audit"]
    assert not run.layout.answers.exists()
