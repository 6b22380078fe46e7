"""Out of memory in a pass: cut finer and do it again. The numbers do not depend on the cut."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from rlcore.errors import DeviceMemoryError
from rlcore.models.reserve import give_back_reserve

R = TypeVar("R")
GROW_AFTER = 100
"""Passes in a row that went well, after which the cut may get coarser again; doubled each time that this fails."""

log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of torch was refused, on a GPU or by the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no class of its own for the host's allocator.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A pass that ran out of memory in `num_micro` micro-batches and was done again in `num_again`. `factor`: how many
    times the micro-batches of the token budget it gets from then on. `refusal`: the allocator's words."""

    name: str
    num_micro: int
    num_again: int
    factor: int
    refusal: str

    def __str__(self) -> str:
        return (
            f"{self.name} ran out of memory in {self.num_micro} micro-batches and is done again in {self.num_again}: "
            f"{self.refusal}"
        )


class PassBudget:
    """Runs one kind of pass in as many micro-batches as memory asks for.

    The pass is cut into `factor` times as many micro-batches as the token budget says; the factor is 1 until memory
    runs out, doubles each time that it does, and halves again after many good passes.

    Args:
        name: of the pass, for the log.
        recover: brings the model back to where a pass may begin; called after a failed one.
        alone: whether this is the only rank. Others would wait for this one's part of a collective for ever, so with
            several the failure ends the group, and the message says so.
    """

    def __init__(self, name: str, *, recover: Callable[[], None], alone: bool) -> None:
        self._name = name
        self._recover = recover
        self._alone = alone
        self._good = 0
        self._grow_after = GROW_AFTER
        self.factor = 1
        self.num_failures = 0
        self._shortages: list[Shortage] = []

    def take_shortages(self) -> list[Shortage]:
        """Those since this was last asked."""
        taken, self._shortages = self._shortages, []
        return taken

    def run(self, work: Callable[[int], R], *, num_micro: int, num_sequences: int) -> R:
        """`work(number of micro-batches)`, again with more of them while memory runs out.

        Raises:
            DeviceMemoryError: it ran out with a single sequence in each micro-batch, or there are several ranks.
        """
        while True:
            number = min(num_micro * self.factor, num_sequences)
            refusal = ""
            try:
                result = work(number)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # The error holds the frames of the pass, and they its tensors: keep its text alone.
                refusal = str(error).strip().split("\n")[0] or type(error).__name__
            if not refusal:
                self._count_good_pass()
                return result
            self._count_failure(refusal, number, num_sequences)
            self._give_back()

    def _count_good_pass(self) -> None:
        self._good += 1
        if self.factor > 1 and self._good >= self._grow_after:
            self.factor //= 2
            self._good = 0
            self._grow_after *= 2
            log.info("%s: tries %d times the micro-batches that the token budget asks for", self._name, self.factor)

    def _count_failure(self, refusal: str, number: int, num_sequences: int) -> None:
        self._good = 0
        self.num_failures += 1
        remedy = (
            "Lower trainer.max_tokens_per_micro_batch, model.head_chunk_tokens or rollout.memory_share, set "
            "model.gradient_checkpointing=true, or shorten filter.max_prompt_tokens and rollout.max_response_tokens."
        )
        if not self._alone:
            raise DeviceMemoryError(f"{self._name} ran out of memory on one of several ranks ({refusal}). {remedy}")
        if number >= num_sequences:
            raise DeviceMemoryError(
                f"{self._name} ran out of memory with one sequence in each micro-batch ({refusal}). {remedy}"
            )
        self.factor *= 2
        shortage = Shortage(self._name, number, min(number * 2, num_sequences), self.factor, refusal)
        self._shortages.append(shortage)
        log.warning("%s", shortage)

    def _give_back(self) -> None:
        gc.collect()
        self._recover()
        give_back_reserve()
