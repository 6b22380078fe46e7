"""A save that meets two faults: what is no full disk is not taken for one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.checkpoint.background import BackgroundWriter
from rlcore.checkpoint.shards import HostCopy, copy_shards, num_shard_bytes
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import CheckpointConfig
from rlcore.errors import WorkerLostError
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

    def __init__(self, disk: Path) -> None:
        self.model, self.optimizer = build(seed=1)
        train(self.model, self.optimizer, 1)
        self.writer = BackgroundWriter()
        self.copies: tuple[HostCopy, ...] = ()
        self.disk = disk
        self.is_lost = False

    def each(self, verb: Callable[..., Any], *arguments: Any) -> list[Any]:
        if self.is_lost:
            raise WorkerLostError("a worker actor died")
        return [getattr(self, verb.__name__)(*arguments)]

    def copy_for_save(self) -> SaveSize:
        self.copies = (copy_shards(Path("policy"), model=self.model, optimizer=self.optimizer),)
        return SaveSize(num_shard_bytes(self.model, self.optimizer), is_copied=True)

    def write_copy(self, directory: str) -> None:
        fill(self.disk, leave_bytes=50_000)
        (copy,) = self.copies
        self.writer.start([HostCopy(Path(directory) / "policy", copy.parts, copy.optimizer, 0, 1)])

    def wait_for_copy(self) -> None:
        self.writer.finish()

    def give_up_copy(self) -> None:
        self.writer.give_up()


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
