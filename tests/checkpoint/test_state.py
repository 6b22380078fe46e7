"""The trainer's state: every float comes back, and what is no state of ours is refused by name."""

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.checkpoint.state import TrainerState, journal_problem
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


def test_round_trip(tmp_path):
    assert TrainerState.read(written(tmp_path, STATE.to_json())) == STATE


@given(st.floats(allow_nan=False))
def test_every_float_comes_back(tmp_path_factory, value):
    state = replace(STATE, best_metric=value, kl_coef=value)
    again = TrainerState.read(written(tmp_path_factory.mktemp("state"), state.to_json()))
    assert again == state
    assert math.copysign(1, again.kl_coef) == math.copysign(1, value)


def test_no_score_yet_is_json(tmp_path):
    state = replace(STATE, best_metric=float("-inf"))
    json.loads(state.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert TrainerState.read(written(tmp_path, state.to_json())).best_metric == float("-inf")


def changed(**changes: object) -> str:
    return json.dumps(json.loads(STATE.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(format_version=2), r"format_version must be 1, got 2.*version of Millrace"),
        (changed(step=-1), r"step: Input should be greater than or equal to 0, got -1"),
        (changed(kl_coef="much"), r"kl_coef: .*got 'much'"),
        (changed(unknown=1), r"unknown: Unexpected keyword argument"),
        ("{}", r"is damaged \(KeyError"),
        ("[1]", r"is damaged"),
        ("", r"is damaged"),
        (STATE.to_json()[:40], r"is damaged"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=r"state\.json: " + message):
        TrainerState.read(written(tmp_path, text))


def test_a_missing_state_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        TrainerState.read(tmp_path / "state.json")


def test_the_state_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        STATE.step = 3


def test_a_state_before_the_first_step_says_that_nothing_has_happened(tmp_path):
    first = TrainerState(
        step=0, policy_version=0, num_prompts_drawn=0, num_tokens=0, kl_coef=0.0, settings_fingerprint="f"
    )
    assert TrainerState.read(written(tmp_path, first.to_json())) == first
    assert (first.best_metric, first.best_step, first.num_roll_backs) == (float("-inf"), 0, 0)
    assert (first.lr_factor, first.entropy_added, first.pass_counts) == (1.0, 0.0, "")
    assert (first.journal_bytes, first.journal_sha256) == (0, "")
    assert first.to_json().startswith('{\n "step": 0,\n "policy_version": 0,\n'), "for people to read"
    assert first.to_json().endswith("\n}\n")


def test_what_is_wrong_with_a_journal_says_which_bytes_it_lacks(tmp_path):
    journal = tmp_path / "metrics.jsonl"
    state = replace(STATE, journal_bytes=0)
    assert journal_problem(state, journal) == "", "nothing is wanted of it"
    journal.write_bytes(b"0123456789")
    state = replace(STATE, journal_bytes=4, journal_sha256=sha256_of(journal, 4))
    assert journal_problem(state, journal) == "", "it has gone on since"
    other = replace(state, journal_bytes=5)
    assert (
        journal_problem(other, journal)
        == f"{journal}: was changed: its first 5 bytes are not those that it had at step 20"
    )
    journal.write_bytes(b"0123")
    assert journal_problem(state, journal) == "", "all of it"
    assert journal_problem(other, journal) == f"{journal}: was cut: it has 4 of the 5 bytes that it had at step 20"
    journal.unlink()
    assert journal_problem(state, journal) == f"{journal}: is lost: it had 4 bytes at step 20"
    (tmp_path / "file").touch()
    told = journal_problem(state, tmp_path / "file" / "metrics.jsonl")
    assert told == f"{tmp_path}/file/metrics.jsonl: cannot be read ([Errno 20] Not a directory: " + (
        f"'{tmp_path}/file/metrics.jsonl')"
    )
