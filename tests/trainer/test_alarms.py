"""Each alarm by its real cause, told with value and bound; a skipped update leaves the weights as they were."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.algos.objective import PolicyStatistics
from rlcore.checkpoint.state import LoopState
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, NonFiniteError
from rlcore.run.problems import Problems
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.alarms import SKIPPED, Alarm, batch_alarms, step_alarms
from rlcore.trainer.experience import Experience, ExperienceCollector, ResponseSampler
from rlcore.trainer.step import StepResult, Trainer
from rlcore.trainer.update import OptimizerSteps, Update
from rlcore.types import FinishReason, PackedBatch, Prompt, Rollout, Score
from rlcore.workers.canary import WeightSync
from rlcore.workers.worker import Worker
from tests.helpers.share_of_digits import LEARNING
from tests.helpers.small_run import prepare


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alarms")


def steps(root: Path, num_steps: int, *overrides: str) -> tuple[list[StepResult], bool]:
    """Results of the first steps, and whether the weights are still those of the start."""
    run = prepare(root, *overrides)
    group = LocalGroup(run.config, str(run.model_directory))
    try:
        problems = Problems.read(run.config, run.inputs)
        with problems.scoring_pool() as scoring:
            collector = ExperienceCollector(
                ResponseSampler(run.config, group, scoring, problems.decode), problems.stream
            )
            trainer = Trainer(run.config, group, collector, failures=run.layout.failures)
            group.each(Worker.sync_weights, 0)
            before = group.each(Worker.full_weights)[0]
            state, found = LoopState(0, 0, 0, 0, run.config.algo.kl.coef), []
            for _ in range(num_steps):
                found.append(trainer.step(state, epoch=0))
                state = found[-1].state
            after = group.each(Worker.full_weights)[0]
        return found, all(torch.equal(before[name], after[name]) for name in before)
    finally:
        group.close()


def texts(result: StepResult) -> dict[str, str]:
    return {alarm.name: alarm.text for alarm in result.alarms}


COLD = ("rollout.sampling.temperature=0.00001", "warm_start.enabled=false")
STEEP = "algo.policy_loss=tests.trainer.steep_loss:steep"


def test_a_policy_without_entropy_and_groups_of_equal_score(root: Path) -> None:
    (first,), _ = steps(root, 1, *COLD)
    assert "entropy is" in texts(first)["entropy"]
    assert "alarms.entropy_below is 0.001" in texts(first)["entropy"]
    assert "nothing to learn" in texts(first)["equal_scores"]
    assert SKIPPED not in first.metrics
    assert {alarm.action for alarm in first.alarms} == {"tell"}


def test_a_skipped_step_changes_no_weight_and_goes_on(root: Path) -> None:
    found, same = steps(root, 2, *COLD, "alarms.equal_scores=skip")
    assert same
    assert [result.metrics[SKIPPED] for result in found] == [1.0, 1.0]
    assert found[1].state.step == 2
    assert "actor/pg_loss" not in found[0].metrics


def test_an_exploding_gradient_is_left_out(root: Path) -> None:
    (told,), same = steps(root, 1, STEEP)
    assert not same
    assert "alarms.grad_norm_above is 1000" in texts(told)["grad_norm"]
    (skipped,), same = steps(root, 1, STEEP, "alarms.grad_norm=skip")
    assert same
    assert skipped.metrics[SKIPPED] == 1.0
    assert skipped.metrics["actor/grad_norm"] == told.metrics["actor/grad_norm"] > 1_000
    _, same = steps(root, 1, STEEP, "alarms.grad_norm=off", "alarms.grad_norm_above=1")
    assert not same


def test_one_mini_batch_of_several_over_the_bound_alarms_and_is_left_out(root: Path) -> None:
    """The bound lies between the two norms, just above their mean, which the metric is."""
    halves = ("trainer.mini_batch_size=4", "optim.lr=1e-7")
    (plain,), _ = steps(root, 1, *halves)
    mean = plain.metrics["actor/grad_norm"]
    bound = f"alarms.grad_norm_above={1.001 * mean}"
    (told,), _ = steps(root, 1, *halves, bound)
    (skipped,), same = steps(root, 1, *halves, bound, "alarms.grad_norm=skip")
    assert not same
    assert skipped.metrics[SKIPPED] == 0.5
    assert skipped.metrics["actor/grad_norm"] == pytest.approx(mean)
    assert "grad_norm" not in texts(plain)
    for result in (told, skipped):
        assert float(texts(result)["grad_norm"].partition("gradient is ")[2].partition(",")[0]) > 1.001 * mean


def test_mini_batches_without_a_score_are_counted_as_left_out_and_raise_no_alarm(root: Path) -> None:
    odd = "data.scorer=tests.rollout.odd_scorers:fails_on_odd_targets"
    (first,), _ = steps(root, 1, odd, "trainer.mini_batch_size=1", "warm_start.enabled=false")
    assert 0 < first.metrics[SKIPPED] == first.metrics["reward/unscored_share"] < 1
    assert "grad_norm" not in texts(first)


def test_a_loss_that_is_no_number_can_be_left_out(root: Path) -> None:
    loss = "algo.policy_loss=tests.trainer.broken_loss:log_of_advantage"
    (first,), same = steps(root, 1, loss, "alarms.non_finite=skip")
    assert same
    assert "Batch saved to" in texts(first)["non_finite"]
    assert first.metrics[SKIPPED] == 1.0


def test_the_kl_coefficient_does_not_follow_a_kl_that_is_no_number(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mini-batch that is left out, after others were taken."""
    computed = Worker.ref_logprobs

    def ref_logprobs(self: Worker, batch: PackedBatch, num_micro: int) -> torch.Tensor:
        is_odd = batch.group_ids[batch.sequence_ids()] == 4  # of the third of four mini-batches
        return computed(self, batch, num_micro).masked_fill(is_odd, torch.nan)

    monkeypatch.setattr(Worker, "ref_logprobs", ref_logprobs)
    in_reward = ("algo.kl.where=reward", "algo.kl.adaptive=true", "algo.kl.coef=0.01", "trainer.mini_batch_size=2")
    (first,), same = steps(root, 1, *in_reward, "alarms.non_finite=skip")
    assert not same
    assert first.metrics[SKIPPED] == 0.5
    assert "Batch saved to" in texts(first)["non_finite"]
    assert first.state.kl_coef == 0.01


