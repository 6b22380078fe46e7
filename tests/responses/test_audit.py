"""Audit of a scorer, and rescoring of stored responses."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pytest

from rlcore.config import AnswersConfig, RewardConfig
from rlcore.errors import DataError
from rlcore.responses.audit import COPIED, EMPTY, FORM, JUNK, OTHERS, Case, audit_reward, cases_of, rescore
from rlcore.responses.query import Query, find_responses
from rlcore.responses.store import ResponseWriter
from rlcore.rollout.scoring import ScoringPool
from rlcore.tracking.journal import load_journal
from tests.helpers.answers import Made
from tests.helpers.running import small
from tests.helpers.sessions import run_to_the_end

PLANTED = "tests.responses.planted"
CASES = [
    Case("make 3; say it as <answer>3</answer>", '{"is": 3}', ("1 + 2", "3")),
    Case("make 7", '{"is": 7}', ("3 + 4",)),
    Case("make 7 again", '{"is": 7}', ("7",)),
]


def pool(scorer: str) -> ScoringPool:
    return ScoringPool(f"{PLANTED}:{scorer}", RewardConfig())


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
    run = small(tmp_path, f"data.scorer={PLANTED}:pays_for_a_phrase", steps=2)
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
    words = ("reward.audit=false", "answers.every_steps=0", f"data.scorer={PLANTED}:pays_for_a_phrase")
    run = small(tmp_path, *words, steps=2)
    run_to_the_end(run)
    assert not [event for event in load_journal(run.layout.journal).events if event.name == "reward_audit"]
    assert not run.layout.answers.exists()


def store_rows(
    folder: Path, *answers: tuple[int, int, str, float | None], indices: Iterable[int] = itertools.count()
) -> Path:
    """Store a step for each (step, prompt, text, old score), with a length penalty of -0.25."""
    writer = ResponseWriter(folder, AnswersConfig())
    for (step, prompt_id, text, score), index in zip(answers, indices, strict=False):
        row = Made(1).of_step(step).slice(0, 1).to_pylist()[0]
        row |= {
            "sample_index": index,
            "prompt_id": prompt_id,
            "answer": text,
            "score": score,
            "ground_truth": json.dumps({"is": prompt_id}),
        }
        row["parts"] = [("overlong", -0.25)]
        writer.add(pa.Table.from_pylist([row], schema=Made(1).of_step(1).schema))
    writer.start_part()
    writer.wait()
    return folder


def test_rescore_compares_scorers(tmp_path: Path) -> None:
    answers = store_rows(
        tmp_path,
        (1, 3, "3", 0.75), (1, 3, "4", -0.25),  # unchanged
        (1, 5, "5", -0.25), (1, 5, "6", -0.25),  # was flat
        (2, 3, "1 + 2", 0.75), (2, 3, "2 + 1", 0.75),  # both lower, still flat
        (2, 4, "crash", 0.75), (2, 4, "4", None),  # failures
    )  # fmt: skip
    found = rescore(answers, Query(), pool("is_right"))
    assert (found.num_answers, found.num_changed, found.num_failed) == (8, 5, 1)
    assert found.mean_before == fmean([0.75, -0.25, -0.25, -0.25, 0.75, 0.75])
    assert found.mean_after == fmean([0.75, -0.25, 0.75, -0.25, -0.25, -0.25])
    assert (found.num_groups, found.num_groups_changed, found.num_groups_flat) == (3, 1, (2, 1))
    assert {change.answer for change in found.largest[:2]} == {"crash", "4"}
    one = rescore(answers, Query(step=(1, 1), prompt=5), pool("is_right"))
    assert (one.num_answers, one.num_changed) == (2, 1)
    assert str(one.largest[0]).startswith("step 1: -0.25 -> 0.75: to ")
    again = store_rows(tmp_path, *[(3, 9, text, 0.0) for text in ("9", "8", "9", "8")], indices=[0, 1, 0, 1])
    twice = rescore(again, Query(step=(3, 3), sort="-num_tokens"), pool("is_right"))
    assert (twice.num_groups, twice.num_groups_changed) == (2, 2), "a repeated prompt is two groups"
    again = store_rows(tmp_path, *[(4, 9, text, 0.0) for text in ("9", "8", "8", "9")], indices=[0, 1, 0, 1])
    some = rescore(again, Query(step=(4, 4), search="9"), pool("is_right"))
    assert (some.num_answers, some.num_groups) == (2, 2), "also for a part of the responses"
    with pytest.raises(DataError, match="no stored response is selected"):
        rescore(answers, Query(search="no such text"), pool("is_right"))
