"""The supervised training step on demonstrated responses (negative log-likelihood) or on preference pairs (DPO)."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from rlcore.algos.objective import SupervisedStatistics
from rlcore.algos.schedules import lr_at
from rlcore.batching.pack import pack_demonstrations, scatter_tokens, select, shared_prompts, split_pairs
from rlcore.batching.prompts import Demonstration
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.errors import NonFiniteError
from rlcore.trainer.clock import EnterPhase, PhaseClock
from rlcore.trainer.metrics import Metrics, cost_metrics
from rlcore.trainer.step import GroupTrainer, StepResult, collect_memory
from rlcore.types import PackedBatch
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker

R = TypeVar("R")
Draw = Callable[[int, int], Sequence[Demonstration]]
"""A function that maps the number of demonstrations drawn so far and the step number to the step's demonstrations."""


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
        """Write the current policy's log-probabilities into the `reference` of each pair."""
        with self._enter_phase("ref"):
            packed, sequences, by_rank = self._run_padded(Worker.target_logprobs, pairs)
        logprobs = scatter_tokens(by_rank, packed.cu_seqlens, sequences)[packed.loss_mask]
        for pair, values in zip(pairs, logprobs.split(packed.loss_lengths().tolist()), strict=False):
            pair.reference[:] = values.numpy()

    def _run_padded(
        self, verb: Callable[..., R], demonstrations: Sequence[Demonstration]
    ) -> tuple[PackedBatch, Sequence[Sequence[int]], list[R]]:
        """Call `verb` on each rank with its demonstrations. Return the batch, the sequences of each rank, and the
        results. Each rank needs the same number, so copies of the last demonstration are added. They have no loss."""
        missing = -len(demonstrations) % self._group.world_size
        packed = pack_demonstrations([*demonstrations, *[demonstrations[-1].without_targets()] * missing])
        shares = self._assign(packed, packed.num_sequences).whole
        arguments = [(select(packed, mine), shares.num_micro) for mine in shares.sequences]
        return packed, shares.sequences, self._group.begin(verb, arguments).result()
