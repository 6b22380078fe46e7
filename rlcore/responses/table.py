"""Conversion of rollouts to the columns of `rlcore.responses.store`, without a loop over tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from torch import Tensor

from rlcore.responses.store import SCHEMA
from rlcore.types import Rollout, Score, TrainBatch

Decode = Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]
"""A function that decodes many sequences of token ids into the texts that scorers get."""


def response_table(
    step: int,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    texts: Sequence[str],
    decode: Decode,
    *,
    validation: str | None = None,
    greedy: bool = False,
    batch: TrainBatch | None = None,
    policy_logprobs: Float[Tensor, "T"] | None = None,
) -> pa.Table:
    """Return a table with a row for each response of a training step or validation. `policy_logprobs`: None, or the
    trainer's log-probabilities before the update, one for each token of `batch`."""
    tokens, count = _Tokens(rollouts), len(rollouts)
    prompts = list(dict.fromkeys(rollout.prompt for rollout in rollouts))
    prompt_texts = dict(zip(prompts, decode([prompt.token_ids for prompt in prompts]), strict=True))
    turned = np.array([rollout.is_sampled is not None for rollout in rollouts], dtype=bool)
    sums, counts = tokens.reduce(np.where(tokens.is_sampled, tokens.behavior, 0)), tokens.reduce(tokens.is_sampled)
    columns: dict[str, object] = {
        "step": np.full(count, step, dtype=np.int32),
        "validation": [validation] * count,
        "greedy": [greedy] * count,
        "prompt_id": [rollout.prompt.prompt_id for rollout in rollouts],
        "sample_index": [rollout.sample_index for rollout in rollouts],
        "data_source": [rollout.prompt.data_source for rollout in rollouts],
        "score": [score.total if score.failure is None else None for score in scores],
        "num_tokens": tokens.lengths.astype(np.int32),
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "policy_version": [rollout.policy_version for rollout in rollouts],
        "logprob": (sums / np.maximum(counts, 1)).astype(np.float32),
        "prompt": [prompt_texts[rollout.prompt] for rollout in rollouts],
        "ground_truth": [rollout.prompt.ground_truth_json for rollout in rollouts],
        "answer": list(texts),
        "said": [score.said for score in scores],
        "parts": [list(score.parts.items()) for score in scores],
        "failure": [score.failure for score in scores],
        "token_ids": tokens.column(tokens.ids),
        "is_sampled": tokens.column(tokens.is_sampled, present=turned),
        "behavior_logprobs": tokens.column(tokens.behavior),
        **({} if batch is None else _training_columns(tokens, batch, policy_logprobs)),
    }
    return pa.table(dict.fromkeys(SCHEMA.names, [None] * count) | columns, schema=SCHEMA)


def _training_columns(tokens: "_Tokens", batch: TrainBatch, policy_logprobs: Tensor | None) -> dict[str, object]:
    where = tokens.packed_indices(batch.packed.cu_seqlens.numpy())
    learned = batch.packed.loss_mask.numpy()[where]
    advantages = batch.advantages.float().numpy()[where]
    counts = tokens.reduce(learned)
    means = (tokens.reduce(np.where(learned, advantages, 0)) / np.maximum(counts, 1)).astype(np.float32)
    differing = tokens.reduce(learned & (np.abs(advantages - np.repeat(means, tokens.lengths)) > _EQUAL)) > 0
    columns: dict[str, object] = {"advantage": means, "advantages": tokens.column(advantages, present=differing)}
    if batch.ref_logprobs is not None:
        columns["ref_logprobs"] = tokens.column(batch.ref_logprobs.float().numpy()[where])
    if policy_logprobs is not None:
        policy = policy_logprobs.float().numpy()[where]
        gaps = tokens.reduce(np.where(learned, np.abs(policy - tokens.behavior), 0), np.maximum)
        columns |= {"policy_logprobs": tokens.column(policy), "gap": gaps.astype(np.float32)}
    return columns


_EQUAL = 1e-6
"""The advantages of a response's tokens count as equal if each differs from their mean by at most this number."""


class _Tokens:
    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.lengths = np.array([len(rollout.response_ids) for rollout in rollouts], dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.ids = _concatenate([rollout.response_ids for rollout in rollouts], np.int32)
        self.behavior = _concatenate([rollout.behavior_logprobs for rollout in rollouts], np.float32)
        whole = [np.ones(len(r.response_ids), bool) if r.is_sampled is None else r.is_sampled for r in rollouts]
        self.is_sampled = _concatenate(whole, np.bool_)

    def packed_indices(self, cu_seqlens: np.ndarray) -> np.ndarray:
        """Return the positions Int[R] in a packed batch whose outputs predict the R response tokens of all rollouts.
        `cu_seqlens`: the bounds of the packed sequences."""
        prompts = np.array([len(rollout.prompt.token_ids) for rollout in self.rollouts], dtype=np.int64)
        first = cu_seqlens[:-1] + prompts - 1  # the position that predicts the first response token
        return np.repeat(first - self.starts, self.lengths) + np.arange(self.lengths.sum())

    def reduce(self, values: np.ndarray, function: np.ufunc = np.add) -> np.ndarray:
        """Reduce the token values of each response to one value, their sum by default. An empty response has the value
        0."""
        found = np.zeros(len(self.lengths), dtype=np.float64)
        full = self.lengths > 0
        if full.any():
            found[full] = function.reduceat(values, self.starts[full], dtype=np.float64)
        return found

    def column(self, values: np.ndarray, present: np.ndarray | None = None) -> pa.Array:
        """Return the token values as one list per response. A response where `present` is False gets null."""
        if present is None:
            present = np.ones(len(self.lengths), dtype=bool)
        ends = np.cumsum(np.where(present, self.lengths, 0))
        offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        kept = pa.array(values[np.repeat(present, self.lengths)])
        return pa.ListArray.from_arrays(offsets, kept, mask=pa.array(~present))


def _concatenate(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype=dtype)