def test_a_policy_far_from_its_reference(root: Path) -> None:
    drifts = (*LEARNING, "algo.kl.where=loss", "optim.lr=0.05")
    found, _ = steps(root, 2, *drifts, "alarms.kl=tell", "alarms.kl_above=0.05")
    assert "kl" not in texts(found[0])
    assert "KL divergence from the reference is" in texts(found[1])["kl"]


def test_answers_that_all_end_at_the_limit(root: Path) -> None:
    short = ("rollout.max_response_tokens=1", "warm_start.enabled=false")
    (first,), _ = steps(root, 1, *short, "alarms.length=tell", "alarms.length_share=0.9")
    assert "100% of the answers end at rollout.max_response_tokens=1" in texts(first)["length"]


def test_an_alarm_that_is_off_says_nothing(root: Path) -> None:
    (first,), _ = steps(root, 1, *COLD, "alarms.entropy=off", "alarms.equal_scores=off")
    assert first.alarms == ()


def test_what_an_alarm_cannot_do_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"alarms\.kl"):
        load_config(["experiment=debug", f"paths.root={root}", "alarms.kl=skip"])


def test_answers_alone_to_their_prompts_are_not_compared(root: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={root}", "alarms.equal_scores=skip", "alarms.length=off"])
    scores = (Score(0.0, {}), Score(0.0, {}))

    def raised(group_ids: tuple[int, ...]) -> list[str]:
        experience = Experience((), scores, group_ids, ("", ""), 2, 0, None)
        return [alarm.name for alarm in batch_alarms(config, experience)]

    assert raised((0, 0)) == ["equal_scores"]
    assert raised((0, 1)) == []


def test_the_entropy_that_alarms_is_that_of_a_token(root: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={root}"])
    below = config.alarms.entropy_below / 2

    def raised(share: float, of_a_token: float) -> list[str]:
        """With an entropy that the loss aggregates to `share`, over 7 tokens."""
        given = {"entropy": share, "entropy_sum": 7 * of_a_token, "num_tokens": 7}
        sums = [torch.tensor(float(given.get(field.name, 0))) for field in fields(PolicyStatistics)]
        policy = OptimizerSteps(PolicyStatistics(*sums), num_steps=1, grad_norm=1.0, largest_grad_norm=1.0, lr=0.1)
        return [alarm.name for alarm in step_alarms(config, Update(policy), None, WeightSync(0.0))]

    assert raised(below, below) == raised(9.0, below) == ["entropy"]
    assert raised(below, 1.0) == []


def answered(totals: list[float | None], groups: list[int], reasons: str = "") -> Experience:
    """Answers with these scores (None: without one); of the reasons that they ended for, `l` is the limit."""
    prompts = [Prompt(10 * group, (5, 6), "countdown", "{}") for group in groups]
    scores = tuple(Score(total or 0.0, {}, failure="lost" if total is None else None) for total in totals)
    ends: dict[str, FinishReason] = {"l": "length", "s": "stop"}
    rollouts = tuple(
        Rollout(prompt, 0, np.array([7]), np.zeros(1, np.float32), ends[reason], 0)
        for prompt, reason in zip(prompts, reasons or "s" * len(groups), strict=True)
    )
    return Experience(rollouts, scores, tuple(groups), ("",) * len(groups), len(set(groups)), 0, None)


@pytest.mark.parametrize(
    ("totals", "groups", "is_told"),
    [
        ([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], True),
        ([1.0, 1.0, 0.0, 0.5], [0, 0, 1, 1], False),
        ([1.0, 1.0, 0.0, None], [0, 0, 1, 1], True),
        ([1.0, None, 0.0, None], [0, 0, 1, 1], False),
        ([0.0, None, None, None], [0, 0, 1, 1], False),
        ([0.0, 0.0, None, None], [0, 0, 1, 1], True),
    ],
)
def test_groups_of_equal_scores_are_told_where_answers_can_be_compared(
    root: Path, totals: list[float | None], groups: list[int], is_told: bool
) -> None:
    config = load_config(["experiment=debug", f"paths.root={root}"])
    text = "all groups have answers of one score each: nothing to learn from"
    expected = (Alarm("equal_scores", "tell", text),) if is_told else ()
    assert batch_alarms(config, answered(totals, groups)) == expected
    off = load_config(["experiment=debug", f"paths.root={root}", "alarms.equal_scores=off"])
    assert batch_alarms(off, answered(totals, groups)) == ()


def test_a_share_of_answers_at_the_limit_alarms_from_its_bound_on(root: Path) -> None:
    words = ["alarms.length=skip", "alarms.length_share=0.625", "rollout.max_response_tokens=9"]
    config = load_config(["experiment=debug", f"paths.root={root}", *words])
    totals, groups = [*map(float, range(8))], [0] * 8
    text = "62% of the answers end at rollout.max_response_tokens=9, alarms.length_share is 0.625"
    assert batch_alarms(config, answered(totals, groups, "lllllsss")) == (Alarm("length", "skip", text),)
    assert batch_alarms(config, answered(totals, groups, "llllssss")) == ()
    off = load_config(["experiment=debug", f"paths.root={root}", *words[1:]])
    assert batch_alarms(off, answered(totals, groups, "llllllll")) == ()


def updated(norm: float, entropy: float, kl: float) -> Update:
    given = {"entropy_sum": 8 * entropy, "ref_kl": 8 * kl, "num_tokens": 8.0}
    sums = [torch.tensor(given.get(field.name, 0.0), dtype=torch.float64) for field in fields(PolicyStatistics)]
    return Update(OptimizerSteps(PolicyStatistics(*sums), num_steps=1, grad_norm=0.0, largest_grad_norm=norm, lr=0.1))


def test_what_is_beyond_its_bound_alarms_with_value_and_bound_and_what_is_at_it_does_not(root: Path) -> None:
    words = ["alarms.grad_norm=skip", "alarms.grad_norm_above=4", "alarms.entropy=stop", "alarms.entropy_below=0.5",
             "alarms.kl=stop", "alarms.kl_above=2", "algo.kl.where=loss"]  # fmt: skip
    config = load_config(["experiment=debug", f"paths.root={root}", *words])
    assert step_alarms(config, updated(4.0, 0.5, 2.0), None, WeightSync(0.0)) == ()
    beyond = step_alarms(config, updated(4.03125, 0.46875, 2.015625), None, WeightSync(9.0, "doubtful"))
    assert beyond == (
        Alarm("canary", "tell", "doubtful"),
        Alarm("grad_norm", "skip", "the largest norm of a mini-batch's gradient is 4.031, alarms.grad_norm_above is 4"),
        Alarm("entropy", "stop", "the policy's entropy is 0.4688, alarms.entropy_below is 0.5"),
        Alarm("kl", "stop", "the KL divergence from the reference is 2.016, alarms.kl_above is 2"),
    )
    for name in ("grad_norm", "entropy", "kl"):
        own = [word if word.split("=")[0] != f"alarms.{name}" else f"alarms.{name}=off" for word in words]
        less = load_config(["experiment=debug", f"paths.root={root}", *own])
        found = step_alarms(less, updated(4.03125, 0.46875, 2.015625), None, WeightSync(9.0, "doubtful"))
        assert found == tuple(alarm for alarm in beyond if alarm.name != name)
    low = load_config(["experiment=debug", f"paths.root={root}", "alarms.grad_norm_above=0.5"])
    assert step_alarms(low, Update(), None, WeightSync(0.0)) == (), "no step, no norm"
    failed = Update(failure=NonFiniteError("no number"))
    stopped = load_config(["experiment=debug", f"paths.root={root}", "alarms.non_finite=skip"])
    assert step_alarms(stopped, failed, None, WeightSync(0.0)) == (Alarm("non_finite", "skip", "no number"),)


def test_a_kl_in_the_reward_alarms_too(root: Path) -> None:
    words = ["alarms.kl=tell", "alarms.kl_above=2", "algo.kl.where=reward"]
    config = load_config(["experiment=debug", f"paths.root={root}", *words])
    assert step_alarms(config, Update(), 2.0, WeightSync(0.0)) == ()
    text = "the KL divergence from the reference is 2.5, alarms.kl_above is 2"
    assert step_alarms(config, Update(), 2.5, WeightSync(0.0)) == (Alarm("kl", "tell", text),)


def test_updates_before_one_that_is_no_number_are_counted_as_done(root: Path) -> None:
    loss = "algo.policy_loss=tests.trainer.broken_loss:only_at_the_old_policy"
    (first,), same = steps(root, 1, loss, "alarms.non_finite=skip", "trainer.mini_batch_size=4", "optim.lr=0.05")
    assert not same
    assert first.metrics[SKIPPED] == 0.5
