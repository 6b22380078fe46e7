"""The canary, a comparison of the engine's and the trainer's log-probabilities of a few responses (the probe) after a
weight sync. An engine whose tensors are all correct (`WeightSyncResult`) may still compute with an outdated copy of the
weights. It may also read an old address in a CUDA graph. Rounding also causes a difference, whose size depends on the
model. The bound is therefore a multiple of the difference after the first correct sync."""

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

NUM_PROMPTS = 4  # number of prompts of a probe
# More responses instead of longer ones, since an engine step takes as long for 16 as for 8.
_RESPONSES_PER_PROMPT = 4
_RESPONSE_TOKENS = 8

FIRST_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest accepted difference at the first sync, for each dtype. For comparison, random weights give a difference
of 1 to 10."""
NOISE_FACTOR = 4.0  # factor by which a later difference may exceed the difference of the first sync
MIN_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""The smallest bound at later syncs, for each dtype. It leaves room for rounding differences, which can grow in
training."""


@dataclass(frozen=True, slots=True)
class WeightSync:
    """The result of a weight sync. `difference`: the mean absolute difference of log-probabilities on the probe.
    `warning`: the reason why the engine's weights may be wrong, or ''."""

    difference: float
    warning: str = ""


class Canary:
    """A check of each weight sync. The first sync determines the bound for later syncs, unless `rollout.canary_bound`
    is set."""

    def __init__(self, config: RunConfig, dtype: torch.dtype) -> None:
        self._configured = config.rollout.canary_bound
        self._dtype = dtype if dtype in FIRST_BOUNDS else torch.bfloat16
        self._noise: float | None = None
        self._transformed: frozenset[str] = frozenset()

    @property
    def bound(self) -> float:
        """The largest accepted difference between the trainer's and the engine's log-probabilities at the next sync."""
        if self._configured is not None:
            return self._configured
        if self._noise is None:
            return FIRST_BOUNDS[self._dtype]
        return max(MIN_BOUNDS[self._dtype], NOISE_FACTOR * self._noise)

    def check(self, version: int, observed: Sequence[tuple[WeightSyncResult, float]]) -> WeightSync:
        """Check a weight sync by the results and probe differences of all ranks. All ranks get the same outcome. Raises
        EngineError if a tensor differs or the difference is not finite. Tensors that differ at the first sync, although
        the difference is within the bound, count from then on as tensors that cannot be compared. A difference above
        the bound sets `warning` if all tensors are equal, and raises EngineError if some tensors cannot be compared."""
        bound, difference = self.bound, max(one for _, one in observed)
        differing = list(dict.fromkeys(name for result, _ in observed for name in result.differing))
        uncompared = list(dict.fromkeys(name for result, _ in observed for name in result.uncompared))
        if self._noise is None and difference <= bound:
            # vLLM's initial weights are random, so correct log-probabilities prove that these tensors arrived.
            self._transformed = frozenset(differing)
        uncompared += [name for name in differing if name in self._transformed]
        differing = [name for name in differing if name not in self._transformed]
        is_learned = self._configured is None and self._noise is not None
        origin = f"{bound:.3g}, from the first sync's {self._noise:.3g}" if is_learned else f"{bound:g}"
        text = (
            f"weight sync {version}: on a probe the engine's log-probabilities differ from the trainer's by "
            f"{difference:.3g} on average (rollout.canary_bound: {origin})"
        )
        if differing or (uncompared and difference > bound) or not np.isfinite(difference):
            raise EngineError(
                f"{text}: it does not compute with the trained weights. "
                f"{_format_names('Tensors that differ', differing)}"
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


def _format_names(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"{what} ({len(names)}): {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. "


def probe_difference(
    engine: RolloutEngine,
    config: RunConfig,
    prompts: Sequence[Prompt],
    logprobs: Callable[[PackedBatch, int], Float[Tensor, "T"]],
) -> float:
    """Return the mean absolute difference between the engine's and the trainer's log-probabilities, or inf if this
    difference is not finite. The engine samples at the training temperature with fixed seeds. `logprobs`: the trainer's
    forward pass, which gets a batch and the number of micro-batches. This number is the same on all ranks."""
    assert prompts, "set_probe must precede a weight sync to vLLM"
    requests = [SamplingRequest(prompt, i, seed=i) for prompt in prompts for i in range(_RESPONSES_PER_PROMPT)]
    sampling = SamplingConfig(temperature=config.rollout.sampling.temperature)
    rollouts = engine.generate(requests, sampling, min(_RESPONSE_TOKENS, config.rollout.max_response_tokens))
    batch = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    tokens = _RESPONSES_PER_PROMPT * sum(len(prompt.token_ids) + _RESPONSE_TOKENS for prompt in prompts)
    num_micro = -(-tokens // config.trainer.max_tokens_per_micro_batch)
    difference = (batch.behavior_logprobs - logprobs(batch, num_micro))[batch.loss_mask].abs().mean().item()
    return difference if np.isfinite(difference) else float("inf")
