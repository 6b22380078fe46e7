"""The state of the loop after a step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.algos.objective import PolicyStatistics
from rlcore.batching.balance import Balancer
from rlcore.checkpoint.state import LoopState
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import NonFiniteError
from rlcore.trainer.alarms import Alarm
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.experience import ExperienceCollector
from rlcore.trainer.step import Trainer
from rlcore.trainer.update import SharedBatch, Update
from tests.trainer.batches import (
    POLICY,
    PROMPTS,
    UPDATE,
    InOrder,
    Ranks,
    Written,
    estimated,
    experience,
    packed_of,
    rank_updates,
)

STATE = LoopState(4, 5, 20, 1_000, 0.5, best_metric=0.25, best_step=3, entropy_added=0.125)
ADAPTIVE = ("algo.kl.where=reward", "algo.kl.coef=0.5", "algo.kl.adaptive=true", "algo.kl.target=0.1",
            "algo.kl.horizon=100")  # fmt: skip


class Nobody(Ranks):
    """Ranks that know of no update."""

    def __init__(self) -> None:
        super().__init__([], [])
        self._answers = {}


CONTROLLED = ("algo.entropy_control.target=3.0", "algo.entropy_control.step=0.25")


def trainer(*overrides: str, failures: Path = Path(), ranks: Ranks | None = None) -> Trainer:
    config = load_config(["experiment=debug", *overrides])
    collector = ExperienceCollector(Written(config, {}), InOrder(PROMPTS, seed=1))
    return Trainer(config, ranks or Nobody(), collector, failures=failures)


def after(update: Update, *overrides: str, kl: float | None = None) -> LoopState:
    """After a step of four answers, three of them with a score, in 19 tokens, for which five prompts were drawn."""
    found = replace(experience(), pass_counts="counts")
    estimate = replace(estimated(packed_of(found)), kl_in_reward=kl)
    return trainer(*overrides)._state_after(STATE, found, estimate, update)


def test_a_step_goes_on_from_where_it_stood() -> None:
    went_on = replace(STATE, step=5, policy_version=6, num_prompts_drawn=25, num_tokens=1_019, pass_counts="counts")
    assert after(Update()) == went_on
    assert after(UPDATE) == went_on
    assert after(UPDATE, *ADAPTIVE) == went_on, "no KL was measured"


def test_the_kl_coefficient_follows_what_was_measured_over_scored_answers() -> None:
    assert after(UPDATE, *ADAPTIVE, kl=0.11).kl_coef == pytest.approx(0.5 * (1 + 0.1 * 3 / 100))
    assert after(replace(UPDATE, share_skipped=0.5), *ADAPTIVE, kl=0.11).kl_coef > 0.5
    assert after(replace(UPDATE, share_skipped=1.0), *ADAPTIVE, kl=0.11).kl_coef == 0.5
    assert after(UPDATE, kl=0.11).kl_coef == 0.5


def test_the_weight_of_the_entropy_follows_an_update_that_was_taken() -> None:
    assert float(POLICY.entropy_sum / POLICY.num_tokens) == 2.5
    assert after(UPDATE, *CONTROLLED).entropy_added == 0.375
    assert after(replace(UPDATE, share_skipped=1.0), *CONTROLLED).entropy_added == 0.125
    assert after(Update(), *CONTROLLED).entropy_added == 0.125
    assert after(UPDATE).entropy_added == 0.125


def shared_batch(config: RunConfig) -> SharedBatch:
    packed = packed_of(experience())
    batch = replace(estimated(packed).batch, old_logprobs=torch.ones(packed.num_tokens))
    return SharedBatch.from_deal(config, batch, Balancer(num_ranks=2, max_tokens=100, shape=None).assign(packed, 2))


def test_only_an_alarm_that_skips_leaves_the_update_out() -> None:
    alarms = (Alarm("a", "tell", ""), Alarm("b", "skip", ""))
    for old, measured in (("recompute", True), ("behavior", False)):
        one = trainer(f"trainer.old_logprobs={old}")
        shared = shared_batch(one._config)
        skipped = one._update(STATE, experience(), shared, alarms, PhaseClock())
        assert skipped.share_skipped == 1.0
        assert (skipped.logprobs_before is shared.batch.old_logprobs) == measured
        with pytest.raises(KeyError):  # these ranks know of no update
            one._update(STATE, experience(), shared, alarms[:1], PhaseClock())


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("bad", [False, True])
def test_an_update_that_is_not_finite_is_told_with_its_batch_and_rows(tmp_path: Path, action: str, bad: bool) -> None:
    ranks = Ranks([rank_updates(PolicyStatistics, [], failed=True)] * 2, [])
    one = trainer(f"alarms.non_finite={action}", failures=tmp_path / "run" / "failures", ranks=ranks)
    shared = shared_batch(one._config)
    if bad:
        shared.batch.advantages[shared.batch.packed.cu_seqlens[2]] = float("inf")
    file = tmp_path / "run" / "failures" / "step-000005.safetensors"
    rows = "prompts [1]" if bad else "no single row: its inputs are all finite"
    text = f"step 5: no number Batch saved to {file}; non-finite inputs in {rows}."
    if action == "stop":
        with pytest.raises(NonFiniteError) as caught:
            one._update(STATE, experience(), shared, (), PhaseClock())
        assert str(caught.value) == text
        assert str(caught.value.__cause__) == "no number"
    else:
        found = one._update(STATE, experience(), shared, (), PhaseClock())
        assert (str(found.failure), found.share_skipped) == (text, 1.0)
    answers = json.loads(file.with_suffix(".json").read_text())
    assert answers[2] == {
        "row": 2, "prompt_id": 1, "ground_truth": "{}", "answer": "", "score": 9.0, "failure": "lost", "non_finite": bad
    }  # fmt: skip
    assert [answer["non_finite"] for answer in answers] == [False, False, bad, False]
    assert torch.equal(load_file(file)["group_ids"], shared.batch.packed.group_ids)
