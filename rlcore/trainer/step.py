"""The training steps of reinforcement learning (sampling, scoring, advantage estimates, update, weight sync) and of
supervised learning (negative log-likelihood of demonstrated responses, or DPO on preference pairs)."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.objective import SupervisedStatistics, lr_at, next_entropy_bonus, next_kl_coef
from rlcore.batching.balance import Assignment, Balancer, RankShares
from rlcore.batching.pack import (
    pack,
    pack_demonstrations,
    place_turn_rewards,
    scatter_tokens,
    select,
    shared_prompts,
    split_pairs,
)
from rlcore.batching.prompts import Demonstration
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.errors import NonFiniteError
from rlcore.rollout.engine import carried_to_text
from rlcore.trainer import EnterPhase, PhaseClock
from rlcore.trainer.experience import Experience, ExperienceCollector
from rlcore.trainer.metrics import (
    Alarm,
    Metrics,
    batch_alarms,
    cost_metrics,
    memory_metrics,
    save_failed_batch,
    step_alarms,
    step_metrics,
)
from rlcore.trainer.update import (
    Estimate,
    ForwardResults,
    SharedBatch,
    Update,
    apply_selection,
    estimate,
    needs_old_logprobs,
    score_parts,
    update_models,
)
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.device import MemoryPeak, OomRetry
from rlcore.workers.group import Pending, WorkerGroup
from rlcore.workers.worker import Worker, WorkerInfo

R = TypeVar("R")
Draw = Callable[[int, int], Sequence[Demonstration]]
"""A function that maps the number of demonstrations drawn so far and the step number to the step's demonstrations."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a training step. `experience`, `batch` and `logprobs_before` are None for a supervised step."""

    state: LoopState
    metrics: Metrics
    experience: Experience | None = None
    batch: TrainBatch | None = None
    logprobs_before: Float[Tensor, "T"] | None = None
    """The trainer's log-probabilities before the update, or None if they were not computed."""
    alarms: tuple[Alarm, ...] = ()
    shortages: tuple[OomRetry, ...] = ()


class GroupTrainer:
    """The base class of `Trainer` and `SupervisedTrainer`, which run their steps on a group of workers."""

    def __init__(self, config: RunConfig, group: WorkerGroup, enter_phase: EnterPhase) -> None:
        self._config = config
        self._group = group
        self._enter_phase = enter_phase

    def _assign(self, packed: PackedBatch, prompts_per_mini_batch: int) -> Assignment:
        return Balancer(
            num_ranks=self._group.world_size,
            max_tokens=self._config.trainer.max_tokens_per_micro_batch,
            shape=self._worker_info.shape,
            share_prompts=self._config.model.share_prompts,
        ).assign(packed, prompts_per_mini_batch)

    @cached_property
    def _worker_info(self) -> WorkerInfo:
        return self._group.each(Worker.info)[0]

    def _request_memory_peaks(self) -> Pending[MemoryPeak]:
        return self._group.begin(Worker.memory_peak, [()] * self._group.world_size)


def collect_memory(pending: Pending[MemoryPeak]) -> tuple[Metrics, tuple[OomRetry, ...]]:
    """Return the memory metrics over all ranks, and a record of each pass that ran out of memory since the previous
    call."""
    peaks = pending.result()
    return memory_metrics(peaks), tuple(retry for peak in peaks for retry in peak.shortages)


