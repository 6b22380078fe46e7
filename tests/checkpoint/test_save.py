"""Saves concurrent with training: the state of the request, errors, abandoned saves."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.checkpoint.load import load_shards
from rlcore.checkpoint.save import CheckpointSaver, RankSaver, prune
from rlcore.checkpoint.shards import num_bytes, rank_shards
from rlcore.checkpoint.store import CheckpointStore
from rlcore.errors import CheckpointError, DiskSpaceError
from tests.checkpoint.small import SmallModel, assert_same, build, state_of, train
from tests.helpers.checkpoints import Ranks, save, state_at, steps, store_at
from tests.storage.small_disk import fill


def parts(folder: Path, full: Path | None = None) -> tuple[Ranks, CheckpointStore, CheckpointSaver]:
    store = store_at(folder)
    return Ranks(full), store, CheckpointSaver(store, lambda needed_bytes, step: None)


def begin(saver: CheckpointSaver, step: int, ranks: Ranks) -> None:
    assert saver.begin(step, lambda: state_at(step), {}, ranks.each) is None
    assert "writing shards" in saver.at


def ended(saver: CheckpointSaver, ending: str) -> int | None:
    if ending == "settle":
        return saver.settle()
    while (saved := saver.poll()) is None:
        time.sleep(0.005)
    return saved


def loaded(path: Path) -> tuple[SmallModel, object]:
    model, optimizer = build(seed=5)
    load_shards(path / "policy", model=model, optimizer=optimizer)
    return model, optimizer


def test_copy_is_independent_of_later_training(tmp_path):
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    expected = state_of(model, optimizer)
    copy = rank_shards(model, optimizer).copied({})
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 7.0
    copy.write(tmp_path / "policy")
    assert_same(state_of(*loaded(tmp_path)), expected)


@pytest.mark.parametrize("ending", ["poll", "settle"])
def test_training_continues_during_a_save(tmp_path, ending):
    ranks, _, saver = parts(tmp_path)
    for step in (1, 2):
        train(ranks.model, ranks.optimizer, 1)
        expected = state_of(ranks.model, ranks.optimizer)
        begin(saver, step, ranks)
        train(ranks.model, ranks.optimizer, 1)
        assert ended(saver, ending) == step
        assert saver.at == ""
        assert saver.poll() is None, "reported once"
        assert_same(state_of(*loaded(store_at(tmp_path).latest().path)), expected)


@pytest.mark.parametrize("ending", ["poll", "settle"])
def test_full_disk_is_raised_by_the_next_call(small_disk, ending):
    ranks, store, saver = parts(small_disk, small_disk)
    save(store, 1)
    begin(saver, 2, ranks)
    with pytest.raises(DiskSpaceError, match=r"policy/rank-00000.*no room"):
        ended(saver, ending)
    assert (saver.at, saver.settle()) == ("", None)
    assert steps(store) == [1]
    assert not list((small_disk / "checkpoints").glob(".tmp-*"))
    ranks.full = None
    (small_disk / "ballast").unlink()
    begin(saver, 2, ranks)
    assert ended(saver, ending) == 2


def test_full_disk_during_publishing_is_raised(small_disk):
    """The disk has space for the shards, but not for the manifest."""
    ranks, store, saver = parts(small_disk)
    begin(saver, 1, ranks)
    ranks.saver.is_written(wait=True)
    fill(small_disk)
    with pytest.raises(DiskSpaceError, match="step-000001: no room"):
        ended(saver, "poll")
    assert steps(store) == []
    assert not list((small_disk / "checkpoints").glob(".tmp-*"))


def refuse(*arguments: Any, **named: Any) -> None:
    raise CheckpointError("no writing here")


@pytest.mark.parametrize("fail", ["begin", "abandon"])
def test_abandoned_save_leaves_nothing(tmp_path, monkeypatch, fail):
    ranks, store, saver = parts(tmp_path)
    if fail == "begin":
        with monkeypatch.context() as patched:
            patched.setattr("rlcore.checkpoint.save.SPARE_SHARE", 1e12)  # so it is written in `begin`
            patched.setattr("rlcore.checkpoint.shards.write_parts", refuse)
            with pytest.raises(CheckpointError, match="no writing here"):
                saver.begin(1, lambda: state_at(1), {}, ranks.each)
        saver.abandon()
    else:
        begin(saver, 1, ranks)
        ranks.saver.is_written(wait=True)
        saver.abandon()
        assert saver.at == ""
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
    save(store, 2)
    assert steps(store) == [2]


def test_abandon_completes_a_publication(tmp_path):
    ranks, store, saver = parts(tmp_path)
    begin(saver, 1, ranks)
    ranks.saver.is_written(wait=True)
    saver.poll()
    saver.abandon()
    save(store, 2)
    assert steps(store) == [1, 2]


def test_error_of_a_rank_is_raised_once(tmp_path):
    ranks, store, saver = parts(tmp_path)
    begin(saver, 1, ranks)
    ranks.saver.write(str(tmp_path / "absent"))  # in place of the folder that is open
    with pytest.raises(CheckpointError, match="cannot be made"):
        saver.settle()
    assert ranks.saver.is_written(wait=False)
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
    begin(saver, 1, ranks)
    assert saver.settle() is not None
    assert steps(store) == [1]


def test_waiting_for_a_save_is_limited(tmp_path):
    ranks, store, _ = parts(tmp_path)
    limited: list[bool] = []

    @contextmanager
    def phase() -> Iterator[None]:
        limited.append(True)
        yield

    saver = CheckpointSaver(store, lambda *asked: None, phase)
    saver.begin(1, lambda: state_at(1), {}, ranks.each)
    ended(saver, "poll")
    assert limited == [True], "a poll does not wait"
    saver.begin(2, lambda: state_at(2), {}, ranks.each)
    saver.settle()
    assert limited == [True] * 3


@pytest.mark.parametrize(("error", "expected"), [(CheckpointError("broken"), [True]), (KeyboardInterrupt(), [])])
def test_other_ranks_stop_writing_if_one_fails(tmp_path, error, expected):
    ranks, _, saver = parts(tmp_path)
    abandoned: list[bool] = []

    def each(verb: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        if verb is RankSaver.is_written:
            raise error
        abandoned.extend([True] * (verb is RankSaver.abandon))
        return ranks.each(verb, *arguments, **named)

    saver.begin(1, lambda: state_at(1), {}, each)
    with pytest.raises(type(error)):
        saver.poll()
    assert abandoned == expected


def test_save_reports_stages_and_needs_room_for_all_ranks(tmp_path):
    waits: list[Any] = []
    seen: list[str] = []
    store = store_at(tmp_path)

    class TwoRanks(Ranks):
        def each(self, verb: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
            seen.append(saver.at)
            found = super().each(verb, *arguments, **named)
            return found * 2 if verb is RankSaver.copy else found

    ranks = TwoRanks()
    saver = CheckpointSaver(store, lambda *asked: waits.append(asked))
    size = num_bytes(rank_shards(ranks.model, ranks.optimizer).parts)

    def record() -> Any:
        seen.append(saver.at)
        return state_at(3)

    assert saver.begin(3, record, {"a": 1.0}, ranks.each) is None
    at = saver.at
    folder = at.removeprefix("checkpoint of step 3: writing shards to ")
    assert Path(folder).parent == store.directory
    assert seen == ["", f"checkpoint of step 3: opening a folder for {store.path_of(3)}", at]
    assert waits == [(int(2 * size * 1.01) + 4 * 2**20, 3)]
    assert saver.settle() == 3
    assert store.list()[0].metrics == {"a": 1.0}
    assert (saver.at, ranks.saver._copies) == ("", {})


@pytest.mark.parametrize(
    ("num_ranks", "spare", "is_copied"), [(1, 1, True), (1, 0, False), (2, 1, True), (2, 0, False)]
)
def test_ranks_of_a_host_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, spare: int, is_copied: bool
) -> None:
    model, optimizer = build(seed=1)
    saver = RankSaver(lambda: {"policy": (model, optimizer), "critic": (model, optimizer)}, num_ranks=num_ranks)
    size = 2 * num_bytes(rank_shards(model, optimizer).parts)
    available = size * num_ranks * 1.25 + spare
    monkeypatch.setattr("rlcore.checkpoint.save.psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    assert saver.copy() == (size, is_copied)
    assert sorted(saver._copies) == (["critic", "policy"] if is_copied else [])


def test_save_without_memory_for_a_copy_is_synchronous(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.checkpoint.save.psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    ranks, store, saver = parts(tmp_path)
    assert saver.begin(1, lambda: state_at(1), {}, ranks.each) == 1
    assert_same(state_of(*loaded(store.path_of(1))), state_of(ranks.model, ranks.optimizer))


def test_save_prunes_old_checkpoints(tmp_path):
    store = store_at(tmp_path, keep_last=1, keep_best=0)
    ranks, saver = Ranks(), CheckpointSaver(store, lambda needed_bytes, step: None)
    for step in (1, 2):
        begin(saver, step, ranks)
        assert ended(saver, "settle") == step
    assert steps(store) == [2]


def test_save_that_cannot_begin_leaves_nothing(tmp_path):
    ranks, store, saver = parts(tmp_path)

    def fails() -> Any:
        raise DiskSpaceError("the journal has no room")

    with pytest.raises(DiskSpaceError, match="the journal has no room"):
        saver.begin(1, fails, {}, ranks.each)
    assert (saver.at, saver.settle()) == ("", None)
    assert steps(store) == []


def test_failed_prune_is_logged(tmp_path, caplog):
    store = store_at(tmp_path)
    store.directory.write_text("no folder")
    prune(store)
    assert f"old checkpoints were not deleted: {store.directory}: cannot be read (" in caplog.text
    assert "it is unknown whether the run has checkpoints. Restore it as a readable folder." in caplog.text
