"""Training steps on real workers."""

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rlcore.batching.balance import Sizes, micro_batches
from rlcore.batching.pack import select
from rlcore.config import ScratchModel
from rlcore.models.scratch import build_scratch_model
from rlcore.models.shape import ModelShape
from rlcore.models.tokenizer import build_scratch_tokenizer
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.metrics import mfu_metrics
from rlcore.trainer.step import StepResult, Trainer
from rlcore.workers.worker import Worker
from tests.helpers.small_run import SmallRun, prepare, train

STEPS = 3
Usual = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def usual(root: Path) -> Usual:
    """Steps of an algorithm with the usual settings, taken once."""
    return functools.cache(lambda algo: trained(prepare(root, f"algo={algo}")))


def trained(run: SmallRun, num_steps: int = STEPS) -> list[dict[str, float]]:
    group = LocalGroup(run.config, str(run.model_directory))
    try:
        return train(run, group, num_steps)
    finally:
        group.close()


def close(first: list[dict[str, float]], second: list[dict[str, float]], *, rtol: float) -> None:
    assert [sorted(step) for step in first] == [sorted(step) for step in second]
    for number, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        for name, value in one.items():
            # How far the engine is from the trainer is rounding alone here: a figure of some 1e-6 in any case.
            atol = 1e-5 if name.startswith("training/rollout_probs_diff") else 1e-7
            assert other[name] == pytest.approx(value, rel=rtol, abs=atol), f"step {number}: {name}"


def test_the_same_run_gives_the_same_numbers(root: Path, usual: Usual) -> None:
    assert trained(prepare(root)) == usual("grpo")


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_the_split_into_micro_batches_does_not_change_the_numbers(root: Path, usual: Usual, algo: str) -> None:
    narrow = trained(prepare(root, f"algo={algo}", "trainer.max_tokens_per_micro_batch=40"))
    close(usual(algo), narrow, rtol=2e-5)


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_gradient_checkpointing_does_not_change_the_numbers(root: Path, usual: Usual, algo: str) -> None:
    close(usual(algo), trained(prepare(root, f"algo={algo}", "model.gradient_checkpointing=true")), rtol=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo=dr_grpo",),
        ("algo=rloo",),
        ("algo=opo",),
        ("algo=remax",),
        ("algo=reinforce_pp",),
        ("algo=reinforce_pp_baseline",),
        ("algo=gspo",),
        ("algo=cispo",),
        ("algo=dapo", "algo.overlong.buffer_tokens=4"),
        ("algo.kl.where=loss", "algo.kl.coef=0.01"),
        ("algo.kl.where=reward", "algo.kl.coef=0.01", "algo.kl.adaptive=true"),
        ("algo.importance.mode=truncate",),
        ("algo.importance.mode=mask", "algo.importance.level=sequence", "algo.rejection.level=sequence-mean"),
        ("algo.off_policy_mask=0.01", "trainer.mini_batch_size=4", "trainer.epochs_per_batch=2"),
        ("algo.policy_loss=kl_cov", "algo.policy_loss_options.share=0.2", "trainer.mini_batch_size=4"),
        ("algo.top_entropy=0.2", "algo.clip_cov.share=0.1", "algo.clip_cov.low=0.01"),
        ("algo.advantage=gdpo", "reward.weights={correct:1.0,format:0.2}", "reward.num_processes=1"),
        ("algo.entropy_coef=0.01",),
        ("algo.dynamic_sampling.enabled=true",),
        ("trainer.mini_batch_size=4", "trainer.epochs_per_batch=2"),
        ("algo.aggregation=seq-mean-token-sum-norm",),
        ("model.lora.rank=4",),
        ("model.lora.rank=4", "algo=ppo"),
    ],
    ids=" ".join,
)
def test_every_method_takes_finite_steps(root: Path, overrides: tuple[str, ...]) -> None:
    for step in trained(prepare(root, *overrides), 2):
        for name, value in step.items():
            assert torch.isfinite(torch.tensor(value)), name
        assert step["actor/grad_norm"] >= 0


