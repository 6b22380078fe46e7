"""The trainer's state, the list of checkpoints, and the retention rule against a naive version."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.checkpoint.catalog import (
    CheckpointInfo,
    TrainerState,
    find_checkpoint,
    journal_problem,
    kept_steps,
    list_checkpoints,
)
from rlcore.config import CheckpointConfig
from rlcore.errors import CheckpointError
from rlcore.storage.documents import sha256_of
from tests.helpers.checkpoints import save, store_at
from tests.helpers.published import edit_manifest, flip


def test_list_includes_broken_checkpoints(tmp_path):
    store = store_at(tmp_path)
    for step, score in ((1, 0.5), (2, None), (3, 0.25), (4, 0.0)):
        save(store, step, score)
    flip(store.path_of(2) / "policy" / "rank.safetensors", 0)
    (store.path_of(3) / "manifest.json").unlink()
    (store.path_of(4) / "state.json").unlink()
    folder = tmp_path / "checkpoints"
    quick = list_checkpoints(folder)
    assert [(row.step, row.verdict) for row in quick] == [
        (1, "not verified"), (2, "not verified"), (3, "broken"), (4, "broken"),
    ]  # fmt: skip
    full = list_checkpoints(folder, verify_hashes=True)
    assert [row.verdict for row in full] == ["verified", "broken", "broken", "broken"]
    assert (full[0].score, full[0].size_bytes > 1000, full[0].reason) == (0.5, True, "")
    assert "rank.safetensors: hash" in full[1].reason
    assert "never finished" in full[2].reason
    assert (full[2].size_bytes, dict(full[2].metrics), full[2].created, full[2].score) == (0, {}, "", None)
    assert [row.size_bytes for row in full[:2]] == [info.size_bytes for info in store.list()[:2]]
    known = store.list()[0].settings_fingerprint
    assert [row.settings_fingerprint for row in full] == [known, known, "", known]
    assert list_checkpoints(tmp_path / "absent") == ()


def test_find_checkpoint_by_name(tmp_path):
    store, folder = store_at(tmp_path), tmp_path / "checkpoints"
    for number, score in ((1, 0.5), (2, 0.25), (3, None)):
        save(store, number, score)
    names = {"2": 2, "step-000003": 3, "last": 3, "best": 1, "000002": 2}
    assert {name: find_checkpoint(folder, name).step for name in names} == names
    for name in ("7", "first"):
        with pytest.raises(CheckpointError, match=f"no checkpoint '{name}'; there are: step-000001, step-000002"):
            find_checkpoint(folder, name)
    edit_manifest(store.path_of(2), format_version=99)
    for name in ("2", "step-000002"):
        with pytest.raises(CheckpointError, match="format_version must be 1, got 99"):
            find_checkpoint(folder, name)
    save(store_at(tmp_path / "other"), 1)
    with pytest.raises(CheckpointError, match="no checkpoint 'best'; there are: step-000001"):
        find_checkpoint(tmp_path / "other" / "checkpoints", "best")
    with pytest.raises(CheckpointError, match="there are: none"):
        find_checkpoint(tmp_path / "absent", "last")


SCORE = "val/reward"


def info(step: int, metrics: Mapping[str, float] | None = None) -> CheckpointInfo:
    return CheckpointInfo(step, Path(f"step-{step:06d}"), metrics=metrics or {})


def naive(scores: dict[int, float | None], *, last: int, best: int, every: int) -> set[int]:
    """Return the kept steps, by asking for each step whether a reason to keep it exists."""
    kept = set()
    for step, score in scores.items():
        num_newer = sum(1 for other in scores if other > step)
        num_better = 0
        if score is not None:
            for other, its_score in scores.items():
                if its_score is not None and (its_score > score or (its_score == score and other > step)):
                    num_better += 1
        if num_newer < last or (score is not None and num_better < best) or (every > 0 and step % every == 0):
            kept.add(step)
    return kept


@given(
    st.dictionaries(st.integers(1, 60), st.none() | st.sampled_from([0.0, 0.25, 0.5, -1.0]), max_size=15),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([0, 1, 5, 20]),
)
def test_kept_steps_equal_the_naive_rule(scores, last, best, every):
    checkpoints = [info(step, {} if score is None else {SCORE: score}) for step, score in scores.items()]
    config = CheckpointConfig(keep_last=last, keep_best=best, keep_every_steps=every)
    kept = kept_steps(checkpoints, config)
    assert kept == naive(scores, last=last, best=best, every=every)
    assert not scores or max(scores) in kept, "never the newest"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, None),
        ({"critic/score/mean": 0.9, "val-core/countdown/pass_at_4": 0.9}, None),
        ({"val/reward": 0.25, "val-core/suite/reward/mean_at_4": 0.75}, 0.25),
        ({"sft/held_out_loss": 1.5, "val/reward": 0.25}, -1.5),
        ({"sft/held_out_loss": 0.0}, 0.0),
        ({"val/reward": 0.0}, 0.0),
    ],
)
def test_score_is_the_held_out_reward(metrics, expected):
    assert info(1, metrics).score == expected


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
@example(float("-inf"))  # the best score before the first one
def test_state_round_trip_is_exact(tmp_path_factory, value):
    state = replace(STATE, best_metric=value, kl_coef=value)
    json.loads(state.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = TrainerState.read(written(tmp_path_factory.mktemp("state"), state.to_json()))
    assert again == state
    assert math.copysign(1, again.kl_coef) == math.copysign(1, value)


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
        (None, "missing"),
    ],
)
def test_invalid_state_is_refused(tmp_path, text, message):
    if text is not None:
        written(tmp_path, text)
    with pytest.raises(CheckpointError, match=r"state\.json: " + message):
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
