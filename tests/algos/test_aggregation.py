"""The four aggregations: against the naive twin, and the same for any split into micro-batches."""

from typing import get_args

import pytest
import torch

from rlcore.algos.aggregation import Denominator, aggregate, segment_sum, token_counts
from rlcore.config.algo import Aggregation
from tests.algos import naive
from tests.algos.compare import assert_floats, assert_tokens
from tests.algos.ragged import GAPPED, RAGGED, Rows, denominator, floats, grad_of, leaf, partitions

MODES = get_args(Aggregation)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize("mode", MODES)
def test_value_and_gradient_are_those_of_the_naive_twin(mode: Aggregation, rows: Rows) -> None:
    loss = leaf(floats(rows, 1))
    counts = denominator(rows)
    total = aggregate(
        loss, rows.mask, rows.sequence_ids, mode=mode, denominator=counts, num_sequences=rows.num_sequences
    )
    weights = naive.token_weights(mode, rows.answers(), counts.num_tokens, counts.num_sequences, counts.norm_tokens)
    assert total.item() == pytest.approx(sum(w * loss[t].item() for t, w in weights.items()), rel=1e-12)
    total.backward()
    assert_tokens(grad_of(loss), weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_in_any_split_and_order_add_up_to_the_whole(mode: Aggregation, dtype: torch.dtype) -> None:
    rel = 1e-12 if dtype == torch.float64 else 1e-6
    counts = denominator(RAGGED)
    values = floats(RAGGED, 5, dtype=dtype)

    def share(rows: Rows, loss: torch.Tensor) -> torch.Tensor:
        return aggregate(
            loss, rows.mask, rows.sequence_ids, mode=mode, denominator=counts, num_sequences=rows.num_sequences
        )

    whole = leaf(values)
    expected = share(RAGGED, whole)
    expected.backward()
    splits = [partitions(RAGGED.num_sequences, seed) for seed in range(20)]
    assert {len(split) for split in splits} >= {1, 3, 6}  # from one micro-batch to one sequence in each
    for split in splits:
        parts = leaf(values)
        shares = []
        for sequences in split:
            rows, index = RAGGED.select(sequences)
            shares.append(share(rows, parts[index]))
        torch.stack(shares).sum().backward()
        assert sum(s.item() for s in shares) == pytest.approx(expected.item(), rel=rel, abs=rel)  # values of size 1
        assert torch.equal(grad_of(parts), grad_of(whole))  # each token's weight depends on its own sequence alone


@pytest.mark.parametrize("mode", MODES)
def test_garbage_under_the_mask_changes_nothing(mode: Aggregation) -> None:
    results = []
    for values in (floats(RAGGED, 3), torch.where(RAGGED.mask, floats(RAGGED, 3), 0.0)):
        loss = leaf(values)
        total = aggregate(
            loss, RAGGED.mask, RAGGED.sequence_ids, mode=mode, denominator=denominator(RAGGED), num_sequences=6
        )
        total.backward()
        results.append((total.detach(), grad_of(loss)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_modes_are_four_different_numbers() -> None:
    loss = floats(RAGGED, 1)
    totals = {
        aggregate(
            loss, RAGGED.mask, RAGGED.sequence_ids, mode=mode, denominator=denominator(RAGGED), num_sequences=6
        ).item()
        for mode in MODES
    }
    assert len(totals) == 4


def test_modes_agree_where_all_answers_are_as_long_as_the_limit() -> None:
    """Identity: with |n| = C for every n, token-mean, seq-mean-token-mean and -sum-norm are one and the same."""
    rows = Rows(((False, True, True, False), (True, True, False)))
    loss = floats(rows, 1)
    totals = [
        aggregate(
            loss, rows.mask, rows.sequence_ids, mode=mode, denominator=Denominator(4, 2, 2), num_sequences=2
        ).item()
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-12)


def test_segment_sum_and_token_counts() -> None:
    values = torch.where(GAPPED.mask, floats(GAPPED, 1), 0.0)
    expected = [sum(values[t].item() for t in positions) for positions in GAPPED.answers()]
    assert_floats(segment_sum(values, GAPPED.sequence_ids, GAPPED.num_sequences), expected)
    assert token_counts(GAPPED.mask, GAPPED.sequence_ids, GAPPED.num_sequences).tolist() == GAPPED.lengths()
    assert segment_sum(values, GAPPED.sequence_ids, GAPPED.num_sequences + 2).tolist()[-2:] == [0.0, 0.0]


def test_segment_sum_in_float32_is_the_rounded_float64_sum() -> None:
    """1e8 + 1 - 1e8 is 0 when added up in float32."""
    values = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    assert segment_sum(values, torch.tensor([0, 0, 0]), 1).tolist() == [1.0]


@pytest.mark.parametrize("field", ["num_tokens", "num_sequences", "norm_tokens"])
def test_a_denominator_of_nothing_is_refused_by_name(field: str) -> None:
    counts = {"num_tokens": 1, "num_sequences": 1, "norm_tokens": 1} | {field: 0}
    with pytest.raises(ValueError, match=rf"Denominator\.{field}: must be at least 1, got 0"):
        Denominator(**counts)
