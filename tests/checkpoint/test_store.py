"""The folder of checkpoints: damaged checkpoints are refused by name, and the previous checkpoint is used."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.checkpoint import catalog
from rlcore.checkpoint import store as store_module
from rlcore.checkpoint.catalog import scan
from rlcore.checkpoint.store import CheckpointStore, require_same_settings
from rlcore.config import AlgoConfig, CheckpointConfig, KlConfig, RunConfig, TrackingConfig
from rlcore.errors import CheckpointError, DiskSpaceError
from rlcore.storage.documents import sha256_of
from rlcore.storage.manifest import Manifest
from tests.helpers.checkpoints import SETTINGS, save, state_at, steps, store_at
from tests.helpers.published import edit_manifest, flip
from tests.storage.small_disk import fill


def test_store_lists_finds_and_reads_checkpoints(tmp_path):
    store = store_at(tmp_path)
    assert store.latest() is None
    for step in (20, 40, 1_000_000):
        save(store, step, score=step / 1e6)
    assert steps(store) == [20, 40, 1_000_000]
    newest = store.latest()
    assert (newest.step, newest.name) == (1_000_000, "step-1000000")
    assert newest.path == store.path_of(1_000_000)
    assert newest.score == 1.0
    assert newest.created.startswith("20")
    assert newest.size_bytes > 1000
    assert store.load_state(newest) == state_at(1_000_000)
    with store.writing(state_at(60), {"a": float("nan"), "b": float("inf"), "c": 0.1}):
        pass
    assert store.list()[2].metrics == {"c": 0.1}, "others are not finite"


def test_best_has_the_highest_and_latest_score(tmp_path):
    store = store_at(tmp_path)
    assert store.best() is None
    save(store, 1)
    with pytest.raises(CheckpointError, match="has no checkpoint with a held-out score; there is start, step-000001"):
        store.find("best")
    for step, score in ((1, 0.5), (2, 0.7), (3, 0.7), (4, None), (5, 0.1)):
        save(store, step, score)
    best = store.best()
    assert best.step == 3
    (best.path / SHARD).unlink()
    assert store.best().step == 2


SHARD = Path("policy", "rank.safetensors")


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flip in a shard": (lambda path: flip(path / SHARD, 3), r"rank\.safetensors: hash"),
    "flip in the state": (lambda path: flip(path / "state.json", 40), r"state\.json: hash"),
    "flip in the settings": (lambda path: flip(path / "settings.json", 10), r"settings\.json: hash"),
    "flip in the manifest": (lambda path: flip(path / "manifest.json", 30), r"manifest\.json: "),
    "truncated shard": (lambda path: (path / SHARD).write_text("we"), "size must be 12 bytes, got 2"),
    "truncated manifest": (lambda path: (path / "manifest.json").write_text('{"kind": '), "is damaged"),
    "missing shard": (lambda path: (path / SHARD).unlink(), r"rank\.safetensors: missing"),
    "missing folder": (lambda path: shutil.rmtree(path / "policy"), r"rank\.safetensors: missing"),
    "missing state": (lambda path: (path / "state.json").unlink(), r"state\.json: missing"),
    "missing manifest": (lambda path: (path / "manifest.json").unlink(), r"missing: manifest\.json.*never finished"),
    "newer format": (lambda path: edit_manifest(path, format_version=99), "format_version must be 1, got 99"),
    "renamed": (lambda path: edit_manifest(path, step=7), "is of checkpoint 7, not of checkpoint 3"),
    "no checkpoint": (lambda path: edit_manifest(path, kind="model"), "is of model"),
    "manifest without keys": (lambda path: edit_manifest(path, without="metrics"), "lacks values of a checkpoint"),
    "deep manifest": (lambda path: (path / "manifest.json").write_text("[" * 200_000), "is damaged"),
    "pipe for a manifest": (lambda path: instead(path / "manifest.json", os.mkfifo), "is no ordinary file"),
    "folder for a manifest": (lambda path: instead(path / "manifest.json", Path.mkdir), "cannot be read"),
    "unreadable manifest": (
        lambda path: instead(path / "manifest.json", lambda name: name.symlink_to("/proc/self/mem")),
        "Input/output error",
    ),
    "pipe for a shard": (lambda path: instead(path / SHARD, os.mkfifo), "must be an ordinary file"),
    "file for a folder": (lambda path: (shutil.rmtree(path), path.touch()), "never finished"),
    "link to itself": (lambda path: (shutil.rmtree(path), path.symlink_to(path)), "cannot be read"),
    "emptied": (lambda path: (shutil.rmtree(path), path.mkdir()), "never finished"),
}


KEPT = (
    "newer format", "pipe for a manifest", "folder for a manifest", "unreadable manifest", "file for a folder",
    "link to itself",
)  # fmt: skip
"""Damage of folders that are set aside; others are replaced."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_checkpoint_is_refused_for_the_one_before(tmp_path, caplog, damage):
    writer = store_at(tmp_path)
    for step in (1, 2, 3):
        save(writer, step)
    do, message = DAMAGE[damage]
    do(writer.path_of(3))
    reader = store_at(tmp_path)
    found = reader.find_latest()
    assert found.checkpoint.step == 2
    (refusal,) = found.refusals
    assert refusal.path == writer.path_of(3)
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(refusal.reason)
    assert "using step-000002" in caplog.text
    assert str(writer.path_of(3)) in caplog.text
    assert reader.load_state(found.checkpoint).step == 2
    # The run continues and reaches the same step: the broken one is replaced.
    save(reader, 3)
    assert store_at(tmp_path).latest().step == 3
    store_at(tmp_path, keep_last=1, keep_best=0).prune()
    assert any((tmp_path / "checkpoints").glob("step-000003.*")) == (damage in KEPT)


