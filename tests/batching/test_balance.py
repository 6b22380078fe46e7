"""Assignment of sequences by cost."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.batching import balance
from rlcore.batching.balance import Balancer, RankShares, Sizes, micro_batches, mini_batches, partition
from rlcore.batching.pack import select
from rlcore.config.model import PUBLISHED
from rlcore.models.shape import ModelShape
from rlcore.types import PackedBatch
from tests.models.tiny import answers

LENGTHS = st.lists(st.integers(1, 1500), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 8))
def test_partition_covers_every_index_once(lengths: list[int], num_parts: int) -> None:
    parts = partition(lengths, min(num_parts, len(lengths)))
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert [bool(part) for part in parts] == [True] * min(num_parts, len(lengths))
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)


@given(st.integers(1, 6), st.integers(1, 10), st.randoms(use_true_random=False))
def test_partition_with_equal_counts(num_parts: int, each: int, random: Random) -> None:
    lengths = [random.randint(1, 900) for _ in range(num_parts * each)]
    parts = partition(lengths, num_parts, equal_counts=True)
    assert [len(part) for part in parts] == [each] * num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))


@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_partition_equals_naive_differencing(num_parts: int) -> None:
    """Karmarkar and Karp join the two partial solutions with the largest differences, heaviest part to lightest."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 10**9, 23).tolist()  # no two spreads are alike
        found = [[length, *[0] * (num_parts - 1)] for length in lengths]
        while len(found) > 1:
            found.sort(key=lambda sums: max(sums) - min(sums))
            first, second = sorted(found.pop()), sorted(found.pop(), reverse=True)
            found.append([a + b for a, b in zip(first, second, strict=True)])
        sums = [sum(lengths[i] for i in part) for part in partition(lengths, num_parts)]
        assert sorted(sums) == sorted(found[0])


