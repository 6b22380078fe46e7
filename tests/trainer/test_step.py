"""Training steps on real workers, and the state after a step."""

import functools
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.algos.objective import PolicyStatistics
from rlcore.batching.balance import Balancer, Sizes, micro_batches
from rlcore.batching.pack import select
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig, ScratchModel
from rlcore.config.compose import load_config
from rlcore.errors import DataError, NonFiniteError
from rlcore.models.shape import ModelShape
from rlcore.trainer import PhaseClock
from rlcore.trainer.experience import ExperienceCollector
from rlcore.trainer.metrics import Alarm
from rlcore.trainer.step import Trainer
from rlcore.trainer.update import SharedBatch, Update
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.small_run import SmallRun, other_model, prepare, train, train_results
from tests.trainer import batches

STEPS = 3
Usual = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def usual(root: Path) -> Usual:
    """Return steps of an algorithm with default settings, run once."""
    return functools.cache(lambda algo: run_steps(prepare(root, f"algo={algo}")))


def run_steps(run: SmallRun, num_steps: int = STEPS) -> list[dict[str, float]]:
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        return train(run, group, num_steps)


def assert_close(first: list[dict[str, float]], second: list[dict[str, float]], *, rtol: float) -> None:
    assert [sorted(step) for step in first] == [sorted(step) for step in second]
    for number, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        for name, value in one.items():
            # The distance of engine and trainer is rounding of some 1e-6.
            atol = 1e-5 if name.startswith("training/rollout_probs_diff") else 1e-7
            assert other[name] == pytest.approx(value, rel=rtol, abs=atol), f"step {number}: {name}"


PLACES = {"trainer.max_tokens_per_micro_batch=40": 2e-5, "model.gradient_checkpointing=true": 1e-6}


@pytest.mark.parametrize("word", PLACES)
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_micro_batches_and_checkpointing_keep_metrics(root: Path, usual: Usual, algo: str, word: str) -> None:
    assert_close(usual(algo), run_steps(prepare(root, f"algo={algo}", word)), rtol=PLACES[word])


@pytest.mark.parametrize("overrides", [
    *((f"algo={name}",) for name in ("opo", "remax", "reinforce_pp", "gspo", "cispo", "dapo")),
    ("algo.kl.where=reward", "algo.kl.coef=0.01", "algo.kl.adaptive=true"),
    ("algo.importance.mode=mask", "algo.importance.level=sequence", "algo.rejection.level=sequence-mean"),
    ("algo.off_policy_mask=0.01", "trainer.mini_batch_size=4", "trainer.epochs_per_batch=2"),
    ("algo.policy_loss=kl_cov", "algo.policy_loss_options.share=0.2", "trainer.mini_batch_size=4"),
    ("algo.top_entropy=0.2", "algo.clip_cov.share=0.1", "algo.clip_cov.low=0.01"),
    ("algo.advantage=gdpo", "reward.weights={correct:1.0,format:0.2}", "reward.num_processes=1"),
    ("algo=dr_grpo", "algo.entropy_coef=0.01", "trainer.mini_batch_size=4", "trainer.epochs_per_batch=2"),
    ("model.lora.rank=4", "algo=ppo"),
], ids=" ".join)  # fmt: skip
def test_all_methods_take_finite_steps(root: Path, overrides: tuple[str, ...]) -> None:
    for step in run_steps(prepare(root, *overrides), 2):
        for name, value in step.items():
            assert torch.isfinite(torch.tensor(value)), name
        assert step["actor/grad_norm"] >= 0


def test_truncated_responses_are_not_updated_on(root: Path) -> None:
    """Their scores still count, so some mini-batches have scores but no loss."""
    overrides = ("algo.mask_truncated=true", "trainer.mini_batch_size=1", "warm_start.enabled=false")
    (some,) = run_steps(prepare(root, *overrides), 1)
    (all_cut,) = run_steps(prepare(root, *overrides, "rollout.max_response_tokens=1"), 1)
    assert 0 < some["rollout_corr/left_out_share"] < all_cut["rollout_corr/left_out_share"] == 1.0
    assert ["actor/grad_norm" in step for step in (some, all_cut)] == [True, False]
    assert "critic/score/mean" in all_cut


