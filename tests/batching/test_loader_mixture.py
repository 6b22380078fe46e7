"""Several datasets in one endless order, by weight."""

from collections import Counter

import pytest

from rlcore.batching.loader import BLOCK, MixedStream
from rlcore.errors import DataError
from rlcore.types import Prompt


def part(name, size):
    return [Prompt(index, (index,), name, "{}") for index in range(size)]


SIZES, WEIGHTS = {"a": 50, "b": 7, "c": 900}, (0.1, 3.0, 1.7)
PARTS = [part(name, size) for name, size in SIZES.items()]


def drawn(position, count, seed=1, weights=WEIGHTS):
    return [(p.data_source, p.prompt_id) for p in MixedStream(PARTS, weights, seed=seed).take(position, count)]


def test_shares_are_those_of_the_weights_to_one_prompt_however_long_the_run():
    total = sum(WEIGHTS)
    for blocks in (1, 2, 7):
        counts = Counter(name for name, _ in drawn(0, blocks * BLOCK))
        for name, weight in zip(SIZES, WEIGHTS, strict=True):
            assert abs(counts[name] - blocks * BLOCK * weight / total) <= 1
    far = Counter(name for name, _ in drawn(1_000_000 * BLOCK, BLOCK))
    assert all(abs(far[name] - BLOCK * weight / total) <= 2 for name, weight in zip(SIZES, WEIGHTS, strict=True))


def test_each_part_goes_through_its_own_epochs():
    found = drawn(0, 6 * BLOCK)
    for name, size in SIZES.items():
        mine = [index for source, index in found if source == name]
        for start in range(0, len(mine) - size, size):
            assert sorted(mine[start : start + size]) == list(range(size))


def test_a_position_gives_the_same_prompts_whatever_was_asked_before():
    whole = drawn(0, 3 * BLOCK)
    for position in (0, 1, 500, BLOCK - 3, BLOCK, 2 * BLOCK + 17):
        assert drawn(position, 40) == whole[position : position + 40]
    stream = MixedStream(PARTS, WEIGHTS, seed=1)
    for position, count in ((2_000, 5), (3, 1_100), (0, 4)):
        assert [(p.data_source, p.prompt_id) for p in stream.take(position, count)] == whole[
            position : position + count
        ]


def test_the_seed_and_the_weights_change_the_order():
    assert drawn(0, 50) != drawn(0, 50, seed=2)
    assert drawn(0, 50) != drawn(0, 50, weights=(1.0, 1.0, 1.0))
    assert drawn(0, BLOCK, weights=(0.2, 6.0, 3.4)) == drawn(0, BLOCK)  # only the ratios count


def test_equal_parts_have_orders_of_their_own():
    found = MixedStream([part("a", 100), part("b", 100)], (1.0, 1.0), seed=1).take(0, 200)
    orders = [[p.prompt_id for p in found if p.data_source == name][:90] for name in "ab"]
    assert orders[0] != orders[1]


def test_an_epoch_is_as_many_prompts_as_there_are():
    stream = MixedStream(PARTS, WEIGHTS, seed=1)
    assert len(stream) == 957
    assert [stream.epoch_at(position) for position in (0, 956, 957, 2_000)] == [0, 0, 1, 2]


def test_a_weight_too_small_to_be_kept_is_refused():
    with pytest.raises(DataError) as caught:
        MixedStream(PARTS, (2.047, 0.001, 0.001), seed=1)
    assert str(caught.value) == (
        "data.parts: entry 1: weight must be at least a 1024th of the sum of all weights (0.00200098), got 0.001; "
        "raise it, or leave the dataset out"
    )


def test_the_least_weight_is_worth_one_prompt_of_a_block() -> None:
    found = drawn(0, 2 * BLOCK, weights=(1.0, 1.0, 1_022.0))
    assert Counter(name for name, _ in found) == {"a": 2, "b": 2, "c": 2_044}
