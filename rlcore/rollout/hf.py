"""The function `build_engine`, and a simple reference engine that samples from a transformers model with one uniform
random number per token. Responses to one prompt share the prefill, and finished rows leave the batch."""

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import DeviceMemoryError, EngineError
from rlcore.models.load import load_policy
from rlcore.models.memory import OutOfMemory, catch_out_of_memory, release_cached_memory
from rlcore.models.policy import CausalPolicy, round_weights
from rlcore.models.tokenizer import end_of_text_ids
from rlcore.rollout.engine import (
    ROUND_TOKENS,
    NoEngine,
    Requests,
    RolloutEngine,
    SamplingRequest,
    TailCut,
    WeightSyncResult,
    require_all_weights,
)
from rlcore.types import FinishReason, Rollout

log = logging.getLogger(__name__)
COMPACT_BELOW = 0.75  # share of unfinished rows below which the batch is rebuilt


@dataclass(slots=True)
class _Response:
    """A response in progress. At `limit` tokens it is finished. At `cut_at` tokens it is cut, and the next training
    step continues it (`TailCut`)."""

    limit: int
    cut_at: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason == "stop" or len(self.token_ids) >= self.limit

    @property
    def continues(self) -> bool:
        return not self.is_finished and len(self.token_ids) < self.cut_at


