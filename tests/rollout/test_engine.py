"""Requests and their seeds, complete weight syncs, the placeholder engine, and the tail cut.

A gloo rank of the tail cut is `python -m tests.rollout.test_engine RANK WORLD_SIZE FILE`. FILE has the groups of each
rank, each with the lengths of its responses. Each rank prints its bounds as JSON.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.config import RunConfig, SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import (
    ROUND_TOKENS,
    NoEngine,
    TailCut,
    WeightSyncResult,
    engine_dtype,
    make_requests,
    require_all_weights,
    response_seed,
)
from rlcore.rollout.hf import build_engine
from rlcore.types import Prompt
from rlcore.workers.device import join_ranks
from tests.helpers.forked import run_side_by_side

CPU = torch.device("cpu")
PROMPTS = [Prompt(index, (3, 4 + index), "countdown", "{}") for index in range(2)]


def test_responses_to_a_prompt_share_environment_seed() -> None:
    found = make_requests(PROMPTS, 2, run_seed=5, stream=2, step=7, first_group=3)
    assert [(one.prompt.prompt_id, one.sample_index) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.seed for one in found] == [
        response_seed(5, 2, 7, group, sample) for group in (3, 4) for sample in (0, 1)
    ]
    shared = [response_seed(5, 2, 7, group, 2**32 - 1) for group in (3, 3, 4, 4)]
    assert [one.environment_seed for one in found] == shared
    other = make_requests(PROMPTS, 2, run_seed=6, stream=2, step=7, first_group=3, episode_seed=5)
    assert [one.environment_seed for one in other] == shared, "another run on the same episodes"
    assert {one.seed for one in other}.isdisjoint(one.seed for one in found)
    assert [one.seed for one in make_requests(PROMPTS, 1, run_seed=5, stream=2, step=7)] == [
        response_seed(5, 2, 7, group, 0) for group in (0, 1)
    ]


def sent(*names: str) -> list[tuple[str, Tensor]]:
    return [(name, torch.zeros(1)) for name in names]


def test_weight_sync_must_be_complete() -> None:
    assert [name for name, _ in require_all_weights(sent("b", "a"), ["a", "b"])] == ["b", "a"]
    with pytest.raises(EngineError) as caught:
        list(require_all_weights(sent("b"), ["d", "b", "c"]))
    assert str(caught.value) == "weight sync: 2 parameters were not sent, first 'c'"
    with pytest.raises(EngineError) as caught:
        list(require_all_weights(sent("x"), ["a"]))
    assert str(caught.value) == "weight sync: the engine has no parameter 'x'"


@pytest.mark.parametrize(
    ("dtype", "found"), [("auto", torch.float16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_engine_dtype(dtype: str, found: torch.dtype) -> None:
    assert engine_dtype(RunConfig.model_validate({"rollout": {"dtype": dtype}}), torch.float16) == found


def test_no_engine_gathers_weights_and_generates_nothing() -> None:
    config = RunConfig.model_validate({"rollout": {"engine": "none"}})
    engine = build_engine(config, "nowhere", device=CPU, dtype=torch.float32)
    assert isinstance(engine, NoEngine)
    assert engine.policy_version == -1
    passed: list[int] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            passed.append(number)
            yield str(number), torch.zeros(1)

    assert engine.update_weights(weights(), 4) == WeightSyncResult((), ())
    assert (passed, engine.policy_version) == ([0, 1, 2], 4)
    engine.sleep()
    engine.close()
    with pytest.raises(EngineError) as caught:
        engine.generate(make_requests(PROMPTS, 1, run_seed=1, stream=1, step=1), SamplingConfig(), 4)
    assert str(caught.value) == "rollout.engine: is none, so these workers generate no responses"


LONGEST = 300


def naive_cut(groups: list[list[int]], wanted: int) -> int:
    """Return the length at which so many groups are finished, token by token."""
    for length in range(1, LONGEST + 1):
        if sum(all(each <= length for each in lengths) for lengths in groups) >= wanted:
            return length
    raise AssertionError("more groups are wanted than there are")


def random_groups(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [rng.geometric(0.01, size=3).clip(1, LONGEST).tolist() for _ in range(count)]


def generate(groups: dict[int, list[int]], wanted: int, *, world_size: int = 1) -> list[int]:
    """Return the bound after each round, until all ranks have finished. Negative groups must finish. In a round, each
    response gets 16 tokens."""
    names = [group for group, lengths in groups.items() for _ in lengths]
    cut = TailCut(names, wanted, LONGEST, world_size, CPU)
    places = [(group, sample, length) for group, lengths in groups.items() for sample, length in enumerate(lengths)]
    written, bounds, busy = 0, [cut.bound], True
    while busy:
        written += ROUND_TOKENS
        for group, sample, length in places:
            if length <= written and (group < 0 or length <= bounds[-1]):
                cut.end(group, sample, length)
        mine = any(length > written and (group < 0 or bounds[-1] > written) for group, _, length in places)
        busy = cut.agree(busy=mine)
        bounds.append(cut.bound)
    return bounds


def test_bound_never_falls_below_the_cut() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        groups = random_groups(rng, 12)
        wanted = int(rng.integers(1, 13))
        bounds = generate({-1: [250], **dict(enumerate(groups))}, wanted)
        assert bounds == sorted(bounds, reverse=True)
        assert bounds[0] == LONGEST
        assert bounds[-1] == naive_cut(groups, wanted)


def test_responses_end_within_a_round_of_the_cut() -> None:
    bounds = generate({0: [20, 3], 1: [40, 40], 2: [290, 1]}, 2)
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
    file.write_text(json.dumps({"ranks": ranks, "wanted": 9}))
    outputs = run_side_by_side(*(["tests.rollout.test_engine", str(rank), "2", str(file)] for rank in range(2)))
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert first == second
    assert first[-1] == naive_cut(groups, 9)


if __name__ == "__main__":
    rank, world_size, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join_ranks(f"file://{file}.met", rank=rank, world_size=world_size, device=CPU)
    given = json.loads(file.read_text())
    own = {int(group): lengths for group, lengths in given["ranks"][rank].items()}
    print(json.dumps(generate(own, given["wanted"], world_size=world_size)))