def test_newer_state_format_is_refused_and_kept(tmp_path, caplog):
    store = store_at(tmp_path)
    save(store, 2)
    with store.writing(replace(state_at(3), format_version=9), {}):
        pass
    newer = (store.path_of(3) / "state.json").read_bytes()
    assert store_at(tmp_path).latest().step == 2
    assert "state.json: format_version must be 2, got 9" in caplog.text
    save(store, 3)
    assert (tmp_path / "checkpoints" / "step-000003.format-9.1" / "state.json").read_bytes() == newer


def with_journal(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", CheckpointConfig(), SETTINGS, journal=folder / "metrics.jsonl")


@pytest.fixture
def journaled(tmp_path) -> Path:
    """Three checkpoints, each with a line of the journal."""
    journal = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        with journal.open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        size = journal.stat().st_size
        state = replace(state_at(step), journal_bytes=size, journal_sha256=sha256_of(journal, size))
        with with_journal(tmp_path).writing(state, {}):
            pass
    return journal


@pytest.mark.parametrize(
    ("kept", "reason"),
    [('{"step": 1}\n{"step": 2}\n', "was cut"), ('{"step": 1}\n{"step": 2}\n{"step": 9}\n', "was changed")],
)
def test_newest_checkpoint_that_fits_the_journal_is_used(tmp_path, journaled, caplog, kept, reason):
    journaled.write_text(kept)
    found = with_journal(tmp_path).find_latest()
    assert found.checkpoint.step == 2
    assert found.journal_problem == ""
    (refusal,) = found.refusals
    assert re.search(rf"step-000003: does not fit the journal.*metrics\.jsonl: {reason}.*at step 3", refusal.reason)
    assert refusal.reason in caplog.text
    with_journal(tmp_path).set_aside_later(2)
    assert steps(with_journal(tmp_path)) == [1, 2]
    assert (tmp_path / "checkpoints" / "step-000003.left.1").is_dir()


@pytest.mark.usefixtures("journaled")
def test_damaged_checkpoints_of_later_steps_stay(tmp_path):
    flip(tmp_path / "checkpoints" / "step-000003" / "settings.json", 0)
    with_journal(tmp_path).set_aside_later(1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-000001", "step-000002.left.1", "step-000003",
    ]  # fmt: skip


@pytest.mark.parametrize("reason", ["was changed", "is lost"])
def test_newest_is_used_where_none_fits_the_journal(tmp_path, journaled, caplog, reason):
    if reason == "is lost":
        journaled.unlink()
    else:
        flip(journaled, 0)
    found = with_journal(tmp_path).find_latest()
    assert found.checkpoint.step == 3
    assert found.refusals == ()
    assert f"metrics.jsonl: {reason}" in found.journal_problem
    assert found.journal_problem in caplog.text


def test_latest_without_hashes_checks_sizes_only(tmp_path):
    store = store_at(tmp_path)
    flip(save(store, 1) / SHARD, 0)
    (save(store, 2) / SHARD).write_text("short")
    assert store.latest().step == 1, "its writer trusts the hashes, and finds the wrong size"
    reader = store_at(tmp_path)
    found = reader.latest(verify=False)
    assert found.step == 1
    with pytest.raises(CheckpointError, match="hash must be"):
        reader.load_state(found)


def test_all_checkpoints_broken_is_an_error(tmp_path):
    store = store_at(tmp_path)
    for step in (1, 2):
        (save(store, step) / SHARD).unlink()
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints can be used(.|\n)*step-000002(.|\n)*step 0"):
        store_at(tmp_path).latest()


def test_other_names_are_no_candidates(tmp_path):
    store = store_at(tmp_path)
    save(store, 1)
    for name in (".tmp-step-000002-1-0123abcd", "step-2", "step-000002.bak", "notes", "step-00000x"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-000009").touch()  # a file
    found = store.find_latest()
    assert found.checkpoint.step == 1
    assert [refusal.step for refusal in found.refusals] == [9]
    assert scan(tmp_path / "absent").checkpoints == ()


def test_other_settings_are_refused_with_both_values(tmp_path):
    save(store_at(tmp_path), 1)
    other = RunConfig(seed=7, algo=AlgoConfig(kl=KlConfig(coef=0.25)))
    store = store_at(tmp_path, other)
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    message = str(caught.value)
    shown = [f"  algo.kl.coef: {KlConfig().coef} in the checkpoint, 0.25 now", "  seed: 1 in the checkpoint, 7 now"]
    assert message.split("\n")[1:3] == shown
    assert message.count(" in the checkpoint, ") == 2
    assert message.endswith(f"from these weights: --fork {tmp_path.name}@1 and another run_id.")
    with pytest.raises(CheckpointError, match="other settings"):
        store.load_state(store.list()[0])


@pytest.mark.parametrize(("count", "more"), [(10, ""), (12, "\n  and 2 more")])
def test_ten_of_many_different_settings_are_shown(tmp_path: Path, count: int, more: str) -> None:
    folder = save(store_at(tmp_path), 1)
    (info,) = scan(tmp_path / "checkpoints").checkpoints
    theirs = {f"key-{number:02d}": number for number in range(count - 1)}
    (folder / "settings.json").write_text(json.dumps(theirs | {"same": None}))
    lines = [f"  key-{number:02d}: {number} in the checkpoint, absent now" for number in range(count - 1)]
    shown = "\n".join([*lines, "  new: absent in the checkpoint, null now"][:10])
    with pytest.raises(CheckpointError) as caught:
        require_same_settings(info, {"same": None, "new": None}, "another")
    assert (
        f"{folder}: was made with other settings, so continuing would be another run:\n{shown}{more}\nRestore"
        in str(caught.value)
    )
    for text, why in (("[]", "an object"), ("[" * 5000, "recursion limit.*")):
        (folder / "settings.json").write_text(text)
        message = rf"settings\.json: cannot be read \(.*{why}\)\. Restore it, or delete {folder}\."
        with pytest.raises(CheckpointError, match=message):
            require_same_settings(info, {}, "another")


def test_unknown_name_error_lists_checkpoints(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    assert (store.find("start"), store.step_of("start")) == (None, 0)
    lacks, remedy = f": run {tmp_path.name} has no such checkpoint; ", "train first: millrace train with these settings"
    for name in ("last", "best", "step-000002"):
        with pytest.raises(
            CheckpointError, match=f"^checkpoint={name}{lacks}there is none yet. Name start, or {remedy}$"
        ):
            store.find(name)
    save(store, 1)
    save(store, 3)
    assert [store.step_of(name) for name in ("last", "step-000001")] == [3, 1]
    there = "there is start, step-000001, step-000003. Name one of these"
    with pytest.raises(CheckpointError, match=f"^checkpoint=step-000002{lacks}{there}, or {remedy}$"):
        store.find("step-000002")


def test_checkpoint_that_cannot_be_deleted_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(tmp_path, keep_last=1, keep_best=0)
    for step in (1, 2, 3):
        save(store, step)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "step-000001":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert store.prune() == (store.path_of(2),)
    assert f"{store.path_of(1)}: cannot be deleted ([Errno 16] Device or resource busy)" in caplog.text
    assert steps(store) == [1, 3]


def test_verified_checkpoint_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store_at(tmp_path)
    save(writer, 1)
    reader = store_at(tmp_path)
    hashed: list[bool] = []
    verify = store_module.verify_directory

    def noted(path: Path, *, hashes: bool, **more: Any) -> Manifest:
        hashed.append(hashes)
        return verify(path, hashes=hashes, **more)

    monkeypatch.setattr(store_module, "verify_directory", noted)
    info = reader.list()[0]
    writer.verify(info)
    reader.verify(info, hashes=False)
    reader.verify(info)
    reader.verify(info)
    assert hashed == [False, False, True, False], "its writer has hashed it; a look at sizes does not count"


def test_warm_start_of_other_settings_has_its_remedy(tmp_path):
    stage = tmp_path / "warm-starts" / "warm-start-0123"
    save(store_at(stage), 1)
    with pytest.raises(CheckpointError, match=rf"; or delete {stage} to start the warm start again\.$"):
        store_at(stage, RunConfig(seed=7)).latest()


def test_settings_without_effect_on_numbers_may_change(tmp_path):
    save(store_at(tmp_path), 1)
    newest = store_at(tmp_path, RunConfig(name="renamed", tracking=TrackingConfig(enabled=False))).latest()
    assert newest is not None


def test_full_disk_keeps_the_last_good_checkpoint(small_disk):
    store = store_at(small_disk)
    save(store, 1)
    for num_pages in range(4):  # shard, state, settings, manifest: a page each, so it fills at another
        ballast = fill(small_disk, leave_bytes=4096 * num_pages)
        with pytest.raises(DiskSpaceError, match=r"step-000002: no room to write \(\[Errno 28\]"):
            save(store, 2)
        ballast.unlink()
        assert steps(store) == [1]
        assert store_at(small_disk).latest().step == 1
        assert not list((small_disk / "checkpoints").glob(".tmp-*"))
    save(store, 2)
    assert steps(store) == [1, 2]


def test_prune_follows_the_retention_rule(tmp_path):
    store = store_at(tmp_path, keep_last=2, keep_best=1, keep_every_steps=4)
    for step in range(1, 10):
        save(store, step, score=1.0 if step == 3 else 0.0)
    deleted = store.prune()
    assert steps(store) == [3, 4, 8, 9]
    assert sorted(path.name for path in deleted) == [f"step-{step:06d}" for step in (1, 2, 5, 6, 7)]
    assert store.prune() == ()
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_prune_never_deletes_the_last_good_one(tmp_path):
    writer = store_at(tmp_path)
    for step in (1, 2, 3):
        save(writer, step)
    flip(writer.path_of(3) / SHARD, 0)
    store = store_at(tmp_path, keep_last=1, keep_best=0)
    store.prune()
    assert steps(store) == [2, 3], "3 is the newest but broken: 2 is the last good one"
    flip(writer.path_of(2) / SHARD, 0)
    assert store_at(tmp_path, keep_last=1, keep_best=0).prune() == (), "with no good one left nothing is deleted"


def test_broken_checkpoint_does_not_count_in_retention(tmp_path):
    store = store_at(tmp_path, keep_last=1, keep_best=1)
    for step, score in ((10, 0.5), (20, 0.9)):
        save(store, step, score)
    (store.path_of(20) / SHARD).write_text("short")
    save(store, 30, 0.1)
    assert store.prune() == ()
    assert store.best().step == 10
    save(store, 40, 0.1)
    assert store.prune() == (store.path_of(30),)
    assert steps(store) == [10, 20, 40], "what is broken is left for people to look at"


def test_folder_deleted_during_a_save_is_an_error(tmp_path):
    store = store_at(tmp_path)

    def vanish() -> None:
        with store.writing(state_at(1), {}):
            shutil.rmtree(tmp_path / "checkpoints")

    with pytest.raises(CheckpointError, match="Was the run's folder removed"):
        vanish()


def test_read_only_file_system_is_an_error(small_disk):
    store = store_at(small_disk)
    save(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written .*Read-only"):
        save(store, 2)
    newest = store_at(small_disk).latest()
    assert newest is not None
    assert store.load_state(newest) == state_at(1)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    save(store, 2)
    assert steps(store) == [1, 2]


def test_checkpoint_pruned_during_a_read_is_not_broken(tmp_path, monkeypatch):
    """The checkpoint is pruned between the listing of the folder and the read of the manifest. A newer one exists."""
    store = store_at(tmp_path, keep_last=1, keep_best=0)
    save(store, 1)
    read = catalog.read_manifest

    def read_too_late(directory: Path, **more: type[CheckpointError]) -> Manifest | None:
        monkeypatch.undo()
        save(store, 2)
        shutil.rmtree(store.path_of(1))
        return read(directory, **more)

    monkeypatch.setattr(catalog, "read_manifest", read_too_late)
    found = store_at(tmp_path).find_latest(verify=False)
    assert found.checkpoint.step == 2
    assert found.refusals == ()