class Trainer(GroupTrainer):
    """A trainer for reinforcement learning."""

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
        """Run one training step: sample and score responses, estimate advantages, update, and sync the weights."""
        config, clock = self._config, PhaseClock(self._enter_phase)
        experience = self._collector.collect(state, clock)
        packed = pack(experience.rollouts, experience.scores, experience.group_ids)
        assignment = self._assign(packed, config.trainer.mini_batch_size)
        teacher = config.algo.teacher  # of each response, if there are teachers
        teachers = [] if teacher is None else [teacher.index_of(r.prompt.data_source) for r in experience.rollouts]
        forward = self._forward_passes(packed, assignment.whole, clock, teachers)
        with clock.phase("adv"):
            estimated = self._estimate(packed, forward, experience, state.kl_coef)
            batch = apply_selection(config, estimated.batch, forward.entropy, num_finished=state.step)
            shared = self._share_batch(batch, packed, assignment)
        if config.algo.kl.where == "loss":
            shared = self._add_ref_logprobs(shared, clock)
        if teacher is not None and teacher.top_k:
            self._cache_teacher_tokens(shared, clock, teachers)
        alarms = batch_alarms(config, experience)
        update = self._update(state, experience, shared, alarms, clock)
        with clock.phase("update_weights"):
            versions = [(state.policy_version + 1,)] * self._group.world_size
            sync, memory = self._group.begin(Worker.sync_weights, versions), self._request_memory_peaks()
            # The next lines run while the workers are busy.
            after = self._state_after(state, experience, estimated, update)
            described = step_metrics(config, experience, estimated, update)
            used = replace(estimated.batch, ref_logprobs=shared.batch.ref_logprobs)
            self._collector.prepare(after)
            weight_sync = sync.result()[0]  # the result is the same on all ranks
        alarms += step_alarms(config, update, estimated.kl_in_reward, weight_sync)
        metrics = {
            **described,  # the reward is first
            "training/global_step": float(after.step),
            "training/epoch": float(epoch),
            **update.metrics(config.algo),
            **({} if config.rollout.engine == "hf" else {"training/canary_logprob_diff": weight_sync.difference}),
            **cost_metrics(
                config,
                estimated.batch.packed,
                experience.num_generated_tokens,
                shared.assignment,
                clock.seconds(),
                self._worker_info,
            ),
        }
        peaks, shortages = collect_memory(memory)
        return StepResult(after, metrics | peaks, experience, used, update.logprobs_before, alarms, shortages)

    def _forward_passes(
        self, packed: PackedBatch, shares: RankShares, clock: PhaseClock, teachers: Sequence[int]
    ) -> ForwardResults:
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
        teacher = None
        if config.algo.teacher is not None and not config.algo.teacher.top_k:
            verb = Worker.teacher_logprobs
            teacher = self._run_forward(verb, "teacher", packed, shares, clock, of_sequence=teachers)
        return ForwardResults(old, ref, values, entropy, teacher)

    def _run_forward(
        self,
        verb: Callable[..., Tensor],
        phase: str,
        packed: PackedBatch,
        shares: RankShares,
        clock: PhaseClock,
        *more: bool,
        of_sequence: Sequence[int] = (),
    ) -> Float[Tensor, "T ..."]:
        """Call `verb` on each rank with the rank's sequences, and return the values in batch order. `more`: further
        arguments of `verb` on all ranks. `of_sequence`: one value for each sequence, such as the index of its teacher.
        If `of_sequence` is not empty, each rank gets the values of its sequences instead of `more`."""
        with clock.phase(phase):
            own = [([of_sequence[i] for i in mine],) if of_sequence else more for mine in shares.sequences]
            arguments = [
                (select(packed, mine), shares.num_micro, *its) for mine, its in zip(shares.sequences, own, strict=True)
            ]
            return scatter_tokens(self._group.begin(verb, arguments).result(), packed.cu_seqlens, shares.sequences)

    def _estimate(
        self, packed: PackedBatch, forward: ForwardResults, experience: Experience, kl_coef: float
    ) -> Estimate:
        config = self._config
        return estimate(
            packed,
            forward,
            experience.greedy_scores,
            algo=config.algo,
            kl_coef=kl_coef,
            parts=score_parts(experience.scores, config.reward.weights),
            is_truncated=torch.tensor([rollout.finish_reason == "length" for rollout in experience.rollouts]),
            turn_rewards=place_turn_rewards(experience.rollouts, packed) if config.episode.reward_per_turn else None,
        )

    def _share_batch(self, batch: TrainBatch, packed: PackedBatch, assignment: Assignment) -> SharedBatch:
        if not torch.equal(batch.packed.loss_mask, packed.loss_mask):  # costs and shared prompts have changed
            assignment = self._assign(batch.packed, self._config.trainer.mini_batch_size)
        shared = SharedBatch.split(self._config, batch, assignment)
        return replace(shared, parts=self._group.send(shared.parts))

    def _add_ref_logprobs(self, shared: SharedBatch, clock: PhaseClock) -> SharedBatch:
        """Add the reference log-probabilities to the batch. Each rank caches its values for the update."""
        with clock.phase("ref"):
            arguments = [(part, shared.assignment.whole.num_micro) for part in shared.parts]
            by_rank = self._group.begin(Worker.cache_ref_logprobs, arguments).result()
            whole = scatter_tokens(by_rank, shared.batch.packed.cu_seqlens, shared.sequences)
        return replace(shared, batch=replace(shared.batch, ref_logprobs=whole))

    def _cache_teacher_tokens(self, shared: SharedBatch, clock: PhaseClock, teachers: Sequence[int]) -> None:
        with clock.phase("teacher"):
            arguments = [
                (part, shared.assignment.whole.num_micro, [teachers[i] for i in mine])
                for part, mine in zip(shared.parts, shared.sequences, strict=True)
            ]
            self._group.begin(Worker.cache_teacher_tokens, arguments).result()

    def _update(
        self,
        state: LoopState,
        experience: Experience,
        shared: SharedBatch,
        alarms: tuple[Alarm, ...],
        clock: PhaseClock,
    ) -> Update:
        """Update the models, unless an alarm skips the update. Raises NonFiniteError if the update is not finite and
        `alarms.non_finite` is `stop`."""
        is_skipped = any(alarm.action == "skip" for alarm in alarms)
        update = update_models(self._config, self._group, shared, state, clock, is_skipped=is_skipped)
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

    def _state_after(self, state: LoopState, experience: Experience, estimated: Estimate, update: Update) -> LoopState:
        packed, algo = estimated.batch.packed, self._config.algo
        kl_coef, entropy_added = state.kl_coef, state.entropy_added
        if update.policy is not None and update.share_skipped < 1:
            observed_kl = update.observed_kl(algo, estimated.kl_in_reward)
            if observed_kl is not None:
                kl_coef = next_kl_coef(kl_coef, observed_kl, int(packed.score_mask.sum()), settings=algo.kl)
            entropy_added = next_entropy_bonus(entropy_added, update.policy.stats.mean("entropy_sum"), settings=algo)
        return replace(
            state,
            step=state.step + 1,
            policy_version=state.policy_version + 1,
            num_prompts_drawn=state.num_prompts_drawn + experience.num_prompts_drawn,
            num_tokens=state.num_tokens + packed.num_tokens,
            kl_coef=kl_coef,
            entropy_added=entropy_added,
            pass_counts=experience.pass_counts,
            carried=carried_to_text(experience.carried),
        )