def test_the_time_of_generation_is_that_of_the_answers_dropped_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[StepResult] = []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *args, **given: results.append(step(*args, **given)) or results[-1])
    trained(prepare(root, "algo.dynamic_sampling.enabled=true"), 1)
    metrics, experience = results[0].metrics, results[0].experience
    assert experience is not None
    assert experience.num_tokens_dropped > 0
    kept = sum(len(rollout.response_ids) for rollout in experience.rollouts)
    ms_per_token = 1e3 * metrics["timing_s/gen"] / (kept + experience.num_tokens_dropped)
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(ms_per_token)


def test_every_mini_batch_is_taken_in_every_epoch(root: Path) -> None:
    run = prepare(root, "trainer.batch_size=4", "trainer.mini_batch_size=2", "trainer.epochs_per_batch=3")
    group = LocalGroup(run.config, str(run.model_directory))
    taken: list[int] = []
    try:
        (optimizer,) = group.each(lambda worker: worker.actor.optimizer)
        optimizer.register_step_post_hook(lambda *_: taken.append(1))
        train(run, group, 1)
    finally:
        group.close()
    assert len(taken) == 2 * 3


def test_answers_cut_at_the_limit_are_left_out_and_where_all_are_there_is_no_update(root: Path) -> None:
    """Their scores still count, so some mini-batches have scored answers and no token with a loss."""
    overrides = ("algo.mask_truncated=true", "trainer.mini_batch_size=1", "warm_start.enabled=false")
    for limit, expected in ((1, 1.0), (None, None)):
        words = () if limit is None else (f"rollout.max_response_tokens={limit}",)
        (step,) = trained(prepare(root, *overrides, *words), 1)
        share = step["rollout_corr/left_out_share"]
        if expected is None:
            assert 0 < share < 1
            assert "actor/grad_norm" in step
        else:
            assert share == 1.0
            assert "actor/grad_norm" not in step
        assert "critic/score/mean" in step


def test_micro_batches_hold_the_budget_where_answers_without_a_loss_compute_their_prompt(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is left out of the update shares no prompt: the update may take more micro-batches than a pass."""
    budget, given = 100, []
    update = Worker.update_policy
    monkeypatch.setattr(
        Worker,
        "update_policy",
        lambda self, batch, parts, *rest: given.append((batch.packed, parts)) or update(self, batch, parts, *rest),
    )
    overrides = ("algo.mask_truncated=true", "warm_start.enabled=false", "model.share_prompts=true")
    trained(prepare(root, *overrides, f"trainer.max_tokens_per_micro_batch={budget}"), 1)
    ((packed, (whole,)),) = given
    assert not all(packed.loss_mask[start:stop].any() for start, stop in pairwise(packed.cu_seqlens.tolist()))
    for part in micro_batches(packed, whole.num_micro, share_prompts=True):
        assert len(part) == 1 or Sizes.from_batch(select(packed, part), share_prompts=True).num_computed() <= budget


def test_kl_to_the_reference_is_zero_at_the_start_and_grows(root: Path) -> None:
    steps = trained(prepare(root, "algo.kl.where=loss", "optim.lr=1e-2"), 3)
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert steps[2]["actor/kl_loss"] > 1e-5


def test_the_batch_of_a_step_has_the_references_log_probabilities(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step they are the policy's own."""
    results: list[StepResult] = []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *args, **more: results.append(step(*args, **more)) or results[-1])
    trained(prepare(root, "algo.kl.where=loss"), 1)
    (result,) = results
    assert result.batch is not None
    mask = result.batch.packed.loss_mask
    assert result.batch.ref_logprobs is not None
    assert result.logprobs_before is not None
    torch.testing.assert_close(result.batch.ref_logprobs[mask], result.logprobs_before[mask])


def test_the_critic_alone_learns_while_it_warms_up(root: Path) -> None:
    steps = trained(prepare(root, "algo=ppo", "critic.warmup_steps=2", "trainer.total_steps=3"), 3)
    assert ["actor/grad_norm" in step for step in steps] == [False, False, True]
    assert all("critic/vf_loss" in step for step in steps)


