"""Ragged packed rows with garbage where the mask is False, and comparisons at response tokens."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlcore.algos.aggregation import Denominator
from rlcore.types import PackedBatch, TrainBatch

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30)
"""Values under a False mask, which must be ignored."""


@dataclass(frozen=True)
class Rows:
    """Sequences laid end to end; `marks[n]` is the mask of sequence n."""

    marks: tuple[tuple[bool, ...], ...]

    @property
    def num_sequences(self) -> int:
        return len(self.marks)

    @property
    def mask(self) -> Tensor:
        return torch.tensor([mark for row in self.marks for mark in row], dtype=torch.bool)

    @property
    def sequence_ids(self) -> Tensor:
        return torch.tensor([n for n, row in enumerate(self.marks) for _ in row], dtype=torch.int64)

    @property
    def cu_seqlens(self) -> Tensor:
        lengths = torch.tensor([0, *(len(row) for row in self.marks)])
        return torch.cumsum(lengths, 0)

    def answers(self) -> list[list[int]]:
        """Return for each sequence the flat positions of its answer tokens."""
        positions, start = [], 0
        for row in self.marks:
            positions.append([start + t for t, mark in enumerate(row) if mark])
            start += len(row)
        return positions

    def lengths(self) -> list[int]:
        """Return the number of response tokens of each sequence."""
        return [sum(row) for row in self.marks]

    def select(self, sequences: Sequence[int]) -> tuple["Rows", Tensor]:
        """Some of the sequences in the order given, and where their tokens were."""
        bounds = self.cu_seqlens.tolist()
        index = [t for n in sequences for t in range(bounds[n], bounds[n + 1])]
        return Rows(tuple(self.marks[n] for n in sequences)), torch.tensor(index, dtype=torch.int64)


def row(num_prompt: int, num_answer: int) -> tuple[bool, ...]:
    """Return the mask of a sequence, shifted by one as in `pack`. The last token therefore predicts nothing."""
    return tuple([False] * (num_prompt - 1) + [True] * num_answer + [False])


RAGGED = Rows((row(3, 4), row(1, 1), row(2, 7), row(5, 2), row(1, 3), row(4, 1)))
"""Six sequences of 1 to 7 answer tokens."""
GAPPED = Rows((row(2, 3), (False, True, True, False, False, True, False, True, False), (False, False), row(1, 2)))
"""A sequence whose answer is broken by tokens that are not the model's, and one without an answer."""


def floats(rows: Rows, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal random numbers at response tokens, and garbage elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(rows.mask.numel(), generator=generator, dtype=torch.float64)
    return spoiled(values.to(dtype), rows.mask, seed)


def spoiled(values: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Return the values with garbage where the mask is False."""
    rng = random.Random(seed)
    garbage = torch.tensor([rng.choice(GARBAGE) for _ in range(values.numel())], dtype=values.dtype)
    return torch.where(mask, values, garbage)


def leaf(values: Tensor) -> Tensor:
    """Return a copy of a tensor that collects a gradient."""
    return values.detach().clone().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    """Return the gradient that a leaf has collected."""
    assert tensor.grad is not None
    return tensor.grad


def train_batch(rows: Rows, advantages: Tensor, **given: Tensor | None) -> TrainBatch:
    """The rows as an update gets them. What is not given is None; weights are 1, and the sampler is the old policy."""
    of_tokens, of_rows = torch.zeros(rows.mask.numel(), dtype=torch.int64), torch.zeros(rows.num_sequences)
    old = given.get("old_logprobs")
    packed = PackedBatch(
        token_ids=of_tokens,
        position_ids=of_tokens,
        cu_seqlens=rows.cu_seqlens,
        target_ids=of_tokens,
        loss_mask=rows.mask,
        behavior_logprobs=torch.zeros_like(advantages) if old is None else old,
        scores=of_rows,
        score_mask=torch.ones_like(of_rows, dtype=torch.bool),
        group_ids=torch.arange(rows.num_sequences),
    )
    absent = dict.fromkeys(("old_logprobs", "ref_logprobs", "old_values", "returns"))
    weights = {"importance_weights": torch.ones_like(advantages)}
    return TrainBatch(packed=packed, advantages=advantages, **(absent | weights | given))


def denominator(rows: Rows) -> Denominator:
    return Denominator(num_tokens=sum(rows.lengths()), num_sequences=rows.num_sequences, norm_tokens=8)


def partitions(num_sequences: int, seed: int) -> list[list[int]]:
    """Return the sequences in random order, cut at random places."""
    rng = random.Random(seed)
    order = rng.sample(range(num_sequences), num_sequences)
    cuts = sorted(rng.sample(range(1, num_sequences), rng.randint(0, num_sequences - 1)))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, num_sequences], strict=True)]


def assert_tokens(actual: Tensor, expected: Mapping[int, float], rel: float = 1e-12) -> None:
    """Assert that `actual` has the expected value at each response token and exactly 0 elsewhere."""
    wanted = [pytest.approx(expected[t], rel=rel, abs=rel) if t in expected else 0.0 for t in range(actual.numel())]
    assert actual.tolist() == wanted


def assert_flags(actual: Tensor, expected: Mapping[int, bool]) -> None:
    """Like `assert_tokens`, for truth values."""
    assert actual.tolist() == [expected.get(t, False) for t in range(actual.numel())]
