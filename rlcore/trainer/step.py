"""One training step: it reads as the algorithm."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.schedules import next_entropy_bonus, next_kl_coef
from rlcore.batching.balance import Assignment, Balancer, RankShares
from rlcore.batching.pack import pack, place_turn_rewards, scatter_tokens, select
from rlcore.checkpoint.state import LoopState
from rlcore.config import RunConfig
from rlcore.errors import NonFiniteError
from rlcore.trainer.alarms import Alarm, batch_alarms, save_failed_batch, step_alarms
from rlcore.trainer.clock import EnterPhase, PhaseClock
from rlcore.trainer.estimate import Estimate, ForwardResults, ScoreParts, estimate
from rlcore.trainer.experience import Experience, ExperienceCollector
from rlcore.trainer.metrics import Metrics, cost_metrics, memory_metrics, step_metrics, weight_sync_metrics
from rlcore.trainer.update import (
    SharedBatch,
    Update,
    apply_selection,
    logprobs_before_update,
    needs_old_logprobs,
    update_models,
)
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.group import Pending, WorkerGroup
from rlcore.workers.measure import MemoryPeak
from rlcore.workers.passes import OomRetry
from rlcore.workers.worker import Worker, WorkerInfo


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step: the state after it, its metrics, the answers that it learned from with the batch made of them
    and the trainer's log-probabilities before the update (None: a supervised step, none were computed), alarms, and the
    passes that ran out of memory on any rank and were repeated."""

    state: LoopState
    metrics: Metrics
    experience: Experience | None = None
    batch: TrainBatch | None = None
    logprobs_before: Float[Tensor, "T"] | None = None
    alarms: tuple[Alarm, ...] = ()
    shortages: tuple[OomRetry, ...] = ()


class GroupTrainer:
    """What every kind of step needs: settings, a group of workers, and the phases of its time. Holds no state of the
    run: that is the `LoopState` that a step is given and returns."""

    def __init__(self, config: RunConfig, group: WorkerGroup, enter_phase: EnterPhase) -> None:
        self._config = config
        self._group = group
        self._enter_phase = enter_phase

    def _deal(self, packed: PackedBatch, prompts_per_mini_batch: int) -> Assignment:
        """Which rank works on which sequences."""
        return Balancer(
            num_ranks=self._group.world_size,
            max_tokens=self._config.trainer.max_tokens_per_micro_batch,
            shape=self._worker_info.shape,
            share_prompts=self._config.model.share_prompts,
        ).assign(packed, prompts_per_mini_batch)

    @cached_property
    def _worker_info(self) -> WorkerInfo:
        """What rank 0 found at its start."""
        return self._group.each(Worker.info)[0]

    def _request_memory_peaks(self) -> Pending[MemoryPeak]:
        """Ask for the memory of each rank."""
        return self._group.begin(Worker.memory_peak, [()] * self._group.world_size)


def collect_memory(peaks: Sequence[MemoryPeak]) -> tuple[Metrics, tuple[OomRetry, ...]]:
    """The metrics of the ranks' memory, and the passes since the last call that ran out of it."""
    return memory_metrics(peaks), tuple(shortage for peak in peaks for shortage in peak.shortages)


