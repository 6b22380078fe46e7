"""The trainer's state: exact floats, refused files, and the journal that belongs to it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.checkpoint.catalog import TrainerState, journal_problem
from rlcore.errors import CheckpointError
from rlcore.storage.documents import sha256_of

STATE = TrainerState(
    step=20,
    policy_version=20,
    num_prompts_drawn=1280,
    num_tokens=123_456,
    kl_coef=0.1 + 0.2,
    best_metric=1 / 3,
    best_step=10,
    journal_bytes=4711,
    settings_fingerprint="0123456789abcdef",
)


def written(folder: Path, text: str) -> Path:
    (folder / "state.json").write_text(text)
    return folder / "state.json"


@given(st.floats(allow_nan=False))
def test_state_round_trip_is_exact(tmp_path_factory, value):
    state = replace(STATE, best_metric=value, kl_coef=value)
    again = TrainerState.read(written(tmp_path_factory.mktemp("state"), state.to_json()))
    assert again == state
    assert math.copysign(1, again.kl_coef) == math.copysign(1, value)


def test_state_without_a_score_is_json(tmp_path):
    state = replace(STATE, best_metric=float("-inf"))
    json.loads(state.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert TrainerState.read(written(tmp_path, state.to_json())).best_metric == float("-inf")


def changed(**changes: object) -> str:
    return json.dumps(json.loads(STATE.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(format_version=1), r"format_version must be 2, got 1.*version of Millrace"),
        (changed(step=-1), r"step: Input should be greater than or equal to 0, got -1"),
        (changed(kl_coef="much"), r"kl_coef: .*got 'much'"),
        (changed(unknown=1), r"unknown: Unexpected keyword argument"),
        ("{}", r"is damaged \(KeyError"),
        ("[1]", r"is damaged"),
        ("", r"is damaged"),
        (STATE.to_json()[:40], r"is damaged"),
    ],
)
def test_invalid_state_is_refused(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=r"state\.json: " + message):
        TrainerState.read(written(tmp_path, text))


def test_missing_state_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        TrainerState.read(tmp_path / "state.json")


def test_journal_problem_names_the_missing_bytes(tmp_path):
    journal = tmp_path / "metrics.jsonl"
    assert journal_problem(replace(STATE, journal_bytes=0), journal) == "", "nothing is wanted of it"
    journal.write_bytes(b"0123456789")
    state = replace(STATE, journal_bytes=4, journal_sha256=sha256_of(journal, 4))
    assert journal_problem(state, journal) == "", "it may be longer"
    other = replace(state, journal_bytes=5)
    changed = "was changed: its first 5 bytes are not those that it had at step 20"
    assert journal_problem(other, journal) == f"{journal}: {changed}"
    journal.write_bytes(b"0123")
    assert journal_problem(state, journal) == "", "all of it"
    assert journal_problem(other, journal) == f"{journal}: was cut: it has 4 of the 5 bytes that it had at step 20"
    journal.unlink()
    assert journal_problem(state, journal) == f"{journal}: is lost: it had 4 bytes at step 20"
    journal.symlink_to(journal)
    assert journal_problem(state, journal).startswith(f"{journal}: cannot be read ([Errno 40] ")
