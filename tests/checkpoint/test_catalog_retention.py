"""The retention rule, against a naive version of it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.checkpoint.catalog import CheckpointInfo, kept_steps
from rlcore.config import CheckpointConfig

SCORE = "val/reward"


def info(step: int, metrics: Mapping[str, float] | None = None) -> CheckpointInfo:
    return CheckpointInfo(step, Path(f"step-{step:06d}"), 1, metrics or {}, "2026-01-01T00:00:00", "f")


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
