"""A rank that runs out of memory in the middle of a pass leaves nobody waiting, wherever that is."""

import json
from typing import Any

import pytest

from tests.side_by_side import run_side_by_side

PASSES = ("policy_update", "logprobs", "critic_update", "values")


GATHERED_ONCE = ("model.zero_stage=1", "model.dtype=bfloat16")  # whose gradients are added up in float32


@pytest.fixture(scope="module", params=[(), GATHERED_ONCE], ids=["zero-3", "zero-1"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each of two ranks has printed, line by line."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_side_by_side(
        *(["tests.workers.leaving_ranks", str(rank), str(folder), *request.param] for rank in range(2))
    )
    return [[json.loads(line) for line in output.splitlines() if line.startswith(("{", '"'))] for output, _ in done]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PASSES)
def test_the_numbers_are_those_of_a_pass_that_nobody_left(
    request: pytest.FixtureRequest, ranks: list[list[Any]], name: str
) -> None:
    gathers_once = "zero-1" in request.node.callspec.id
    first, last = ranks[0][0][name], ranks[1][0][name]
    assert first["collectives"] == last["collectives"] >= 1 + 2 * 2, "the whole once, two layers of each micro-batch"
    for rank in (first, last):
        assert len(rank["differences"]) == first["collectives"] + 5
        assert max(rank["differences"]) <= (1e-3 if gathers_once else 1e-6), "rounding of another cut"
    alone = first["collectives"]
    if gathers_once and name.endswith("update"):  # however many micro-batches: the whole, two layers, the critic's head
        assert alone == 2 * (4 if name == "critic_update" else 3)
    assert first["redone"] == [0] * alone + [1, 1, 1, 1, 1]
    assert last["redone"] == [1] * alone + [0, 1, 1, 1, 1]


@pytest.mark.multiprocess
def test_an_engine_gets_the_exact_weights_and_those_gathered_for_a_pass_where_they_are_of_its_type(
    request: pytest.FixtureRequest, ranks: list[list[Any]]
) -> None:
    gathers_once = "zero-1" in request.node.callspec.id  # it computes in bfloat16
    for of_rank in ranks:
        assert of_rank[0]["handed_over"] == [[False, True], [gathers_once, True]]
        assert not of_rank[0]["adapters_whole"], "in bfloat16: they are merged from float32"


@pytest.mark.multiprocess
def test_a_single_sequence_that_does_not_fit_one_rank_is_told_on_all(ranks: list[list[Any]]) -> None:
    first, last = ranks[0][0]["told"], ranks[1][0]["told"]
    assert first.startswith("DeviceMemoryError: the policy's update ran out of memory with one sequence in each")
    assert "another rank" in first
    assert "max_tokens_per_micro_batch" in first
    assert last.startswith("DeviceMemoryError: the policy's update ran out of memory with one sequence in each")
    assert "allocate" in last


@pytest.mark.multiprocess
def test_a_rank_that_cannot_even_make_up_for_the_rest_says_so(ranks: list[list[Any]]) -> None:
    first, last = ranks[0][1], ranks[1][1]
    assert "cannot take part in the rest of the pass" in last
    assert "rollout.memory_share" in last
    assert first.startswith("RuntimeError"), "gloo tells that the other is gone"
