"""Checkpoints saved by any number of gloo ranks have the same bits when any other number of ranks reads them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.checkpoint.load import load_shards
from tests.checkpoint.small import assert_same, build, save_shards, state_of, train
from tests.helpers.forked import run_side_by_side

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]


WORLD_SIZES = [pytest.param(2, marks=pytest.mark.lengthy), pytest.param(3, marks=pytest.mark.slow)]
"""Three share out unevenly, too."""


@pytest.fixture(scope="module", params=WORLD_SIZES, ids=str)
def left_by_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which one process has saved `from-one`, and the ranks have saved what `ranks.py` describes."""
    world_size = request.param
    out = tmp_path_factory.mktemp("ranks")
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    save_shards(out / "from-one", model=model, optimizer=optimizer)
    run_side_by_side(
        *(["tests.checkpoint.ranks", str(rank), str(world_size), str(out)] for rank in range(world_size)),
        timeout_s=200,
    )
    return out


def test_every_rank_writes_its_part(left_by_ranks):
    files = sorted(left_by_ranks.glob("from-ranks/*.safetensors"))
    assert len(files) == len(list(left_by_ranks.glob("read-*"))) * len({file.name[:10] for file in files})
    sizes = [file.stat().st_size for file in files]
    assert len(files) in (2, 3)
    assert max(sizes) < 1.5 * min(sizes)


def test_ranks_read_one(left_by_ranks):
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    assert_same(load_file(left_by_ranks / "read-0"), state_of(model, optimizer))


def test_one_reads_ranks_and_continues(left_by_ranks):
    expected, its_optimizer = build(seed=1)
    train(expected, its_optimizer, 2)
    model, optimizer = build(seed=9)
    load_shards(left_by_ranks / "from-ranks", model=model, optimizer=optimizer)
    assert_same(state_of(model, optimizer), state_of(expected, its_optimizer))
    train(expected, its_optimizer, 1)
    train(model, optimizer, 1)
    assert_same(state_of(model, optimizer), state_of(expected, its_optimizer))


@pytest.mark.parametrize(
    ("folder", "file"), [("trained", "trained-0"), ("from-copies", "trained-0"), ("offloaded", "offloaded-0")]
)
def test_one_reads_trained_ranks(left_by_ranks, folder, file):
    """The ranks' parameters are gathered after a pass without backward, and the moments of one run are offloaded."""
    model, optimizer = build(seed=9)
    load_shards(left_by_ranks / folder, model=model, optimizer=optimizer)
    assert_same(state_of(model, optimizer), load_file(left_by_ranks / file))


def test_ranks_read_ranks(left_by_ranks):
    assert_same(load_file(left_by_ranks / "reread-0"), load_file(left_by_ranks / "trained-0"))


@pytest.mark.lengthy
def test_eight_then_four_then_one_continue_bit_equal(tmp_path):
    """Each reads the previous one's weights and moments. The training equals one process's up to rounding."""
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    save_shards(tmp_path / "start", model=model, optimizer=optimizer)
    left = state_of(model, optimizer)
    for world_size, source, target in ((8, "start", "eight"), (4, "eight", "four")):
        rest = [str(world_size), str(tmp_path), source, target]
        run_side_by_side(*(["tests.checkpoint.ranks", str(rank), *rest] for rank in range(world_size)), timeout_s=400)
        assert_same(load_file(tmp_path / f"{target}.read-0"), left)
        left = load_file(tmp_path / f"{target}.left-0")
    again, its_optimizer = build(seed=9)
    load_shards(tmp_path / "four", model=again, optimizer=its_optimizer)
    assert_same(state_of(again, its_optimizer), left)
    train(again, its_optimizer, 1)
    train(model, optimizer, 3)
    expected = state_of(model, optimizer)
    for name, value in state_of(again, its_optimizer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_training_on_ranks_equals_training_on_one(left_by_ranks):
    model, optimizer = build(seed=1)
    train(model, optimizer, 4)
    trained = load_file(left_by_ranks / "trained-0")
    for name, value in state_of(model, optimizer).items():
        if value.is_floating_point():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=name)
