"""One training step: it reads as the algorithm."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.aggregation import Denominator, token_counts
from rlcore.algos.kl import next_kl_coef
from rlcore.algos.schedules import lr_at
from rlcore.batching.balance import Shares, mini_batches, rank_tokens, share_out
from rlcore.batching.pack import pack, scatter_tokens, select, select_train
from rlcore.config import RunConfig
from rlcore.errors import NonFiniteError
from rlcore.trainer import metrics as measure
from rlcore.trainer.alarms import (
    NON_FINITE,
    SKIPPED,
    Alarm,
    batch_alarms,
    hand_over_alarms,
    save_failure,
    update_alarms,
)
from rlcore.trainer.clock import EnterPhase, PhaseClock, unwatched
from rlcore.trainer.estimate import Estimate, estimate
from rlcore.trainer.experience import Experience, ExperienceCollector
from rlcore.trainer.metrics import Metrics
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.group import WorkerGroup
from rlcore.workers.passes import Shortage
from rlcore.workers.worker import Worker, WorkerInfo

EMPTY = torch.empty(0)

ForwardPass = Callable[[Worker, PackedBatch, int], Tensor]
"""A verb that computes one number a token: (worker, its share, micro-batches) -> Float[T]."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """All that the loop itself remembers from one step to the next; it is in every checkpoint."""

    step: int
    policy_version: int
    num_prompts_drawn: int
    num_tokens: int
    kl_coef: float
    lr_factor: float = 1.0
    num_roll_backs: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves: the state after it, its metrics, the answers that it learned from, alarms."""

    state: LoopState
    metrics: Metrics
    experience: Experience
    alarms: tuple[Alarm, ...] = ()
    shortages: tuple[Shortage, ...] = ()
    """Passes that ran out of memory and were done again, on any rank."""


