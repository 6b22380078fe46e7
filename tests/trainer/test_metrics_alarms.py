"""Alarms and their actions, and the saved batch of a non-finite update."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlcore.algos.objective import PolicyStatistics
from rlcore.config.compose import load_config
from rlcore.errors import NonFiniteError
from rlcore.trainer.experience import Experience
from rlcore.trainer.metrics import SKIPPED, Alarm, batch_alarms, step_alarms
from rlcore.trainer.step import StepResult
from rlcore.trainer.update import OptimizerSteps, Update
from rlcore.types import FinishReason, PackedBatch, Prompt, Rollout, Score
from rlcore.workers.canary import WeightSync
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.small_run import prepare, train, train_results
from tests.trainer.batches import make_statistics


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alarms")


def run_steps(root: Path, num_steps: int, *overrides: str) -> tuple[list[StepResult], bool]:
    """Return the results of the first steps, and whether the weights are unchanged."""
    run = prepare(root, *overrides)
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        before = group.each(Worker.full_weights)[0]
        found = train_results(run, group, num_steps)
        after = group.each(Worker.full_weights)[0]
        return found, all(torch.equal(before[name], after[name]) for name in before)


def alarm_texts(result: StepResult) -> dict[str, str]:
    return {alarm.name: alarm.text for alarm in result.alarms}


STEEP = "algo.policy_loss=tests.trainer.broken_loss:steep"


def test_skipped_step_keeps_weights(root: Path) -> None:
    cold = ("rollout.sampling.temperature=0.00001", "warm_start.enabled=false")
    found, same = run_steps(root, 2, *cold, "alarms.equal_scores=skip")
    assert same
    assert [result.metrics[SKIPPED] for result in found] == [1.0, 1.0]
    assert found[1].state.step == 2
    assert "actor/pg_loss" not in found[0].metrics


def test_exploding_gradient_is_skipped(root: Path) -> None:
    (reported,), same = run_steps(root, 1, STEEP)
    assert not same
    assert {alarm.name: alarm.action for alarm in reported.alarms}["grad_norm"] == "tell"
    assert SKIPPED not in reported.metrics
    (skipped,), same = run_steps(root, 1, STEEP, "alarms.grad_norm=skip")
    assert same
    assert skipped.metrics[SKIPPED] == 1.0
    assert skipped.metrics["actor/grad_norm"] == reported.metrics["actor/grad_norm"] > 1_000
    _, same = run_steps(root, 1, STEEP, "alarms.grad_norm=off", "alarms.grad_norm_above=1")
    assert not same


def test_one_mini_batch_above_bound_is_skipped(root: Path) -> None:
    """The bound is between the two norms, just above their mean (the metric)."""
    halves = ("trainer.mini_batch_size=4", "optim.lr=1e-8")
    (plain,), _ = run_steps(root, 1, *halves)
    mean = plain.metrics["actor/grad_norm"]
    bound = f"alarms.grad_norm_above={1.001 * mean}"
    (reported,), _ = run_steps(root, 1, *halves, bound)
    (skipped,), same = run_steps(root, 1, *halves, bound, "alarms.grad_norm=skip")
    assert not same
    assert skipped.metrics[SKIPPED] == 0.5
    assert skipped.metrics["actor/grad_norm"] == pytest.approx(mean, rel=1e-5)  # the halves differ by more than 1e-3
    assert "grad_norm" not in alarm_texts(plain)
    for result in (reported, skipped):
        assert float(alarm_texts(result)["grad_norm"].partition("gradient is ")[2].partition(",")[0]) > 1.001 * mean


def test_unscored_mini_batches_count_as_skipped(root: Path) -> None:
    odd = "data.scorer=tests.rollout.odd_scorers:fails_on_odd_targets"
    (first,), _ = run_steps(root, 1, odd, "trainer.mini_batch_size=1", "warm_start.enabled=false")
    assert 0 < first.metrics[SKIPPED] == first.metrics["reward/unscored_share"] < 1
    assert "grad_norm" not in alarm_texts(first)


def test_kl_coefficient_ignores_non_finite_kl(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL is that of a skipped mini-batch after others."""
    computed = Worker.ref_logprobs

    def ref_logprobs(self: Worker, batch: PackedBatch, num_micro: int) -> torch.Tensor:
        is_odd = batch.group_ids[batch.sequence_ids()] == 4  # the third of four mini-batches
        return computed(self, batch, num_micro).masked_fill(is_odd, torch.nan)

    monkeypatch.setattr(Worker, "ref_logprobs", ref_logprobs)
    in_reward = ("algo.kl.where=reward", "algo.kl.adaptive=true", "algo.kl.coef=0.01", "trainer.mini_batch_size=2")
    (first,), same = run_steps(root, 1, *in_reward, "alarms.non_finite=skip")
    assert not same
    assert first.metrics[SKIPPED] == 0.5
    assert "Batch saved to" in alarm_texts(first)["non_finite"]
    assert first.state.kl_coef == 0.01


