"""Counts of right answers, weights by them, and draws by the weights, beside naive twins."""

import math
from collections import Counter

import numpy as np
import pytest

from rlcore.batching.loader import WEIGHTED_SEED, MixedStream, PromptStream
from rlcore.batching.pass_counts import PassCounts, RowSampler, weighted_order
from rlcore.config import PassRatesConfig
from rlcore.errors import CheckpointError
from rlcore.types import Prompt

BAND = PassRatesConfig(draw="band", band=(0.25, 0.75), rest_weight=0.1, fade=0.5)
INFORMATIVE = PassRatesConfig(draw="informative")
# passes, samples: never, always, half, one of four, three of four, nearly always, not known
ROWS = [(0, 4), (4, 4), (2, 4), (1, 4), (3, 4), (15, 16), (0, 0)]
COUNTS = PassCounts.of(*zip(*ROWS, strict=True))
PROMPTS = [Prompt(100 + index, (index,), "countdown", "{}") for index in range(len(ROWS))]


def naive_weight(passes: float, samples: float, settings: PassRatesConfig) -> float:
    if settings.draw == "informative":
        p = (passes + 0.5) / (samples + 1)
        return 4 * p * (1 - p)
    low, high = settings.band
    return 1.0 if samples == 0 or low <= passes / samples <= high else settings.rest_weight


def naive_order(weights: list[float], seed: tuple[int, ...]) -> list[int]:
    """The key of each row by itself, the largest first."""
    uniform = np.random.default_rng(seed).random(len(weights))
    keys = {row: math.log(1 - float(u)) / w for row, (u, w) in enumerate(zip(uniform, weights, strict=True))}
    return sorted(keys, key=lambda row: -keys[row])


@pytest.mark.parametrize("settings", [BAND, INFORMATIVE])
def test_weights_are_those_of_the_twin(settings: PassRatesConfig) -> None:
    expected = [naive_weight(*row, settings) for row in ROWS]
    np.testing.assert_allclose(COUNTS.weights(settings), expected, rtol=1e-12)
    assert min(expected) > 0


def test_groups_are_added_as_the_twin_adds_them_and_an_unscored_one_changes_nothing() -> None:
    groups = {0: (3, 8), 1: (0, 1), 3: (0, 2), 5: (0, 0), 6: (1, 8)}
    expected = [
        (fade * c + k, fade * s + n)
        for row, (c, s) in enumerate(ROWS)
        for k, n in (groups.get(row, (0, 0)),)
        for fade in (0.5 if n else 1.0,)
    ]
    rows = RowSampler([prompt.prompt_id for prompt in PROMPTS], COUNTS, BAND)
    text, _ = rows.update(COUNTS.text(), {PROMPTS[row].prompt_id: found for row, found in groups.items()})
    after = PassCounts.read(text, len(ROWS))
    assert list(zip(after.passes.tolist(), after.samples.tolist(), strict=True)) == expected
    assert COUNTS.samples.tolist() == [samples for _, samples in ROWS], "the counts before are as they were"
    assert rows.update("", {})[0] == COUNTS.text()


def test_a_retired_row_is_revived_by_answers_that_bring_it_back() -> None:
    rows = RowSampler([prompt.prompt_id for prompt in PROMPTS], COUNTS, BAND)
    retired, back = {102: (8, 8), 103: (0, 8)}, {100: (6, 8)}
    after, metrics = rows.update("", retired)
    assert (metrics["pass_rates/rows_retired"], metrics["pass_rates/rows_revived"]) == (2, 0)
    text, metrics = rows.update(after, back)
    assert (metrics["pass_rates/rows_retired"], metrics["pass_rates/rows_revived"]) == (0, 1)
    assert metrics["pass_rates/retired_share"] == 4 / 7
    again = PassCounts.read(text, len(ROWS))
    rates = [c / s for c, s in zip(again.passes.tolist(), again.samples.tolist(), strict=True) if s]
    assert metrics["pass_rates/mean"] == pytest.approx(sum(rates) / len(rates))


