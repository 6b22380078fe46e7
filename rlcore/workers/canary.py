"""The canary: after a hand-over the engine answers a probe, and the trainer computes the same log-probabilities.

A tensor that did not arrive shows in its digest (`WeightSyncResult`), whatever the noise. An engine that holds every tensor
and computes with others all the same (a packed copy, a graph that reads another address) raises no error: its
log-probabilities are from another policy than the one that is trained. Rounding moves them too, by how much is the
model's own affair, so the first right hand-over says what is usual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.batching.pack import pack
from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import RolloutEngine, SamplingRequest, WeightSyncResult
from rlcore.types import PackedBatch, Prompt, Score

NUM_PROMPTS = 4
"""Prompts of a probe."""
# More answers rather than longer ones: a step of the engine takes as long for 16 answers as for 8.
_ANSWERS_PER_PROMPT = 4
_ANSWER_TOKENS = 8

FIRST_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean absolute difference of log-probabilities at a first hand-over that is still rounding. A tensor that vLLM drew at
random, as it does all before the first hand-over, shows 1 to 10."""
NOISE_FACTOR = 4.0
"""How many times the first hand-over's difference a later one's may be."""
MIN_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Bound of a model that rounds by less at its first hand-over; training may bring it to where it rounds more."""


@dataclass(frozen=True, slots=True)
class WeightSync:
    """A hand-over whose tensors are right. `difference`: mean |engine's - trainer's| log-probability of the probe.
    `warning`: why it is doubtful all the same; empty where it is not."""

    difference: float
    warning: str = ""


class Canary:
    """Judges hand-overs, and remembers what the first one taught."""

    def __init__(self, config: RunConfig, dtype: torch.dtype) -> None:
        self._given = config.rollout.canary_bound
        self._dtype = dtype if dtype in FIRST_BOUNDS else torch.bfloat16
        self._noise: float | None = None
        self._in_another_form: frozenset[str] = frozenset()

    @property
    def bound(self) -> float:
        """Difference above which the next hand-over is doubtful."""
        if self._given is not None:
            return self._given
        if self._noise is None:
            return FIRST_BOUNDS[self._dtype]
        return max(MIN_BOUNDS[self._dtype], NOISE_FACTOR * self._noise)

    def check(self, version: int, observed: Sequence[tuple[WeightSyncResult, float]]) -> WeightSync:
        """`observed` by all ranks, so that the verdict is the same on each: what was taken, and the difference.

        Raises:
            EngineError: a tensor is not the one that was sent, or may not be: it cannot be compared, and the
                log-probabilities differ. Or one of those is no number.
        """
        bound, difference = self.bound, max(one for _, one in observed)
        differing = list(dict.fromkeys(name for taken, _ in observed for name in taken.differing))
        uncompared = list(dict.fromkeys(name for taken, _ in observed for name in taken.uncompared))
        if self._noise is None and difference <= bound:
            # Before it vLLM's weights are random: a model that answers right with them has taken them over.
            self._in_another_form = frozenset(differing)
        uncompared += [name for name in differing if name in self._in_another_form]
        differing = [name for name in differing if name not in self._in_another_form]
        text = (
            f"weight hand-over {version}: on a probe the engine's log-probabilities differ from the trainer's by "
            f"{difference:.3g} on average (rollout.canary_bound: {self._origin(bound)})"
        )
        if differing or (uncompared and difference > bound) or not np.isfinite(difference):
            raise EngineError(
                f"{text}: it does not answer with the trained weights. {_format_names('Tensors that differ', differing)}"
                f"{_format_names('Tensors that cannot be compared', uncompared)}"
                "Nothing was sampled from them. Use rollout=hf, or another version of vLLM."
            )
        if self._noise is None:
            self._noise = min(difference, FIRST_BOUNDS[self._dtype])
        if difference <= bound:
            return WeightSync(difference)
        return WeightSync(
            difference,
            f"{text}, though every tensor is equal: its kernels round further from the trainer's than usual, or it "
            "computes with something else. See training/rollout_probs_diff_mean; algo.importance.mode=truncate "
            "corrects for a small difference, rollout=hf has none",
        )

    def _origin(self, bound: float) -> str:
        if self._given is not None or self._noise is None:
            return f"{bound:g}"
        return f"{bound:.3g}, from the first hand-over's {self._noise:.3g}"


def _format_names(what: str, names: Sequence[str]) -> str:
    """The first names in words.

    >>> _format_names("Tensors", "abcd"), _format_names("Tensors", "abcde"), _format_names("Tensors", "")  # doctest: -ELLIPSIS
    ('Tensors (4): a, b, c, d. ', 'Tensors (5): a, b, c, d, .... ', '')
    """
    if not names:
        return ""
    return f"{what} ({len(names)}): {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. "


def probe_difference(
    engine: RolloutEngine,
    config: RunConfig,
    prompts: Sequence[Prompt],
    logprobs: Callable[[PackedBatch, int], Float[Tensor, "T"]],
) -> float:
    """Mean |engine's - trainer's| log-probability over the answers' tokens; infinite where one is not finite.

    The engine answers at the temperature of training, always by the same seeds. `logprobs`: the trainer's pass, in as
    many micro-batches on every rank, however long the answers are.
    """
    assert prompts, "a worker is given the prompts of its probe before a hand-over to vLLM"
    requests = [SamplingRequest(prompt, i, seed=i) for prompt in prompts for i in range(_ANSWERS_PER_PROMPT)]
    sampling = SamplingConfig(temperature=config.rollout.sampling.temperature)
    rollouts = engine.generate(requests, sampling, min(_ANSWER_TOKENS, config.rollout.max_response_tokens))
    batch = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    tokens = _ANSWERS_PER_PROMPT * sum(len(prompt.token_ids) + _ANSWER_TOKENS for prompt in prompts)
    num_micro = -(-tokens // config.trainer.max_tokens_per_micro_batch)
    difference = (batch.behavior_logprobs - logprobs(batch, num_micro))[batch.loss_mask].abs().mean().item()
    return difference if np.isfinite(difference) else float("inf")
