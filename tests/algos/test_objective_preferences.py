"""The DPO objective of a micro-batch against a naive twin, its statistics, and its independence of the split."""

import functools
import math
import operator
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from rlcore.algos.objective import PreferenceStatistics, preference_objective
from rlcore.types import PackedBatch
from tests.algos.ragged import Rows, floats, leaf, row, train_batch

GAPPED = (False, True, True, False, True, False)
PAIRS = Rows((row(3, 4), row(3, 6), row(1, 1), row(1, 2), GAPPED, row(2, 5), row(2, 7), row(2, 3)))
"""Four pairs, one of which has a chosen response with a gap."""
PADDING = ((False,) * 3, (False,) * 4)
BETA = 0.3


def pairs_of(rows: Rows, reference: Tensor) -> PackedBatch:
    """Return the batch of pairs whose responses are neighbors in `rows`."""
    responses = train_batch(rows, reference).packed
    of_pairs = {name: getattr(responses, name)[::2] for name in ("cu_seqlens", "scores", "score_mask", "group_ids")}
    positions = torch.cat([torch.arange(length) for length in rows.cu_seqlens.diff().tolist()])
    return replace(responses, position_ids=positions, behavior_logprobs=reference, **of_pairs)


def naive(logprobs: Tensor, reference: Tensor, rows: Rows) -> list[dict[str, float]]:
    """Return the loss and the statistics of each pair, and its derivative by a chosen log-probability."""
    found = []
    answers = rows.answers()
    for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
        sums = [sum(float(logprobs[t]) for t in part) for part in (chosen, rejected)]
        rewards = [BETA * (total - sum(float(reference[t]) for t in part))
                   for total, part in zip(sums, (chosen, rejected), strict=True)]  # fmt: skip
        margin = rewards[0] - rewards[1]
        found.append({
            "loss": math.log(1 + math.exp(-margin)), "accuracy": float(margin > 0), "margin": margin,
            "chosen_reward": rewards[0], "rejected_reward": rewards[1],
            "chosen_logprob": sums[0], "rejected_logprob": sums[1],
            "slope": -BETA / (1 + math.exp(margin)),
        })  # fmt: skip
    return found


def test_loss_and_gradient_equal_naive() -> None:
    logprobs, reference = leaf(floats(PAIRS, 1, 2.0)), floats(PAIRS, 2, 2.0)
    loss, statistics = preference_objective(logprobs, pairs_of(PAIRS, reference), beta=BETA, num_pairs=5)
    expected = naive(logprobs.detach(), reference, PAIRS)
    assert {one["accuracy"] for one in expected} == {0.0, 1.0}
    assert loss.item() == pytest.approx(sum(one["loss"] for one in expected) / 5, rel=1e-12)
    means = statistics.means()
    assert means.keys() | {"slope"} == expected[0].keys()
    for name, value in means.items():
        assert value == pytest.approx(sum(one[name] for one in expected) / 4, rel=1e-12), name
    assert float(statistics.num_tokens) == sum(PAIRS.lengths())
    gradient = torch.zeros(PAIRS.mask.numel(), dtype=torch.float64)
    for number, part in enumerate(PAIRS.answers()):
        gradient[part] = expected[number // 2]["slope"] / 5 * (-1) ** number
    torch.testing.assert_close(grad(loss, logprobs)[0], gradient, rtol=1e-12, atol=0)


def test_reference_itself_gives_log_2_and_no_margin() -> None:
    logprobs = floats(PAIRS, 1, dtype=torch.float32)
    loss, statistics = preference_objective(logprobs, pairs_of(PAIRS, logprobs.clone()), beta=BETA, num_pairs=4)
    assert loss.item() == float(torch.tensor(2.0).log())
    means = statistics.means()
    assert [means[name] for name in ("margin", "chosen_reward", "rejected_reward", "accuracy")] == [0.0] * 4


def test_padding_does_not_count() -> None:
    padded = Rows((*PAIRS.marks[:4], *PADDING, *PAIRS.marks[4:]))
    logprobs, reference = floats(padded, 1), floats(padded, 2)
    loss, statistics = preference_objective(logprobs, pairs_of(padded, reference), beta=BETA, num_pairs=4)
    expected = naive(logprobs, reference, padded)
    kept = [one for number, one in enumerate(expected) if number != 2]
    assert float(statistics.num_pairs) == 4
    assert loss.item() == pytest.approx(sum(one["loss"] for one in kept) / 4, rel=1e-12)
    for name, value in statistics.means().items():
        assert value == pytest.approx(sum(one[name] for one in kept) / 4, rel=1e-12), name
    alone = Rows(PADDING)
    _, none = preference_objective(floats(alone, 1), pairs_of(alone, floats(alone, 2)), beta=BETA, num_pairs=1)
    assert none.means() == {}


@pytest.mark.parametrize("order", [*permutations(range(4))][::5])
@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 3)])
def test_shares_of_micro_batches_add_up(order: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    logprobs, reference = leaf(floats(PAIRS, 1)), floats(PAIRS, 2)
    whole, all_statistics = preference_objective(logprobs, pairs_of(PAIRS, reference), beta=BETA, num_pairs=4)
    losses, statistics = [], list[PreferenceStatistics]()
    bounds = [0, *cuts, 4]
    for start, stop in pairwise(bounds):
        part, index = PAIRS.select([each for pair in order[start:stop] for each in (2 * pair, 2 * pair + 1)])
        batch = pairs_of(part, reference[index])
        loss, found = preference_objective(logprobs[index], batch, beta=BETA, num_pairs=4)
        losses.append(loss)
        statistics.append(found)
    total = torch.stack(losses).sum()
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(grad(total, logprobs), grad(whole, logprobs), rtol=1e-12, atol=1e-15)
    summed = functools.reduce(operator.add, statistics)
    torch.testing.assert_close(summed.stack(), all_statistics.stack(), rtol=1e-12, atol=1e-12)
    assert PreferenceStatistics.unstack(summed.stack()).means() == summed.means()
