"""Saving in the background: the state of the moment it was asked for, and no error lost."""

import time
from pathlib import Path

import pytest
import torch

from rlcore.checkpoint.background import BackgroundCommit, BackgroundWriter
from rlcore.checkpoint.host import HostBuffers
from rlcore.checkpoint.shards import copy_shards, load_shards
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import CheckpointConfig
from rlcore.errors import CheckpointError, DiskSpaceError, RunInUseError
from tests.checkpoint.small import SmallModel, assert_same, build, state_of, train
from tests.checkpoint.test_store import SETTINGS, save, state_at, steps
from tests.storage.small_disk import fill


class Rank:
    """A model and its background writer, as a worker holds them."""

    def __init__(self) -> None:
        self.model, self.optimizer = build(seed=1)
        self.writer = BackgroundWriter()

    def begin(self, folder: Path) -> None:
        self.writer.start([copy_shards(folder / "policy", model=self.model, optimizer=self.optimizer)])


def parts(folder: Path) -> tuple[Rank, CheckpointStore, BackgroundCommit]:
    rank = Rank()
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(), SETTINGS)
    return rank, store, BackgroundCommit(store, rank.writer.is_done)


def until_published(commit: BackgroundCommit) -> Path:
    while (path := commit.poll()) is None:
        time.sleep(0.005)
    return path


def loaded(path: Path) -> tuple[SmallModel, object]:
    model, optimizer = build(seed=5)
    load_shards(path / "policy", model=model, optimizer=optimizer)
    return model, optimizer


def test_a_copy_is_of_the_moment_it_was_taken(tmp_path):
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    expected = state_of(model, optimizer)
    copy = copy_shards(tmp_path / "policy", model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 7.0
    copy.write()
    assert_same(state_of(*loaded(tmp_path)), expected)


@pytest.mark.parametrize("ending", ["poll", "finish"])
def test_training_goes_on_while_it_is_written(tmp_path, ending):
    rank, store, commit = parts(tmp_path)
    for step in (1, 2):
        train(rank.model, rank.optimizer, 1)
        expected = state_of(rank.model, rank.optimizer)
        commit.start(state_at(step), {}, rank.begin)
        assert commit.is_under_way
        train(rank.model, rank.optimizer, 1)
        path = until_published(commit) if ending == "poll" else commit.finish(rank.writer.finish)
        assert path == store.path_of(step)
        assert not commit.is_under_way
        assert commit.poll() is None, "told once"
        newest = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(), SETTINGS).latest()
        assert newest is not None
        assert newest.path == path
        assert_same(state_of(*loaded(path)), expected)


def test_nothing_is_under_way_before_the_first(tmp_path):
    rank, _, commit = parts(tmp_path)
    assert commit.poll() is None
    assert commit.finish(rank.writer.finish) is None
    commit.abandon()


@pytest.mark.parametrize("ending", ["poll", "finish"])
def test_a_full_disk_surfaces_at_the_next_call_and_leaves_nothing(small_disk, ending):
    rank, store, commit = parts(small_disk)
    save(store, 1)
    ballast = fill(small_disk, leave_bytes=50_000)
    commit.start(state_at(2), {}, rank.begin)
    with pytest.raises(DiskSpaceError, match=r"policy/rank-00000.*no room"):
        until_published(commit) if ending == "poll" else commit.finish(rank.writer.finish)
    assert not commit.is_under_way
    assert steps(store) == [1]
    assert not list((small_disk / "checkpoints").glob(".tmp-*"))
    ballast.unlink()
    commit.start(state_at(2), {}, rank.begin)
    assert until_published(commit) == store.path_of(2)


def test_a_full_disk_during_the_publishing_surfaces_too(small_disk):
    """The shards find room, the manifest does not."""
    rank, store, commit = parts(small_disk)
    commit.start(state_at(1), {}, rank.begin)
    rank.writer.finish()
    fill(small_disk)
    with pytest.raises(DiskSpaceError, match="step-000001: no room"):
        until_published(commit)
    assert steps(store) == []
    assert not list((small_disk / "checkpoints").glob(".tmp-*"))


def _no_rank(folder: Path) -> None:
    raise CheckpointError("a rank cannot copy")


@pytest.mark.parametrize("fail", ["begin", "abandon"])
def test_what_is_given_up_leaves_nothing_and_frees_the_folder(tmp_path, fail):
    rank, store, commit = parts(tmp_path)
    if fail == "begin":
        with pytest.raises(CheckpointError, match="a rank cannot copy"):
            commit.start(state_at(1), {}, _no_rank)
    else:
        commit.start(state_at(1), {}, rank.begin)
        with pytest.raises(RunInUseError):
            save(store, 2)
        rank.writer.finish()
        commit.abandon()
    assert not commit.is_under_way
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
    save(store, 2)
    assert steps(store) == [2]


def test_abandoning_while_it_is_published_waits_for_the_end(tmp_path):
    rank, store, commit = parts(tmp_path)
    commit.start(state_at(1), {}, rank.begin)
    rank.writer.finish()
    commit.poll()
    commit.abandon()
    save(store, 2)
    assert steps(store) == [1, 2]


def test_an_error_that_nobody_asked_for_comes_at_the_next_save(tmp_path):
    rank = Rank()
    rank.begin(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="cannot be made"):
        rank.begin(tmp_path)
    rank.begin(tmp_path)
    rank.writer.finish()
    assert rank.writer.is_done()


def test_two_at_a_time_are_a_mistake(tmp_path):
    rank, _, commit = parts(tmp_path)
    commit.start(state_at(1), {}, rank.begin)
    with pytest.raises(AssertionError, match="finish or abandon"):
        commit.start(state_at(2), {}, rank.begin)
    commit.finish(rank.writer.finish)


def test_memory_that_is_being_got_counts_as_held():
    buffers, shape = HostBuffers(), torch.Size((1000,))
    buffers.prepare((f"tensor-{number}", shape, torch.float32) for number in range(200))
    assert buffers.num_bytes == 200 * 4000