def test_micro_batch_budget_with_masked_responses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked response shares no prompt, so the update may need more micro-batches than a forward pass."""
    budget, given = 100, []
    update = Worker.update_policy
    monkeypatch.setattr(Worker, "update_policy", lambda *args: given.append(args[1:3]) or update(*args))
    overrides = ("algo.mask_truncated=true", "warm_start.enabled=false", "model.share_prompts=true")
    run_steps(prepare(root, *overrides, f"trainer.max_tokens_per_micro_batch={budget}"), 1)
    ((batch, (whole,)),) = given
    packed = batch.packed
    assert not all(packed.loss_mask[start:stop].any() for start, stop in pairwise(packed.cu_seqlens.tolist()))
    for part in micro_batches(packed, whole.num_micro, share_prompts=True):
        assert len(part) == 1 or Sizes.from_batch(select(packed, part), share_prompts=True).num_computed() <= budget


def test_first_step_is_at_reference(root: Path) -> None:
    """Generation time is per token of all responses, including dropped groups."""
    run = prepare(root, "algo.kl.where=loss", "optim.lr=1e-2", "algo.dynamic_sampling.enabled=true")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        first, second = train_results(run, group, 2)
    experience = first.experience
    mask = first.batch.packed.loss_mask
    torch.testing.assert_close(first.batch.ref_logprobs[mask], first.logprobs_before[mask])
    assert first.metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["actor/kl_loss"] > 1e-5
    assert experience.num_tokens_dropped > 0
    kept = sum(len(rollout.response_ids) for rollout in experience.rollouts)
    ms_per_token = 1e3 * first.metrics["timing_s/gen"] / (kept + experience.num_tokens_dropped)
    assert first.metrics["timing_per_token_ms/gen"] == pytest.approx(ms_per_token)


@pytest.mark.parametrize("top_k", [0, 8])
def test_initial_policy_as_teacher_teaches_nothing(root: Path, top_k: int) -> None:
    overrides = (f"algo.teacher.path={prepare(root).model_directory}", f"algo.teacher.top_k={top_k}")
    (step,) = run_steps(prepare(root, *overrides, "trainer.batch_size=4", "trainer.mini_batch_size=4"), 1)
    names = ("actor/teacher_kl", "actor/grad_norm", *(f"critic/advantages/{end}" for end in ("max", "min")))
    assert {name: step[name] for name in names} == pytest.approx(dict.fromkeys(names, 0.0), abs=1e-6 * bool(top_k))


MANY_TOKENS = ("algo.teacher.top_k=16",)
SPARING = ("algo.teacher.offload=true", "model.share_prompts=true")


@pytest.mark.parametrize("more", [(), SPARING, (*MANY_TOKENS, *SPARING)], ids=" ".join)
def test_policy_learns_from_a_larger_teacher(root: Path, more: tuple[str, ...]) -> None:
    teacher = other_model(root, ScratchModel(hidden_size=48, num_layers=2))
    overrides = (f"algo.teacher.path={teacher}", "optim.lr=1e-2", "trainer.total_steps=20", *more)
    steps = run_steps(prepare(root, *overrides), 20)
    assert steps[-1]["actor/teacher_kl"] < 0.6 * steps[0]["actor/teacher_kl"]
    narrow = run_steps(prepare(root, *overrides, "trainer.max_tokens_per_micro_batch=40"), 2)
    assert_close(steps[:2], narrow, rtol=1e-4)


@pytest.mark.parametrize("more", [(), MANY_TOKENS], ids=" ".join)
def test_each_data_source_has_its_teacher(root: Path, more: tuple[str, ...]) -> None:
    """A second teacher that equals the first one changes nothing. Another changes only the numbers of its prompts."""
    first = other_model(root, ScratchModel(hidden_size=48, num_layers=2))
    second = other_model(root, ScratchModel(hidden_size=32, num_layers=1))
    by_source = ((), (f"algo.teacher.by_source.countdown={first}",), (f"algo.teacher.by_source.countdown={second}",))
    settings = [(f"algo.teacher.path={first}", *words) for words in by_source] + [(f"algo.teacher.path={second}",)]
    one, same, other, alone = (run_steps(prepare(root, *words, *more), 2) for words in settings)
    assert_close(one, same, rtol=1e-5)
    assert abs(one[0]["actor/teacher_kl"] - other[0]["actor/teacher_kl"]) > 1e-3
    assert_close(alone, other, rtol=1e-5)
    with pytest.raises(DataError, match=r"algo.teacher.by_source: must name data sources .* got 'gsm8k', .* countdown"):
        run_steps(prepare(root, f"algo.teacher.path={first}", f"algo.teacher.by_source.gsm8k={first}"), 1)


def test_critic_flops_by_its_shape(root: Path) -> None:
    scratch = ScratchModel(hidden_size=16, num_layers=3, num_heads=1, intermediate_size=24)
    run = prepare(root, "algo=ppo", "runtime.peak_tflops=1", f"critic.path={other_model(root, scratch)}")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        info = group.each(Worker.info)[0]
    own = ModelShape.of_scratch(run.config.model.scratch)
    assert (info.shape, info.critic_shape, info.peak_flops) == (own, ModelShape.of_scratch(scratch), 1e12)


def test_engine_distance_is_measured_or_absent(root: Path, usual: Usual) -> None:
    expected = usual("grpo")[0]
    (found,) = run_steps(prepare(root, "trainer.old_logprobs=behavior"), 1)
    names = [name for name in expected if name.startswith("training/rollout_probs_diff")]
    assert len(names) == 3
    assert expected["training/rollout_probs_diff_max"] > 0
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    (several,) = run_steps(prepare(root, "trainer.old_logprobs=behavior", "trainer.mini_batch_size=4"), 1)
    assert not any(name in several for name in names)


STATE = LoopState(4, 5, 20, 1_000, 0.5, best_metric=0.25, best_step=3, entropy_added=0.125)
ADAPTIVE = ("algo.kl.where=reward", "algo.kl.coef=0.5", "algo.kl.adaptive=true", "algo.kl.target=0.1",
            "algo.kl.horizon=100")  # fmt: skip
CONTROLLED = ("algo.entropy_control.target=3.0", "algo.entropy_control.step=0.25")


def trainer(*overrides: str, failures: Path = Path(), ranks: batches.Ranks | None = None) -> Trainer:
    config = load_config(["experiment=debug", *overrides])
    collector = ExperienceCollector(batches.Written(config, {}), batches.InOrder(batches.PROMPTS, seed=1))
    return Trainer(config, ranks or batches.Ranks(), collector, failures=failures)


def state_after(update: Update, *overrides: str, kl: float | None = None) -> LoopState:
    """Return the state after a step of four responses (three scored, 19 tokens, five prompts drawn)."""
    found = replace(batches.make_experience(), pass_counts="counts")
    estimate = replace(batches.make_estimate(batches.pack_experience(found)), kl_in_reward=kl)
    return trainer(*overrides)._state_after(STATE, found, estimate, update)


def test_state_after_step() -> None:
    resumed = replace(STATE, step=5, policy_version=6, num_prompts_drawn=25, num_tokens=1_019, pass_counts="counts")
    assert state_after(Update()) == state_after(batches.UPDATE) == resumed
    assert state_after(batches.UPDATE, *ADAPTIVE) == resumed, "no KL was measured"
    assert state_after(batches.UPDATE, kl=0.11).kl_coef == 0.5
    assert state_after(batches.UPDATE, *ADAPTIVE, kl=0.11).kl_coef == pytest.approx(0.5 * (1 + 0.1 * 3 / 100))
    assert float(batches.POLICY.entropy_sum / batches.POLICY.num_tokens) == 2.5
    assert state_after(batches.UPDATE, *CONTROLLED).entropy_added == 0.375
    for skipped, is_changed in ((0.5, True), (1.0, False)):
        found = state_after(replace(batches.UPDATE, share_skipped=skipped), *ADAPTIVE, *CONTROLLED, kl=0.11)
        assert (found.kl_coef > 0.5, found.entropy_added > 0.125) == (is_changed, is_changed)


def shared_batch(config: RunConfig) -> SharedBatch:
    packed = batches.pack_experience(batches.make_experience())
    batch = replace(batches.make_estimate(packed).batch, old_logprobs=packed.behavior_logprobs)  # of the same memory
    return SharedBatch.split(config, batch, Balancer(num_ranks=2, max_tokens=100, shape=None).assign(packed, 2))


def test_only_skip_alarms_skip_update() -> None:
    alarms = (Alarm("a", "tell", ""), Alarm("b", "skip", ""))
    for old, measured in (("recompute", True), ("behavior", False)):
        one = trainer(f"trainer.old_logprobs={old}")
        shared = shared_batch(one._config)
        skipped = one._update(STATE, batches.make_experience(), shared, alarms, PhaseClock())
        assert skipped.share_skipped == 1.0
        assert (skipped.logprobs_before is shared.batch.old_logprobs) == measured
        with pytest.raises(AssertionError, match="have no results"):
            one._update(STATE, batches.make_experience(), shared, alarms[:1], PhaseClock())


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("bad", [False, True])
def test_non_finite_update_saves_batch(tmp_path: Path, action: str, bad: bool) -> None:
    ranks = batches.Ranks([batches.rank_updates(PolicyStatistics, [], failed=True)] * 2, [])
    one = trainer(f"alarms.non_finite={action}", failures=tmp_path / "run" / "failures", ranks=ranks)
    shared = shared_batch(one._config)
    if bad:
        shared.batch.advantages[shared.batch.packed.cu_seqlens[2]] = float("inf")
    file = tmp_path / "run" / "failures" / "step-000005.safetensors"
    rows = "prompts [1]" if bad else "no single row: its inputs are all finite"
    text = f"step 5: no number Batch saved to {file}; non-finite inputs in {rows}."
    update = functools.partial(one._update, STATE, batches.make_experience(), shared, (), PhaseClock())
    if action == "stop":
        with pytest.raises(NonFiniteError) as caught:
            update()
        assert (str(caught.value), str(caught.value.__cause__)) == (text, "no number")
    else:
        found = update()
        assert (str(found.failure), found.share_skipped) == (text, 1.0)
    answers = json.loads(file.with_suffix(".json").read_text())
    assert answers[2] == {
        "row": 2, "prompt_id": 1, "ground_truth": "{}", "answer": "", "score": 9.0, "failure": "lost", "non_finite": bad
    }  # fmt: skip
    assert [answer["non_finite"] for answer in answers] == [False, False, bad, False]
    assert torch.equal(load_file(file)["group_ids"], shared.batch.packed.group_ids)