def test_a_critic_of_another_size_counts_its_own_operations(root: Path) -> None:
    scratch, folder = ScratchModel(hidden_size=16, num_layers=3, num_heads=1, intermediate_size=24), root / "critic"
    build_scratch_tokenizer(scratch, folder)
    build_scratch_model(scratch, vocab_size=113, eos_token_id=1, pad_token_id=0, seed=1, directory=folder)
    run = prepare(root, "algo=ppo", "runtime.peak_tflops=1", f"critic.path={folder}")
    group = LocalGroup(run.config, str(run.model_directory))
    try:
        info = group.each(Worker.info)[0]
    finally:
        group.close()
    seconds = {"update_actor": 1.0, "update_critic": 1.0}
    found = mfu_metrics(seconds, [5, 7], info, num_targets=6, num_epochs=1, num_devices=1)
    for name, shape in (("actor", ModelShape.of_scratch(run.config.model.scratch)), ("critic", info.critic_shape)):
        assert shape is not None
        flops = shape.update_flops([5, 7], num_targets=6 if name == "actor" else 0)
        assert found[f"perf/mfu/{name}"] == pytest.approx(flops / 1e12)
    assert info.critic_shape == ModelShape.of_scratch(scratch)


def test_the_first_update_on_fresh_answers_is_on_policy(root: Path) -> None:
    (first, *_) = trained(prepare(root, "trainer.mini_batch_size=4"), 1)
    assert first["actor/pg_clipfrac"] < 0.5
    assert first["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_each_step_has_the_rate_of_its_place_and_an_unmoved_policy_leaves_the_kl_coefficient(
    root: Path, where: str
) -> None:
    overrides = (
        "algo=ppo", "critic.warmup_steps=2", "trainer.total_steps=4", "optim.lr=1e-3", "optim.schedule=linear",
        "optim.warmup_steps=2", "critic.optim.lr=1e-3", "critic.optim.schedule=linear", f"algo.kl.where={where}",
        "algo.kl.coef=0.01", "algo.kl.adaptive=true", "algo.kl.horizon=16",
    )  # fmt: skip
    steps = trained(prepare(root, *overrides), 4)
    assert [step["critic/lr"] for step in steps] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    # The first of two warm-up steps would have half the rate; the policy's own first step is the third.
    assert [step["actor/lr"] for step in steps[2:]] == pytest.approx([1e-3, 0.5e-3])
    assert steps[2]["actor/kl_coef"] == 0.01
    assert steps[3]["actor/kl_coef"] < 0.01


def test_the_first_step_of_a_warm_up_has_the_first_part_of_the_rate(root: Path) -> None:
    (first,) = trained(prepare(root, "trainer.total_steps=4", "optim.lr=1e-3", "optim.warmup_steps=2"), 1)
    assert first["actor/lr"] == pytest.approx(0.5e-3)


def test_the_distance_from_the_engine_is_measured_or_not_told(root: Path, usual: Usual) -> None:
    expected = usual("grpo")[0]
    (found,) = trained(prepare(root, "trainer.old_logprobs=behavior"), 1)
    names = [name for name in expected if name.startswith("training/rollout_probs_diff")]
    assert len(names) == 3
    assert expected["training/rollout_probs_diff_max"] > 0
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    (several,) = trained(prepare(root, "trainer.old_logprobs=behavior", "trainer.mini_batch_size=4"), 1)
    assert not any(name in several for name in names)


def test_the_entropy_of_a_token_is_told_where_the_loss_adds_up_otherwise(root: Path, usual: Usual) -> None:
    expected = usual("grpo")[0]
    (found,) = trained(prepare(root, "algo.aggregation=seq-mean-token-sum-norm"), 1)
    assert "actor/token_entropy" not in expected
    assert found["actor/token_entropy"] == pytest.approx(expected["actor/entropy"], rel=1e-5)
    assert found["actor/entropy"] != pytest.approx(expected["actor/entropy"], rel=0.1)