def make_experience(totals: list[float | None], groups: list[int], reasons: str = "") -> Experience:
    """Return responses with these scores (None: unscored). A reason `l` is the token limit."""
    scores = tuple(Score(total or 0.0, {}, failure="lost" if total is None else None) for total in totals)
    ends: dict[str, FinishReason] = {"l": "length", "s": "stop"}
    rollouts = []
    for group, reason in zip(groups, reasons or "s" * len(groups), strict=True):
        prompt = Prompt(10 * group, (5, 6), "countdown", "{}")
        rollouts.append(Rollout(prompt, 0, np.array([7]), np.zeros(1, np.float32), ends[reason], 0))
    return Experience(tuple(rollouts), scores, tuple(groups), ("",) * len(groups), len(set(groups)), 0, None)


@pytest.mark.parametrize(("totals", "groups", "has_alarm"), [
    ([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], True),
    ([1.0, 1.0, 0.0, 0.5], [0, 0, 1, 1], False),
    ([1.0, 1.0, 0.0, None], [0, 0, 1, 1], True),
    ([1.0, None, 0.0, None], [0, 0, 1, 1], False),
    ([0.0, None, None, None], [0, 0, 1, 1], False),
    ([0.0, 0.0, None, None], [0, 0, 1, 1], True),
    ([0.0, 0.0], [0, 1], False),
])  # fmt: skip
def test_equal_scores_alarm(totals: list[float | None], groups: list[int], has_alarm: bool) -> None:
    text = "all groups have responses of one score each: nothing to learn from"
    expected = (Alarm("equal_scores", "tell", text),) if has_alarm else ()
    for words, found in (((), expected), (("alarms.equal_scores=off",), ())):
        assert batch_alarms(load_config(["experiment=debug", *words]), make_experience(totals, groups)) == found


def test_length_alarm_at_bound() -> None:
    words = ["alarms.length=skip", "alarms.length_share=0.625", "rollout.max_response_tokens=9"]
    text = "62% of the responses end at rollout.max_response_tokens=9, alarms.length_share is 0.625"
    alarm = Alarm("length", "skip", text)
    for chosen, reasons, found in ((words, "lllllsss", (alarm,)), (words, "llllssss", ()), (words[1:], "llllllll", ())):
        experience = make_experience([*map(float, range(8))], [0] * 8, reasons)
        assert batch_alarms(load_config(["experiment=debug", *chosen]), experience) == found


def make_update(norm: float, entropy: float, kl: float) -> Update:
    sums = make_statistics(PolicyStatistics, entropy_sum=8 * entropy, ref_kl=8 * kl, num_tokens=8.0)
    return Update(OptimizerSteps(sums, num_steps=1, grad_norm=0.0, largest_grad_norm=norm, lr=0.1))


