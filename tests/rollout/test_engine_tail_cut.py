"""The bound on which the ranks agree while they generate."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlcore.rollout.engine import ROUND_TOKENS, TailCut
from tests.helpers.forked import run_side_by_side
from tests.rollout.tail_cut_ranks import CPU, generate

LONGEST = 300


def naive_cut(groups: list[list[int]], wanted: int) -> int:
    """Return the length at which so many groups are finished, token by token."""
    for length in range(1, LONGEST + 1):
        if sum(all(each <= length for each in lengths) for lengths in groups) >= wanted:
            return length
    raise AssertionError("more groups are wanted than there are")


def random_groups(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [rng.geometric(0.01, size=3).clip(1, LONGEST).tolist() for _ in range(count)]


def test_bound_never_falls_below_the_cut() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        groups = random_groups(rng, 12)
        wanted = int(rng.integers(1, 13))
        bounds = generate({-1: [250], **dict(enumerate(groups))}, wanted, LONGEST)
        assert bounds == sorted(bounds, reverse=True)
        assert bounds[0] == LONGEST
        assert bounds[-1] == naive_cut(groups, wanted)


def test_responses_end_within_a_round_of_the_cut() -> None:
    bounds = generate({0: [20, 3], 1: [40, 40], 2: [290, 1]}, 2, LONGEST)
    assert bounds == [300, 300, 300, 40, 40], "groups 0 and 1 end in the third round, and group 2 is cut after it"


def test_repeated_ends_count_once() -> None:
    cut = TailCut([0, 0, 1, -1], 1, LONGEST, 1, CPU)
    for _ in range(2):  # a batch that ran out of memory is repeated
        cut.end(0, 1, 7)
        cut.end(-1, 0, 2)
    assert cut.agree()
    assert cut.bound == LONGEST
    cut.end(1, 0, 9)
    assert not cut.agree(busy=False)
    assert cut.bound == 9


@pytest.mark.multiprocess
@pytest.mark.parametrize("split", ["even", "one has none", "one is late"])
def test_gloo_ranks_agree(tmp_path: Path, split: str) -> None:
    groups = random_groups(np.random.default_rng(8), 12)
    ranks = {
        "even": [{i: groups[i] for i in range(0, 12, 2)}, {i: groups[i] for i in range(1, 12, 2)}],
        "one has none": [{}, dict(enumerate(groups))],
        "one is late": [dict(enumerate(groups)), {-1: [20 * ROUND_TOKENS]}],
    }[split]
    file = tmp_path / "groups.json"
    file.write_text(json.dumps({"ranks": ranks, "wanted": 9, "longest": LONGEST}))
    outputs = run_side_by_side(*(["tests.rollout.tail_cut_ranks", str(rank), "2", str(file)] for rank in range(2)))
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert first == second
    assert first[-1] == naive_cut(groups, 9)