class SupervisedTrainer(GroupTrainer):
    """A trainer for supervised learning. In its `LoopState`, `num_prompts_drawn` counts demonstrations."""

    def __init__(
        self, config: RunConfig, group: WorkerGroup, draw: Draw, *, enter_phase: EnterPhase = nullcontext
    ) -> None:
        super().__init__(config, group, enter_phase)
        self._draw = draw

    def step(self, state: LoopState, *, epoch: int) -> StepResult:
        """Draw demonstrations and run one optimizer step on them. Raises NonFiniteError if the update is not finite."""
        config, clock, number = self._config, PhaseClock(self._enter_phase), state.step + 1
        packed = pack_demonstrations(self._draw(state.num_prompts_drawn, number))
        assignment = self._assign(packed, packed.num_sequences)
        shares = assignment.whole
        lr = lr_at(state.step, optim=config.optim, total_steps=config.trainer.total_steps)
        num_targets, total = packed.num_loss_tokens, packed.num_loss_tokens
        if config.warm_start.loss == "dpo":
            total = packed.num_sequences
            assignment = replace(assignment, num_shared=int(shared_prompts(split_pairs(packed)).sum()))
        with clock.phase("supervise"):
            arguments = [(select(packed, mine), shares.num_micro, total, lr) for mine in shares.sequences]
            try:
                updates = self._group.begin(Worker.supervise, arguments).result()
            except NonFiniteError as failure:
                raise NonFiniteError(f"step {number} of the warm start: {failure}") from failure
        stats: SupervisedStatistics = functools.reduce(operator.add, (update.stats for update in updates))
        metrics: Metrics = {
            "training/global_step": float(number),
            "training/epoch": float(epoch),
            **{f"sft/{name}": value for name, value in stats.means().items()},
            "sft/grad_norm": updates[0].grad_norm,
            "sft/lr": lr,
            "sft/answer_tokens": float(num_targets),
            **cost_metrics(config, packed, num_targets, assignment, clock.seconds(), self._worker_info),
        }
        after = replace(
            state,
            step=number,
            policy_version=number,
            num_prompts_drawn=state.num_prompts_drawn + packed.num_sequences,
            num_tokens=state.num_tokens + packed.num_tokens,
        )
        memory, shortages = collect_memory(self._request_memory_peaks())
        return StepResult(after, metrics | memory, shortages=shortages)

    def held_out(self, demonstrations: Sequence[Demonstration]) -> Metrics:
        """Return the loss and the accuracy on held-out demonstrations, or {} if there are none."""
        if not demonstrations:
            return {}
        _, _, by_rank = self._run_padded(Worker.likelihood, demonstrations)
        total: SupervisedStatistics = functools.reduce(operator.add, by_rank)
        return {f"sft/held_out_{name}": value for name, value in total.means().items()}

    def fill_reference(self, pairs: Sequence[Demonstration]) -> None:
        """Write the current policy's log-probabilities of both responses of each pair into the pair's `reference`."""
        with self._enter_phase("ref"):
            packed, sequences, by_rank = self._run_padded(Worker.target_logprobs, pairs)
        logprobs = scatter_tokens(by_rank, packed.cu_seqlens, sequences)[packed.loss_mask]
        for pair, values in zip(pairs, logprobs.split(packed.loss_lengths().tolist()), strict=False):
            pair.reference[:] = values.numpy()

    def _run_padded(
        self, verb: Callable[..., R], demonstrations: Sequence[Demonstration]
    ) -> tuple[PackedBatch, Sequence[Sequence[int]], list[R]]:
        """Call `verb` on each rank with its demonstrations. Return the batch, the sequences of each rank, and the
        results. All ranks get the same number of demonstrations, because copies of the last demonstration are added.
        These copies have no loss."""
        missing = -len(demonstrations) % self._group.world_size
        packed = pack_demonstrations([*demonstrations, *[demonstrations[-1].without_targets()] * missing])
        shares = self._assign(packed, packed.num_sequences).whole
        arguments = [(select(packed, mine), shares.num_micro) for mine in shares.sequences]
        return packed, shares.sequences, self._group.begin(verb, arguments).result()