def test_step_alarms_beyond_bounds() -> None:
    words = ["alarms.grad_norm=skip", "alarms.grad_norm_above=4", "alarms.entropy=stop", "alarms.entropy_below=0.5",
             "alarms.kl=stop", "alarms.kl_above=2", "algo.kl.where=loss"]  # fmt: skip
    config = load_config(["experiment=debug", *words])
    assert step_alarms(config, make_update(4.0, 0.5, 2.0), None, WeightSync(0.0)) == ()
    far = make_update(4.03125, 0.46875, 2.015625), None, WeightSync(9.0, "doubtful")
    beyond = step_alarms(config, *far)
    assert beyond == (
        Alarm("canary", "tell", "doubtful"),
        Alarm("grad_norm", "skip", "the largest norm of a mini-batch's gradient is 4.031, alarms.grad_norm_above is 4"),
        Alarm("entropy", "stop", "the policy's entropy is 0.4688, alarms.entropy_below is 0.5"),
        Alarm("kl", "stop", "the KL divergence from the reference is 2.016, alarms.kl_above is 2"),
    )
    for name in ("grad_norm", "entropy", "kl"):
        own = [word if word.split("=")[0] != f"alarms.{name}" else f"alarms.{name}=off" for word in words]
        found = step_alarms(load_config(["experiment=debug", *own]), *far)
        assert found == tuple(alarm for alarm in beyond if alarm.name != name)
    in_reward = ["alarms.grad_norm_above=0.5", "alarms.kl=tell", "alarms.kl_above=2", "algo.kl.where=reward"]
    low = load_config(["experiment=debug", *in_reward])
    assert step_alarms(low, Update(), 2.0, WeightSync(0.0)) == (), "no norm without a step"
    (kl,) = step_alarms(low, Update(), 2.5, WeightSync(0.0))
    assert kl == Alarm("kl", "tell", "the KL divergence from the reference is 2.5, alarms.kl_above is 2")
    failed = Update(failure=NonFiniteError("no number"))
    stopped = load_config(["experiment=debug", "alarms.non_finite=skip"])
    assert step_alarms(stopped, failed, None, WeightSync(0.0)) == (Alarm("non_finite", "skip", "no number"),)


@pytest.mark.parametrize(("loss", "share"), [("log_of_advantage", 1.0), ("only_at_the_old_policy", 0.5)])
def test_updates_before_non_finite_one_count(root: Path, loss: str, share: float) -> None:
    words = ("alarms.non_finite=skip", "trainer.mini_batch_size=4", "optim.lr=0.05")
    (first,), same = run_steps(root, 1, f"algo.policy_loss=tests.trainer.broken_loss:{loss}", *words)
    assert same == (share == 1.0)
    assert first.metrics[SKIPPED] == share
    assert "Batch saved to" in alarm_texts(first)["non_finite"]


def test_non_finite_loss_names_its_rows(tmp_path: Path) -> None:
    run = prepare(tmp_path, "algo.policy_loss=tests.trainer.broken_loss:log_of_advantage")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        before = {name: value.clone() for name, value in group.each(Worker.full_weights)[0].items()}
        with pytest.raises(NonFiniteError, match=r"loss is nan.*Batch saved to .*step-000001") as caught:
            train(run, group, 1)
        after = group.each(Worker.full_weights)[0]
        (gradients,) = group.each(lambda worker: [p.grad for p in worker.actor.model.parameters()])
    assert all(torch.equal(before[name], after[name]) for name in before), "no step must be taken"
    assert all(gradient is None for gradient in gradients), "gradients must be released"
    assert str(caught.value).endswith("non-finite inputs in no single row: its inputs are all finite.")
    file = run.layout.failures / "step-000001.safetensors"
    batch = load_file(file)
    lengths = batch["cu_seqlens"].diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[batch["advantages"] < 0]
    guilty = sorted(set(batch["group_ids"][rows].tolist()))
    assert guilty
    assert f"the loss of prompts number {guilty} of the step is not finite" in str(caught.value)
    answers = json.loads(file.with_suffix(".json").read_text())
    assert [(answer["row"], answer["score"]) for answer in answers] == [*enumerate(batch["scores"].tolist())]