class Trainer(GroupTrainer):
    """Runs steps of reinforcement learning on a group of workers."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        collector: ExperienceCollector,
        *,
        failures: Path,
        enter_phase: EnterPhase = nullcontext,
    ) -> None:
        super().__init__(config, group, enter_phase)
        self._failures = failures
        self._collector = collector

    def step(self, state: LoopState, *, epoch: int) -> StepResult:
        """Sample, score, estimate, update, hand over."""
        config, clock = self._config, PhaseClock(self._enter_phase)
        experience = self._collector.collect(state, clock)
        packed = pack(experience.rollouts, experience.scores, experience.group_ids)
        dealt = self._deal(packed, config.trainer.mini_batch_size)
        passes = self._forward_passes(packed, dealt.whole, clock)
        with clock.phase("adv"):
            found = self._estimate(packed, passes, experience, state.kl_coef)
            batch = apply_selection(config, found.batch, passes.entropy, num_finished=state.step)
            shared = self._share_batch(batch, packed, dealt)
        if config.algo.kl.where == "loss":
            shared = self._add_ref_logprobs(shared, clock)
        alarms = batch_alarms(config, experience)
        update = self._update(state, experience, shared, alarms, clock)
        with clock.phase("update_weights"):
            versions = [(state.policy_version + 1,)] * self._group.world_size
            hand_over, memory = (
                self._group.begin(Worker.sync_weights, versions),
                self._request_memory_peaks(),
            )  # and beside them:
            after = self._state_after(state, experience, found, update)
            described = step_metrics(config, experience, found, update)
            used = replace(found.batch, ref_logprobs=shared.batch.ref_logprobs)
            self._collector.prepare(after)
            handed_over = hand_over.result()[0]  # equal on all ranks
        alarms += step_alarms(config, update, found.kl_in_reward, handed_over)
        metrics = {
            "training/global_step": float(after.step),
            "training/epoch": float(epoch),
            **update.metrics(config.algo),
            **weight_sync_metrics(config, handed_over),
            **described,
            **cost_metrics(
                config,
                found.batch.packed,
                experience.num_generated_tokens,
                shared.deal,
                clock.seconds(),
                self._worker_info,
            ),
        }
        peaks, shortages = collect_memory(memory.result())
        return StepResult(after, metrics | peaks, experience, used, update.logprobs_before, alarms, shortages)

    def _estimate(
        self, packed: PackedBatch, passes: ForwardResults, experience: Experience, kl_coef: float
    ) -> Estimate:
        config = self._config
        parts = ScoreParts.from_scores(experience.scores, config.reward.weights)
        is_cut = torch.tensor([rollout.finish_reason == "length" for rollout in experience.rollouts])
        early = place_turn_rewards(experience.rollouts, packed) if config.episode.reward_per_turn else None
        return estimate(
            packed, passes, experience.greedy_scores, algo=config.algo, kl_coef=kl_coef, parts=parts, is_truncated=is_cut,
            turn_rewards=early,
        )  # fmt: skip

    def _forward_passes(self, packed: PackedBatch, shares: RankShares, clock: PhaseClock) -> ForwardResults:
        """What the estimate needs: old log-probabilities, entropies, values, and those of the reference in a reward."""
        config = self._config
        old: Tensor | None = None
        entropy: Tensor | None = None
        if config.trainer.old_logprobs == "behavior":
            old = packed.behavior_logprobs
        elif needs_old_logprobs(config):
            with_entropy = config.algo.top_entropy < 1
            old = self._run_forward(Worker.old_logprobs, "old_log_prob", packed, shares, clock, with_entropy)
            if with_entropy:
                old, entropy = old.unbind(1)
        values = None if config.critic is None else self._run_forward(Worker.values, "values", packed, shares, clock)
        in_reward = config.algo.kl.where == "reward"
        ref = self._run_forward(Worker.ref_logprobs, "ref", packed, shares, clock) if in_reward else None
        return ForwardResults(old, ref, values, entropy)

    def _run_forward(
        self,
        verb: Callable[..., Tensor],
        phase: str,
        packed: PackedBatch,
        shares: RankShares,
        clock: PhaseClock,
        *more: bool,
    ) -> Float[Tensor, "T ..."]:
        """The values that a forward pass of the ranks computes of each token."""
        with clock.phase(phase):
            arguments = [(select(packed, mine), shares.num_micro, *more) for mine in shares.sequences]
            return scatter_tokens(self._group.begin(verb, arguments).result(), packed.cu_seqlens, shares.sequences)

    def _share_batch(self, batch: TrainBatch, packed: PackedBatch, dealt: Assignment) -> SharedBatch:
        """The batch shared out to the ranks: as `packed` was for the passes, unless tokens have lost their loss."""
        if not torch.equal(batch.packed.loss_mask, packed.loss_mask):  # other costs, and other prompts in common
            dealt = self._deal(batch.packed, self._config.trainer.mini_batch_size)
        shared = SharedBatch.from_deal(self._config, batch, dealt)
        return replace(shared, parts=self._group.send(shared.parts))

    def _add_ref_logprobs(self, shared: SharedBatch, clock: PhaseClock) -> SharedBatch:
        """The batch with the reference's log-probabilities. The ranks keep those of their parts for the update."""
        with clock.phase("ref"):
            arguments = [(part, shared.deal.whole.num_micro) for part in shared.parts]
            of_ranks = self._group.begin(Worker.cache_ref_logprobs, arguments).result()
            whole = scatter_tokens(of_ranks, shared.batch.packed.cu_seqlens, shared.sequences)
        return replace(shared, batch=replace(shared.batch, ref_logprobs=whole))

    def _update(
        self,
        state: LoopState,
        experience: Experience,
        shared: SharedBatch,
        alarms: tuple[Alarm, ...],
        clock: PhaseClock,
    ) -> Update:
        """The update, unless an alarm skips it. One that is not finite leaves the batch that caused it on disk.

        Raises:
            NonFiniteError: the update is not finite and `alarms.non_finite` is stop.
        """
        if any(alarm.action == "skip" for alarm in alarms):
            return Update(share_skipped=1.0, logprobs_before=logprobs_before_update(self._config, shared.batch))
        update = update_models(self._config, self._group, shared, state, clock)
        if update.failure is None:
            return update
        number = state.step + 1
        file, prompt_ids = save_failed_batch(self._failures, number, experience, shared.batch)
        rows = f"prompts {prompt_ids}" if prompt_ids else "no single row: its inputs are all finite"
        text = f"step {number}: {update.failure} Batch saved to {file}; non-finite inputs in {rows}."
        failure = NonFiniteError(text)
        if self._config.alarms.non_finite == "stop":
            raise failure from update.failure
        return replace(update, failure=failure)

    def _state_after(self, state: LoopState, experience: Experience, found: Estimate, update: Update) -> LoopState:
        packed, algo = found.batch.packed, self._config.algo
        observed_kl = update.observed_kl(algo, found.kl_in_reward)
        kl_coef = state.kl_coef
        if observed_kl is not None and update.policy is not None and update.share_skipped < 1:
            kl_coef = next_kl_coef(kl_coef, observed_kl, int(packed.score_mask.sum()), settings=algo.kl)
        entropy_added = state.entropy_added
        if update.policy is not None and update.share_skipped < 1:
            observed_entropy = update.policy.stats.mean_entropy()
            entropy_added = next_entropy_bonus(entropy_added, observed_entropy, settings=algo)
        return replace(
            state,
            step=state.step + 1,
            policy_version=state.policy_version + 1,
            num_prompts_drawn=state.num_prompts_drawn + experience.num_prompts_drawn,
            num_tokens=state.num_tokens + packed.num_tokens,
            kl_coef=kl_coef,
            entropy_added=entropy_added,
            pass_counts=experience.pass_counts,
        )
