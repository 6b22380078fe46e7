"""A save that meets two faults: what is no full disk is not taken for one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.checkpoint.background import BackgroundWriter
from rlcore.checkpoint.shards import HostCopy, copy_shards, num_shard_bytes
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import CheckpointConfig
from rlcore.errors import DiskSpaceError, StopRequestedError, WorkerLostError
from rlcore.run import room
from rlcore.run.saver import Saver
from rlcore.workers.worker import SaveSize
from tests.checkpoint.small import build, train
from tests.checkpoint.test_store import SETTINGS, state_at
from tests.storage.small_disk import fill, small_disk

__all__ = ["small_disk"]


class Rank:
    """One rank with a real model and writer. The disk gets full as it begins to write; then it can be lost."""

    world_size = 1

    def __init__(self, disk: Path, *, fills_the_disk: bool = True) -> None:
        self.model, self.optimizer = build(seed=1)
        train(self.model, self.optimizer, 1)
        self.writer = BackgroundWriter()
        self.copies: tuple[HostCopy, ...] = ()
        self.disk, self.fills_the_disk = disk, fills_the_disk
        self.is_lost = False

    def each(self, verb: Callable[..., Any], *arguments: Any) -> list[Any]:
        if self.is_lost:
            raise WorkerLostError("a worker actor died")
        return [getattr(self, verb.__name__)(*arguments)]

    def copy_for_save(self) -> SaveSize:
        self.copies = (copy_shards(Path("policy"), model=self.model, optimizer=self.optimizer),)
        return SaveSize(num_shard_bytes(self.model, self.optimizer), is_copied=True)

    def write_copy(self, directory: str) -> None:
        if self.fills_the_disk:
            fill(self.disk, leave_bytes=50_000)
        (copy,) = self.copies
        self.writer.start([HostCopy(Path(directory) / "policy", copy.parts, copy.optimizer, 0, 1)])

    def copy_is_written(self) -> bool:
        return self.writer.is_done()

    def wait_for_copy(self) -> None:
        self.writer.finish()

    def give_up_copy(self) -> None:
        self.writer.give_up()

    def drop_copy(self) -> None:
        self.copies = ()


def test_a_rank_that_is_lost_while_the_run_waits_for_room_is_a_lost_rank(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "POLL_S", 0.01)
    config = CheckpointConfig(reserve_gb=0, wait_for_room_s=20)
    store, rank, told = CheckpointStore(small_disk / "checkpoints", config, SETTINGS), Rank(small_disk), []

    def happened(name: str, step: int, data: object) -> None:
        told.append(name)
        (small_disk / "ballast").unlink()
        rank.is_lost = True

    pausing = room.Room(config, happened=happened, stop=lambda: False, prune=lambda: None)
    saver = Saver(store, pausing, lambda step: None)
    assert saver.begin(1, lambda: state_at(1), {}, rank) is None  # type: ignore[arg-type]
    with pytest.raises(WorkerLostError):
        saver.settle()
    assert told == ["paused_for_disk"]
    assert not list(store.directory.glob(".tmp-*"))


def test_a_copy_of_the_weights_is_let_go_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    config = CheckpointConfig(reserve_gb=0)
    store, rank = CheckpointStore(tmp_path / "checkpoints", config, SETTINGS), Rank(tmp_path, fills_the_disk=False)
    pausing = room.Room(config, happened=lambda *_: None, stop=lambda: False, prune=lambda: None)
    saver = Saver(store, pausing, lambda step: None)
    assert saver.begin(1, lambda: state_at(1), {}, rank) is None  # type: ignore[arg-type]
    assert rank.copies
    saved = saver.settle()
    assert saved is not None
    assert saved.step == 1
    assert rank.copies == ()


def test_a_pause_tells_the_bytes_that_the_write_wanted(tmp_path: Path) -> None:
    """Also where the file system had room and the write failed all the same: under a quota."""
    told: list[Any] = []
    config = CheckpointConfig(reserve_gb=0)
    pausing = room.Room(config, happened=lambda *one: told.append(one), stop=lambda: bool(told), prune=lambda: None)

    def write() -> None:
        raise DiskSpaceError("the quota is used up")

    with pytest.raises(StopRequestedError):
        pausing.hold(write, step=3, path=tmp_path, needed_bytes=5_000)
    (name, step, data), *_ = told
    assert (name, step, data["needed_bytes"]) == ("paused_for_disk", 3, 5_000)