class HfEngine(RolloutEngine):
    """A `RolloutEngine` that generates with transformers on any torch device."""

    def __init__(self, policy: CausalPolicy, *, eos_token_ids: frozenset[int], max_num_seqs: int) -> None:
        self._policy = policy.eval().requires_grad_(False)
        self._eos_token_ids = eos_token_ids
        self._batch_size = max_num_seqs
        self.policy_version = -1

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Copy all weights into the engine's model."""
        self.policy_version = -1  # an interrupted weight sync leaves no valid version
        own = dict(self._policy.model.named_parameters())
        with torch.no_grad():
            for name, tensor in require_all_weights(weights, own):
                own[name].copy_(tensor)
        self.policy_version = version
        return WeightSyncResult()

    def stream(
        self, requests: Requests, sampling: SamplingConfig, max_response_tokens: int, cut: TailCut | None = None
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with the index of its request, batch by batch."""
        if self.policy_version < 0:
            raise EngineError("the engine got requests before its first weight sync")
        start = 0
        while start < len(requests):
            batch = requests[start : start + self._batch_size]
            answers = catch_out_of_memory(partial(self._generate_batch, batch, sampling, max_response_tokens, cut))
            if isinstance(answers, OutOfMemory):
                self._reduce_batch_size(len(batch), answers)
                continue
            yield from enumerate(answers, start)
            start += len(batch)

    def _reduce_batch_size(self, number: int, refused: OutOfMemory) -> None:
        """Halve the batch size after a batch of `number` responses exceeded the device memory. This does not change the
        responses, because each has a separate seed. Raises DeviceMemoryError if `number` is 1."""
        if number == 1:
            raise DeviceMemoryError(
                f"generation ran out of memory with a single response ({refused.message}). Shorten "
                "filter.max_prompt_tokens or rollout.max_response_tokens, or free memory for it: algo.kl.offload=true, "
                "optim.offload=true."
            )
        self._batch_size = -(-number // 2)
        log.warning(
            "generation ran out of memory with %d concurrent responses, and continues with %d: %s",
            number, self._batch_size, refused.message,
        )  # fmt: skip
        gc.collect()
        release_cached_memory()

    @torch.no_grad()
    def _generate_batch(
        self, requests: Requests, sampling: SamplingConfig, max_response_tokens: int, cut: TailCut | None
    ) -> list[Rollout]:
        device = next(self._policy.parameters()).device
        prompts = list({request.prompt.token_ids: None for request in requests})
        row_of = {token_ids: row for row, token_ids in enumerate(prompts)}
        token_ids, mask = _left_padded(prompts)
        cache = DynamicCache()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._policy.decode(token_ids.to(device), mask.to(device), positions.to(device), cache)
        rows = torch.tensor([row_of[request.prompt.token_ids] for request in requests], device=device)
        cache.batch_select_indices(rows)
        logits, mask = logits[rows], mask.to(device)[rows]
        next_position = mask.sum(dim=1)

        draws = torch.from_numpy(_uniforms(requests, max_response_tokens)).to(device)
        answers = [_Response(request.limit(max_response_tokens), max_response_tokens) for request in requests]
        live = np.arange(len(requests))  # the request of each row in the batch
        for index in range(max_response_tokens):
            if cut is not None and index % ROUND_TOKENS == 0:
                _agree(cut, requests, answers)
            tokens, logprobs = sample(logits, draws[torch.from_numpy(live).to(device), index], sampling)
            going = self._append(answers, live, tokens, logprobs)
            if not going.any():
                break
            if going.mean() < COMPACT_BELOW:
                keep = torch.from_numpy(np.flatnonzero(going)).to(device)
                cache.batch_select_indices(keep)
                mask, next_position, tokens = mask[keep], next_position[keep], tokens[keep]
                live = live[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._policy.decode(tokens[:, None], mask, next_position[:, None], cache)
            next_position = next_position + 1
        return [self._rollout(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _append(self, answers: list[_Response], live: np.ndarray, tokens: Tensor, logprobs: Tensor) -> np.ndarray:
        """Append each row's new token to its response, unless the response has ended. Return the mask of rows whose
        responses need more tokens."""
        going = np.ones(len(live), dtype=bool)
        for row, (request, token, logprob) in enumerate(
            zip(live.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            answer = answers[request]
            if answer.continues:  # finished rows may stay until the batch is rebuilt
                answer.token_ids.append(token)
                answer.logprobs.append(logprob)
                if token in self._eos_token_ids:
                    answer.finish_reason = "stop"
            going[row] = answer.continues
        return going

    def _rollout(self, request: SamplingRequest, answer: _Response) -> Rollout:
        return Rollout(
            prompt=request.prompt,
            sample_index=request.sample_index,
            response_ids=np.array(answer.token_ids, dtype=np.int32),
            behavior_logprobs=np.array(answer.logprobs, dtype=np.float32),
            finish_reason=answer.finish_reason,
            policy_version=self.policy_version,
            is_cut=not answer.is_finished,
        )


def _agree(cut: TailCut, requests: Requests, answers: Sequence[_Response]) -> None:
    """Exchange the lengths of finished responses with the other ranks. Set `cut_at` of the responses that may be cut to
    the resulting `TailCut.bound`."""
    for request, answer in zip(requests, answers, strict=True):
        if answer.is_finished:
            cut.end(request.group, request.sample_index, len(answer.token_ids))
    cut.agree()
    for request, answer in zip(requests, answers, strict=True):
        if request.group >= 0:
            answer.cut_at = cut.bound


def sample(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, "B"], sampling: SamplingConfig
) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """Draw a token for each row by inverting the distribution function, or take the likeliest token at temperature 0.
    Return the tokens and their log-probabilities. These include the temperature but not top-p, as in the trainer."""
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    probs = logprobs.double().exp()
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        probs = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(before >= sampling.top_p, 0.0))
    cumulative = probs.cumsum(dim=-1)
    threshold = uniforms.double()[:, None] * cumulative[:, -1:]
    # right=True: a uniform of exactly 0 must not pick a leading token of probability 0.
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _left_padded(prompts: Sequence[tuple[int, ...]]) -> tuple[Int[Tensor, "P L"], Int[Tensor, "P L"]]:
    rows = [torch.tensor(token_ids) for token_ids in prompts]
    padded = pad_sequence(rows, batch_first=True, padding_side="left")
    return padded, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")


def _uniforms(requests: Requests, count: int) -> np.ndarray:
    """Return uniform random numbers in [0, 1), Float64[B, count]. Row i is drawn with the seed of request i."""
    return np.stack([np.random.Generator(np.random.Philox(request.seed)).random(count) for request in requests])


def build_engine(config: RunConfig, model_directory: str, *, device: torch.device, dtype: torch.dtype) -> RolloutEngine:
    """Create the engine that `rollout.engine` selects. The engine needs a weight sync before it can generate. Raises
    EngineError if vLLM is selected but missing, or cannot run this model."""
    if config.rollout.engine == "none":
        return NoEngine()
    end_of_text = end_of_text_ids(model_directory)
    if config.rollout.engine == "vllm":
        from rlcore.rollout.vllm.engine import VllmEngine
        from rlcore.rollout.vllm.start import EngineShape

        max_model_len = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
        shape = EngineShape(model_directory, max_model_len, config.concurrent_responses, device, dtype)
        return VllmEngine(shape, config.rollout, eos_token_ids=end_of_text)
    # The engine computes in its own type, and without a 4-bit base, since it gets merged weights.
    lora = config.model.lora and config.model.lora.model_copy(update={"base": "native"})
    computing = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch."), "lora": lora})
    policy = round_weights(load_policy(model_directory, model=computing, device=device), dtype)
    return HfEngine(policy, eos_token_ids=end_of_text, max_num_seqs=config.rollout.max_num_seqs)