def test_counts_come_back_bit_for_bit_and_only_for_as_many_rows() -> None:
    counts = COUNTS.update(np.arange(7), np.arange(7), np.full(7, 9), 0.3)
    read = PassCounts.read(counts.text(), 7)
    assert read.passes.tobytes() == counts.passes.tobytes()
    assert read.samples.tobytes() == counts.samples.tobytes()
    with pytest.raises(CheckpointError, match="7 training rows, and there are 8"):
        PassCounts.read(counts.text(), 8)


@pytest.mark.parametrize("settings", [BAND, INFORMATIVE])
def test_a_weighed_stream_draws_what_the_twin_draws(settings: PassRatesConfig) -> None:
    weights = COUNTS.weights(settings)
    stream = PromptStream(PROMPTS, seed=3)
    stream.set_weights(weights)
    drawn = [*stream.take(20, 4), *stream.take(24, 6)]  # a refill goes on in the same order, and beyond its end
    expected = naive_order(weights.tolist(), (WEIGHTED_SEED, 3, 20, 0))
    expected += naive_order(weights.tolist(), (WEIGHTED_SEED, 3, 20, 1))[:3]
    assert [prompt.prompt_id - 100 for prompt in drawn] == expected
    assert sorted(expected[:7]) == list(range(7)), "no row comes twice before all were drawn"
    again = PromptStream(PROMPTS, seed=3)
    again.take(0, 5)
    again.set_weights(weights)
    assert [*again.take(20, 10)] == drawn, "what was drawn before does not matter"
    again.set_weights(weights)
    assert [*again.take(30, 10)] != drawn


def test_the_order_of_weighted_draws_is_pinned() -> None:
    """A run that goes on with another version must draw what it would have drawn."""
    for part, order in (
        (None, [4, 6, 2, 3, 0, 5, 1, 3, 4, 6, 2, 1, 5, 0]),
        (0, [6, 0, 3, 2, 4, 1, 5, 4, 2, 3, 6, 5, 1, 0]),
    ):
        stream = PromptStream(PROMPTS, seed=3, part=part)
        stream.set_weights(COUNTS.weights(BAND))
        assert [prompt.prompt_id - 100 for prompt in stream.take(20, 14)] == order


def test_first_draws_have_the_shares_of_the_weights() -> None:
    weights, rng, number = np.array([1.0, 0.5, 0.25, 0.05]), np.random.default_rng(5), 20_000
    orders = [weighted_order(weights, rng)[:2].tolist() for _ in range(number)]
    first = Counter(order[0] for order in orders)
    second = Counter(order[1] for order in orders if order[0] == 0)
    for found, left in ((first, [0, 1, 2, 3]), (second, [1, 2, 3])):
        total = sum(found.values())
        for row in left:
            p = weights[row] / weights[left].sum()
            assert abs(found[row] / total - p) < 4 * math.sqrt(p * (1 - p) / total)


def test_a_mixture_keeps_its_shares_and_draws_each_part_by_its_own_weights() -> None:
    second, third = ([Prompt(first + index, (index,), "other", "{}") for index in range(3)] for first in (200, 300))
    stream = MixedStream([PROMPTS, second, third], [2.0, 1.0, 1.0], seed=2)
    stream.set_weights(np.concatenate([COUNTS.weights(BAND), [1.0, 1.0, 1.0], [0.5, 1.0, 0.1]]))
    drawn = [prompt.prompt_id for prompt in stream.take(0, 1_024)]
    assert Counter(row // 100 for row in drawn) == {1: 512, 2: 256, 3: 256}
    first, last = ([row % 100 for row in drawn if row // 100 == part] for part in (1, 3))
    assert first[:7] == naive_order([naive_weight(*row, BAND) for row in ROWS], (WEIGHTED_SEED, 2, 1, 0, 0))
    assert last[:3] == naive_order([0.5, 1.0, 0.1], (WEIGHTED_SEED, 2, 3, 0, 0))