class Trainer:
    """Runs steps on a group of workers. Holds no state of the run: that is the `LoopState` given and returned."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        collector: ExperienceCollector,
        *,
        failures: Path,
        enter_phase: EnterPhase = unwatched,
    ) -> None:
        self._config = config
        self._enter_phase = enter_phase
        self._failures = failures
        self._group = group
        self._collector = collector
        self._info: WorkerInfo | None = None
        self._num_redone = 0
        self._num_applied = 0  # updates of the policy in the step under way
        trainer = config.trainer
        self._num_updates = trainer.epochs_per_batch * -(-trainer.batch_size // trainer.mini_batch_size)

    def step(self, state: LoopState, *, epoch: int) -> StepResult:
        """Sample, score, estimate, update, hand over."""
        clock = PhaseClock(self._enter_phase)
        number = state.step + 1
        experience = self._collector.collect(
            step=number, position=state.num_prompts_drawn, policy_version=state.policy_version, clock=clock
        )
        packed = pack(experience.rollouts, experience.scores, experience.group_ids)
        shares = self._share(packed, range(packed.num_sequences))
        old = self._old_logprobs(packed, shares, clock)
        ref = self._pass(Worker.ref_logprobs, packed, shares, clock, "ref") if self._has_reference else EMPTY
        values = self._pass(Worker.values, packed, shares, clock, "values") if self._has_critic else EMPTY
        with clock.phase("adv"):
            found = estimate(
                packed,
                old_logprobs=old,
                ref_logprobs=ref,
                values=values,
                greedy_scores=torch.tensor(experience.greedy_scores),
                algo=self._config.algo,
                kl_coef=state.kl_coef,
            )
        metrics: Metrics = {"training/global_step": float(number), "training/epoch": float(epoch)}
        alarms = batch_alarms(self._config, experience)
        updated, before, more = self._update_or_skip(state, experience, found.batch, alarms, clock)
        metrics |= updated
        alarms += more
        version = state.policy_version + 1
        with clock.phase("update_weights"):
            handed_over = self._group.each(Worker.hand_over, version)[0]  # every rank has the same verdict
        if self._config.rollout.engine != "hf":
            metrics["training/canary_logprob_diff"] = handed_over.difference
            alarms += hand_over_alarms(handed_over)
        after = replace(
            state,
            step=number,
            policy_version=version,
            num_prompts_drawn=state.num_prompts_drawn + experience.num_prompts_drawn,
            num_tokens=state.num_tokens + packed.num_tokens,
            kl_coef=self._next_kl_coef(state.kl_coef, found, metrics, int(packed.score_mask.sum())),
        )
        if found.kl_in_reward is not None:
            metrics["actor/reward_kl_penalty"] = found.kl_in_reward
        alarms += update_alarms(self._config, metrics)
        metrics |= self._measure(experience, found, shares, before, clock)
        peaks = self._group.each(Worker.memory_peak)
        if peaks[0].reserved_gb:
            metrics["perf/max_memory_allocated_gb"] = max(peak.allocated_gb for peak in peaks)
            metrics["perf/max_memory_reserved_gb"] = max(peak.reserved_gb for peak in peaks)
        if redone := sum(peak.num_redone for peak in peaks):
            metrics["perf/num_passes_redone"] = float(redone)
        shortages: tuple[Shortage, ...] = ()
        if redone and redone != self._num_redone:
            shortages = tuple(one for taken in self._group.each(Worker.take_shortages) for one in taken)
        self._num_redone = redone
        return StepResult(after, metrics, experience, alarms, shortages)

    def _update_or_skip(
        self,
        state: LoopState,
        experience: Experience,
        batch: TrainBatch,
        alarms: tuple[Alarm, ...],
        clock: PhaseClock,
    ) -> tuple[Metrics, Float[Tensor, "T_old"], tuple[Alarm, ...]]:
        """The update, unless an alarm has it left out, and the alarm of an update that is not finite.

        Raises:
            NonFiniteError: the update is not finite and `alarms.non_finite` is stop.
        """
        if any(alarm.action == "skip" for alarm in alarms):
            return {SKIPPED: 1.0}, self._computed_before(batch), ()
        self._num_applied = 0
        try:
            with self._keeping_failures(state.step + 1, experience, batch):
                return *self._update(batch, state, clock), ()
        except NonFiniteError as error:
            action = self._config.alarms.non_finite
            if action == "stop":
                raise
            left_out = 1.0 - self._num_applied / self._num_updates
            return {SKIPPED: left_out}, self._computed_before(batch), (Alarm(NON_FINITE, action, str(error)),)

    def _update(self, batch: TrainBatch, state: LoopState, clock: PhaseClock) -> tuple[Metrics, Float[Tensor, "T_old"]]:
        """All updates of a step, the critic first; beside the metrics the log-probabilities before the update."""
        metrics: Metrics = {}
        if self._has_critic:
            with clock.phase("update_critic"):
                metrics |= self._update_critic(batch, state)
        known = self._computed_before(batch)
        if not self._critic_warmup_is_over(state.step + 1):
            return metrics, known
        with clock.phase("update_actor"):
            updated, first_logprobs = self._update_policy(batch, state)
        # of several updates only the first one's pass is made with the weights that they all begin with
        return metrics | updated, first_logprobs if self._num_updates == 1 and not known.numel() else known

    def _computed_before(self, batch: TrainBatch) -> Float[Tensor, "T_old"]:
        """The trainer's own log-probabilities before the update, as far as a pass of their own was made."""
        return EMPTY if self._config.trainer.old_logprobs == "behavior" else batch.old_logprobs

    @contextmanager
    def _keeping_failures(self, step: int, experience: Experience, batch: TrainBatch) -> Iterator[None]:
        """A non-finite update leaves the batch that caused it on disk, and the message names file and rows."""
        try:
            yield
        except NonFiniteError as error:
            file, prompt_ids = save_failure(self._failures, step, experience, batch)
            rows = f"prompts {prompt_ids}" if prompt_ids else "no single row: its inputs are all finite"
            raise NonFiniteError(f"step {step}: {error} Batch saved to {file}; non-finite inputs in {rows}.") from error

    @property
    def _has_reference(self) -> bool:
        return self._config.algo.kl.where != "off"

    @property
    def _has_critic(self) -> bool:
        return self._config.critic is not None

    def _critic_warmup_is_over(self, step: int) -> bool:
        return self._config.critic is None or step > self._config.critic.warmup_steps

    def _share(self, batch: PackedBatch, candidates: Sequence[int]) -> Shares:
        return share_out(
            batch,
            candidates,
            num_ranks=self._group.world_size,
            max_tokens=self._config.trainer.max_tokens_per_micro_batch,
        )

    def _pass(
        self, verb: ForwardPass, packed: PackedBatch, shares: Shares, clock: PhaseClock, phase: str
    ) -> Float[Tensor, "T"]:
        """A forward pass of all ranks over the whole batch, put together in the order of the batch."""
        with clock.phase(phase):
            arguments = [(select(packed, mine), shares.num_micro) for mine in shares.sequences]
            parts = self._group.scatter(verb, arguments)
            return scatter_tokens(parts, packed.cu_seqlens, shares.sequences)

    def _old_logprobs(self, packed: PackedBatch, shares: Shares, clock: PhaseClock) -> Float[Tensor, "T_old"]:
        """Log-probabilities before the update: a pass of its own only where something needs them beforehand."""
        mode = self._config.trainer.old_logprobs
        if mode == "behavior":
            return packed.behavior_logprobs
        algo = self._config.algo
        needed = self._num_updates > 1 or algo.importance.mode != "off" or algo.kl.where == "reward"
        if mode == "auto" and not needed:
            return EMPTY
        return self._pass(Worker.old_logprobs, packed, shares, clock, "old_log_prob")

    def _denominator(self, batch: PackedBatch, sequences: Sequence[int]) -> Denominator:
        """Counted once over the mini-batch and all ranks; an answer without a score counts nowhere."""
        lengths = token_counts(batch.loss_mask, batch.sequence_ids(), batch.num_sequences)[
            torch.tensor(list(sequences))
        ]
        return Denominator(
            num_tokens=int(lengths.sum()),
            num_sequences=int((lengths > 0).sum()),
            norm_tokens=self._config.rollout.max_response_tokens,
        )

    def _mini_batches(self, batch: TrainBatch) -> list[list[int]]:
        """Sequences of each optimizer step of one epoch. Without a scored answer there is nothing to step by."""
        scored = batch.packed.score_mask
        found = mini_batches(batch.packed.group_ids, self._config.trainer.mini_batch_size)
        return [sequences for sequences in found if scored[sequences].any()]

    def _update_policy(self, batch: TrainBatch, state: LoopState) -> tuple[Metrics, Float[Tensor, "T"]]:
        """All optimizer steps on a batch; the policy's log-probabilities from the first pass over it."""
        lr = state.lr_factor * lr_at(state.step, optim=self._config.optim, total_steps=self._config.trainer.total_steps)
        kl_coef = state.kl_coef
        logprobs = torch.zeros(batch.packed.num_tokens)
        seen = []
        grad_norms = []
        num_skipped = 0
        one_epoch = self._mini_batches(batch)
        if not one_epoch:
            return {SKIPPED: 1.0}, logprobs
        for number, sequences in enumerate(one_epoch * self._config.trainer.epochs_per_batch):
            shares = self._share(batch.packed, sequences)
            denominator = self._denominator(batch.packed, sequences)
            updates = self._group.scatter(
                Worker.update_policy,
                [(select_train(batch, mine), shares.num_micro, denominator, lr, kl_coef) for mine in shares.sequences],
            )
            seen += [update.stats for update in updates]
            grad_norms.append(updates[0].grad_norm)
            num_skipped += not updates[0].applied
            self._num_applied += updates[0].applied
            if number < len(one_epoch):
                logprobs += scatter_tokens([u.logprobs for u in updates], batch.packed.cu_seqlens, shares.sequences)
        summed = functools.reduce(operator.add, seen)
        metrics = summed.metrics(len(grad_norms))
        if self._config.algo.kl.where == "loss":
            # per token, whatever the loss's aggregation: what the adaptive coefficient aims at
            metrics["actor/ref_kl"] = summed.mean_ref_kl()
        else:
            metrics.pop("actor/kl_loss")
        if self._config.algo.aggregation != "token-mean":
            metrics["actor/token_entropy"] = summed.mean_entropy()
        if num_skipped:
            metrics[SKIPPED] = num_skipped / len(grad_norms)
        return {
            **metrics,
            "actor/grad_norm": sum(grad_norms) / len(grad_norms),
            "actor/lr": lr,
            "actor/kl_coef": kl_coef,
        }, logprobs

    def _update_critic(self, batch: TrainBatch, state: LoopState) -> Metrics:
        assert self._config.critic is not None
        total_steps = self._config.trainer.total_steps
        lr = state.lr_factor * lr_at(state.step, optim=self._config.critic.optim, total_steps=total_steps)
        seen = []
        grad_norms = []
        one_epoch = self._mini_batches(batch)
        if not one_epoch:
            return {}
        for sequences in one_epoch * self._config.trainer.epochs_per_batch:
            shares = self._share(batch.packed, sequences)
            denominator = self._denominator(batch.packed, sequences)
            updates = self._group.scatter(
                Worker.update_critic,
                [(select_train(batch, mine), shares.num_micro, denominator, lr) for mine in shares.sequences],
            )
            seen += [update.stats for update in updates]
            grad_norms.append(updates[0].grad_norm)
        return {
            **functools.reduce(operator.add, seen).metrics(len(grad_norms)),
            "critic/grad_norm": sum(grad_norms) / len(grad_norms),
            "critic/lr": lr,
        }

    def _next_kl_coef(self, coef: float, found: Estimate, metrics: Metrics, num_sequences: int) -> float:
        observed = found.kl_in_reward if self._config.algo.kl.where == "reward" else metrics.get("actor/ref_kl")
        if observed is None or metrics.get(SKIPPED) == 1.0:
            return coef  # nothing was observed: the update was left out, or the critic warms up alone
        return next_kl_coef(coef, observed, num_sequences, settings=self._config.algo.kl)

    def _measure(
        self, experience: Experience, found: Estimate, shares: Shares, before: Float[Tensor, "T"], clock: PhaseClock
    ) -> Metrics:
        packed = found.batch.packed
        weights = found.batch.importance_weights if self._config.algo.importance.mode != "off" else EMPTY
        metrics: Metrics = {
            **measure.reward_metrics(
                packed,
                rewards=found.rewards,
                advantages=found.batch.advantages,
                returns=found.returns,
                values=found.batch.old_values,
            ),
            **measure.length_metrics(
                experience,
                max_prompt_tokens=self._config.filter.max_prompt_tokens,
                max_response_tokens=self._config.rollout.max_response_tokens,
            ),
            **measure.group_metrics(packed, experience),
            **measure.balance_metrics(packed, rank_tokens(packed, shares)),
        }
        if before.numel():
            metrics |= measure.mismatch_metrics(packed, before, weights)
        seconds, num_devices = clock.seconds(), self._group.world_size
        metrics |= measure.mfu_metrics(
            seconds,
            packed.sequence_lengths().tolist(),
            self._worker_info(),
            num_epochs=self._config.trainer.epochs_per_batch,
            num_devices=num_devices,
        )
        num_answer_tokens = sum(len(rollout.response_ids) for rollout in experience.rollouts)
        return metrics | measure.timing_metrics(
            seconds, packed, num_answer_tokens=num_answer_tokens, num_devices=num_devices
        )

    def _worker_info(self) -> WorkerInfo:
        """What rank 0 found at its start; asked once."""
        if self._info is None:
            self._info = self._group.each(Worker.info)[0]
        return self._info