@given(LENGTHS, st.integers(1, 4000))
@example([3, 3, 3, 3], 8)  # two fill a micro-batch
def test_num_micro_batches_equals_linear_search(lengths: list[int], max_tokens: int) -> None:
    batch = answers([(1, (length,)) for length in lengths])
    tokens = [length + 1 for length in lengths]

    def is_over(part: list[int]) -> bool:
        return len(part) > 1 and sum(tokens[i] for i in part) > max_tokens

    count = min(-(-sum(tokens) // max_tokens), len(tokens))
    while count < len(tokens) and any(map(is_over, partition(tokens, count))):
        count += 1
    assert Balancer(num_ranks=1, max_tokens=max_tokens, shape=None).assign(batch, len(tokens)).whole.num_micro == count


@pytest.mark.parametrize(("num_parts", "each"), [(2, 4), (3, 3)])
def test_partition_with_equal_counts_is_near_optimal(num_parts: int, each: int) -> None:
    for seed in range(40):
        lengths = (1_000 * np.random.default_rng(seed).lognormal(size=num_parts * each)).astype(int).tolist()
        found = max(sum(lengths[i] for i in part) for part in partition(lengths, num_parts, equal_counts=True))
        best = min(max(sum(lengths[i] for i in part) for part in cut) for cut in equal_cuts(range(len(lengths)), each))
        assert best <= found <= 1.03 * best


def equal_cuts(indices: Sequence[int], each: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to cut the indices into parts of `each` indices."""
    if not indices:
        yield []
        return
    first, *rest = indices
    for others in itertools.combinations(rest, each - 1):
        left = [index for index in rest if index not in others]
        for cut in equal_cuts(left, each):
            yield [(first, *others), *cut]


def drawn_batch(rng: np.random.Generator, num_sequences: int, *, mean: float, longest: int) -> PackedBatch:
    """Groups of 4 with prompts as long as GSM8K's and answers of skewed lengths; one answer in ten has no score."""
    groups = [
        (int(rng.integers(60, 200)), [min(longest, 1 + int(rng.exponential(mean))) for _ in range(4)])
        for _ in range(num_sequences // 4)
    ]
    return answers(groups, unscored=frozenset(np.flatnonzero(rng.random(num_sequences) < 0.1).tolist()))


SHAPE = ModelShape.of_config(PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"])


def test_costs_count_operations() -> None:
    """Compare with a count token by token: the layers' weights, the head at targets with a loss, each earlier token."""
    batch = drawn_batch(np.random.default_rng(3), 12, mean=40, longest=200)
    lengths, sizes = batch.sequence_lengths().tolist(), Sizes.from_batch(batch, share_prompts=False)
    parts = [part.tolist() for part in batch.loss_mask.split(lengths)]
    for part, cost in zip(parts, sizes.costs(SHAPE), strict=True):
        counted = 0
        for place, has_loss in enumerate(part):
            counted += SHAPE.layers * SHAPE.layer_weights + SHAPE.embedding * has_loss
            counted += SHAPE.layers * SHAPE.query_width * (2 * place + 1)  # the square, token by token
        assert cost == counted
    assert sizes.costs(None) == lengths
    assert batch.loss_lengths().tolist() == [*map(sum, parts)]
    everywhere = Sizes.from_batch(replace(batch, loss_mask=torch.ones_like(batch.loss_mask)), share_prompts=False)
    flops = [SHAPE.update_flops([length], num_targets=length) for length in lengths]
    assert [6.0 * cost for cost in everywhere.costs(SHAPE)] == flops


def waiting(batch: PackedBatch, ranks: int, shape: ModelShape | None) -> float:
    """Return the share of a pass in which a rank waits. `shape`: assign by cost, or if None by tokens."""
    shares = Balancer(num_ranks=ranks, max_tokens=32_768, shape=shape).assign(batch, batch.num_sequences).whole
    whole, by_rank = Sizes.from_batch(batch, share_prompts=False).costs(SHAPE), []
    for mine in shares.sequences:
        parts = micro_batches(select(batch, mine), shares.num_micro, shape)
        by_rank.append([sum(whole[mine[i]] for i in part) for part in parts])
    return float(np.max(by_rank, axis=0).sum() / np.mean(np.sum(by_rank, axis=1)) - 1)


@pytest.mark.parametrize(("mean", "longest", "sequences"), [(183, 1_024, 160), (3_000, 16_384, 320)])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_wait_less_than_one_percent(num_ranks: int, mean: float, longest: int, sequences: int) -> None:
    batch = drawn_batch(np.random.default_rng(num_ranks), sequences, mean=mean, longest=longest)
    by_cost, by_tokens = (waiting(batch, num_ranks, shape) for shape in (SHAPE, None))
    assert by_cost <= 0.01
    assert by_cost <= by_tokens


def test_one_rank_is_cut_by_tokens() -> None:
    batch = drawn_batch(np.random.default_rng(0), 40, mean=400, longest=2_048)
    found = [Balancer(num_ranks=1, max_tokens=2_048, shape=shape).assign(batch, 40).whole for shape in (SHAPE, None)]
    assert found[0] == found[1]
    assert found[0].num_micro > 3
    batch = answers([(1, (length,)) for length in (100, 1, 1, 1)])
    assert Balancer(num_ranks=2, max_tokens=50, shape=None).assign(batch, 4).whole.num_micro == 2, "by the slowest rank"


def most_tokens(batch: PackedBatch, shares: RankShares, dealer: Balancer) -> int:
    """Return the most tokens of a micro-batch with several sequences, if cut by cost or by tokens."""
    found = 0
    for mine in shares.sequences:
        own = select(batch, mine)
        for shape in (dealer.shape if dealer.num_ranks > 1 else None, None):
            for part in micro_batches(own, shares.num_micro, shape, share_prompts=dealer.share_prompts):
                tokens = Sizes.from_batch(select(own, part), share_prompts=dealer.share_prompts).num_computed()
                found = max(found, tokens if len(part) > 1 else 0)
    return found


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_pass_keeps_shares_of_optimizer_steps(num_ranks: int, share_prompts: bool) -> None:
    """Each mini-batch is assigned as it would be alone, and a pass over all mini-batches is within the budget."""
    batch = drawn_batch(np.random.default_rng(3), 48, mean=400, longest=2_048)
    dealer = Balancer(num_ranks, 2_048, SHAPE, share_prompts)
    found = dealer.assign(batch, 4)
    sizes = Sizes.from_batch(batch, share_prompts=share_prompts)
    for number, shares in enumerate(found.mini_batches):
        assert shares == dealer.shares(batch, sizes, range(16 * number, 16 * (number + 1)))
    for rank, mine in enumerate(found.whole.sequences):
        assert mine == tuple(i for shares in found.mini_batches for i in shares.sequences[rank])
    assert found.num_shared == batch.num_tokens - sizes.num_computed()
    everything = dealer.shares(batch, sizes, range(48))
    assert dealer.assign(batch, 12).whole == everything
    assert max(most_tokens(batch, shares, dealer) for shares in (found.whole, everything)) <= 2_048


def test_separated_responses_count_their_prompt() -> None:
    """Three prompts on two ranks: responses are assigned as if none shared a prompt, within the same budget."""
    batch = answers([(300, (90, 10, 20, 80)), (300, (30, 70, 40, 60)), (300, (50, 10, 90, 20))])
    dealer = Balancer(2, 700, SHAPE, share_prompts=True)
    shares = dealer.assign(batch, 12).whole
    assert shares.sequences == replace(dealer, share_prompts=False).assign(batch, 12).whole.sequences
    assert most_tokens(batch, shares, dealer) <= 700


def test_select_neighbors_without_copy() -> None:
    batch = drawn_batch(np.random.default_rng(2), 12, mean=20, longest=60)
    assert select(batch, range(12)) is batch
    chosen = select(batch, [4, 5, 6])
    assert chosen.token_ids.data_ptr() == batch.token_ids[int(batch.cu_seqlens[4]) :].data_ptr()
    back = select(select(batch, [6, 4, 5]), [1, 2, 0])
    for field in fields(chosen):
        assert torch.equal(getattr(chosen, field.name), getattr(back, field.name)), field.name


def test_mini_batches_hold_whole_groups_in_order() -> None:
    cuts = {3: [[0, 2, 1, 4, 3], [5]], 1: [[0, 2], [1, 4], [3], [5]], 9: [[0, 2, 1, 4, 3, 5]]}
    assert {size: mini_batches(torch.tensor([3, 1, 3, 2, 1, 0]), size) for size in cuts} == cuts


def test_too_few_prompts_are_cut_by_response() -> None:
    """Five prompts with two answers each compute 25 tokens, 5 a prompt: in 6 parts none may hold more than 5."""
    batch = answers([(2, (1, 1))] * 5)
    assert Sizes.from_batch(batch, share_prompts=True).num_computed() == 25
    assert sorted(micro_batches(batch, 5, share_prompts=True)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert micro_batches(answers([(10, (1, 1, 1, 1))]), 2, share_prompts=True) == [[0], [1, 2, 3]]
    alone = micro_batches(batch, 6, share_prompts=True)
    assert sorted(map(len, alone)) == [1, 1, 2, 2, 2, 2]
    assert sorted(index for part in alone for index in part) == [*range(10)]


def test_shared_prompt_is_counted_once() -> None:
    batch = answers([(4, (2, 3)), (3, (1,))])
    sizes = Sizes.from_batch(batch, share_prompts=True)
    assert (sizes.lengths.tolist(), sizes.targets.tolist(), sizes.shared.tolist()) == ([6, 7, 4], [2, 3, 1], [0, 3, 0])
    assert sizes.costs(None) == [6, 4, 4]
    assert sizes.without_sharing().costs(None) == [6, 7, 4]
    own, shared = sizes.without_sharing().costs(SHAPE), sizes.costs(SHAPE)
    assert [a - b for a, b in zip(own, shared, strict=True)] == [0, 3 * SHAPE.layers * SHAPE.layer_weights, 0]
    assert Sizes.from_batch(batch, share_prompts=False).shared.tolist() == [0, 0, 0]


def naive_bins(lengths: list[int], budget: int) -> int:
    """Martello and Toth's second bound, one threshold after the other."""
    held, found = [min(length, budget) for length in lengths], 1
    for least in {0, *(length for length in held if 2 * length <= budget)}:
        alone = [length for length in held if length > budget - least]
        large = [length for length in held if 2 * length > budget and length <= budget - least]
        small = [length for length in held if least <= length and 2 * length <= budget]
        room = len(large) * budget - sum(large)
        found = max(found, len(alone) + len(large) + max(0, -(-(sum(small) - room) // budget)))
    return found


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 24))
def test_bin_bound_equals_naive_twin(lengths: list[int], budget: int) -> None:
    assert balance._fewest_bins(lengths, budget) == naive_bins(lengths, budget)


def test_partition_is_pinned() -> None:
    lengths = [900, 20, 35, 410, 33, 33, 120, 77, 260, 14, 500, 61]
    assert partition(lengths, 3) == [[0], [1, 3, 4, 8, 11], [2, 5, 6, 7, 9, 10]]
    assert partition(lengths, 3, equal_counts=True) == [[0, 1, 5, 9], [2, 3, 4, 8], [6, 7, 10, 11]]
    assert partition(lengths, 4, equal_counts=True) == [[0, 1, 9], [4, 10, 11], [3, 5, 7], [2, 6, 8]]
    near = [147, 771, 242, 816, 235, 72, 472, 105, 302, 644, 416, 283, 69, 192, 95, 764, 352, 473, 605, 306, 129, 183]
    assert partition([*near, 183, 101], 4, equal_counts=True) == [
        [9, 13, 14, 16, 18, 23], [1, 2, 6, 12, 19, 20], [0, 3, 4, 5, 8, 10], [7, 11, 15, 17, 21, 22]
    ], "exchanges end where the heaviest part is a thousandth over the mean"  # fmt: skip
    assert partition([5] * 6, 3) == [[1, 3], [2, 4], [0, 5]]
    assert partition([3, 1, 2], 1) == [[0, 1, 2]]


def test_partition_error_names_numbers() -> None:
    cannot = "cannot cut 3 sequences into {} non-empty parts"
    for number, rule in ((0, cannot), (4, cannot), (2, "{} parts of equal count do not divide 3 sequences")):
        with pytest.raises(ValueError, match=f"^{rule.format(number)}$"):
            partition([3, 2, 1], number, equal_counts=number == 2)


def test_equal_prompts_are_assigned_whole() -> None:
    for groups, whole in (
        ([(4, (2, 3)), (3, (1, 5)), (2, (4, 4)), (6, (1, 2))], True),
        ([(4, (90, 90)), (4, (2, 2)), (4, (2, 2)), (4, (2, 2))], True),
        ([(4, (2, 3)), (3, (1, 5)), (2, (4, 4, 1)), (6, (2,))], False),
    ):
        batch = answers(groups)
        shares = Balancer(2, 40, None, share_prompts=True).assign(batch, 4).whole.sequences
        groups_of = [[int(batch.group_ids[index]) for index in mine] for mine in shares]
        assert {len(mine) for mine in shares} == {4}
        assert not set(groups_of[0]) & set(groups_of[1]) or not whole
        by_answer = partition(batch.sequence_lengths().tolist(), 2, equal_counts=True)
        assert (shares == tuple(map(tuple, by_answer))) != whole, "by answers"
