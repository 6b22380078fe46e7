"""A run whose checkpoint folder is damaged, read-only, deleted, or on a separate file system."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError, DataError
from rlcore.storage.locks import RunLock
from tests.helpers.published import edit_manifest, flip
from tests.helpers.running import assert_same, steps_of, weights_of
from tests.helpers.sessions import OVERRIDES, QUIET, Event, elsewhere, run_to_the_end, session_of, steps, verified_steps
from tests.helpers.small_run import SmallRun
from tests.storage.small_disk import mounted


@contextmanager
def two_steps_done(undisturbed: SmallRun, root: Path) -> Iterator[SmallRun]:
    run = elsewhere(undisturbed, root, *OVERRIDES)
    run.layout.checkpoints.parent.mkdir(parents=True)
    with mounted(run.layout.checkpoints):
        train_to(2, undisturbed, root)
        yield run


def train_to(step: int, undisturbed: SmallRun, root: Path) -> None:
    """Train to a last step, so that no step follows while a checkpoint is written."""
    with session_of(elsewhere(undisturbed, root, *steps(step), QUIET)) as session:
        session.train(step)


def test_a_damaged_checkpoint_is_passed_over(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    train_to(4, undisturbed, tmp_path)
    flip(next((run.layout.checkpoints / "step-000004" / "policy").glob("*.safetensors")), 700)
    events: list[Event] = []
    run_to_the_end(run, events.append)
    (reported,) = [event for event in events if event["event"] == "checkpoint_refused"]
    text = str(reported["text"])
    assert "step-000002: " in text
    assert "step-000004/policy/rank-00000-of-00001-0000.safetensors: hash must be sha256" in text
    assert_same(run, undisturbed)


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_checkpoints_of_a_newer_format_are_never_lost(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    train_to(4, undisturbed, tmp_path)
    older, newer = (run.layout.checkpoints / f"step-00000{step}" for step in (2, 4))
    manifest = (older / "manifest.json").read_bytes()
    for path in (older, newer):
        edit_manifest(path, format_version=99)
    before = content_of(run.layout.checkpoints), run.layout.journal.read_bytes()
    with session_of(run) as session, pytest.raises(CheckpointError, match="none of its 2 checkpoints") as caught:
        session.train(6)
    for path in (older, newer):
        assert f"{path}/manifest.json: format_version must be 1, got 99" in str(caught.value)
    assert (content_of(run.layout.checkpoints), run.layout.journal.read_bytes()) == before

    (older / "manifest.json").write_bytes(manifest)
    written_by_newer = content_of(newer)
    events: list[Event] = []
    run_to_the_end(run, events.append)
    (reported,) = [str(event["text"]) for event in events if event["event"] == "checkpoint_refused"]
    assert f"step-000002: {newer}/manifest.json: format_version must be 1, got 99" in reported
    assert content_of(newer.with_name("step-000004.format-99.1")) == written_by_newer
    assert verified_steps(run)[-1] == 6
    assert_same(run, undisturbed)


def test_a_read_only_folder_is_one_error(undisturbed: SmallRun, tmp_path: Path) -> None:
    with two_steps_done(undisturbed, tmp_path) as run:
        remount = ["mount", "-o", "remount,ro", str(run.layout.checkpoints)]
        subprocess.run(remount, check=True, capture_output=True)
        with session_of(run) as session, pytest.raises(Exception, match=r"cannot be written.*[Rr]ead-only") as caught:
            session.train(4)
        assert str(run.layout.checkpoints) in str(caught.value)
        subprocess.run([*remount[:2], "remount,rw", remount[3]], check=True, capture_output=True)
        assert verified_steps(run) == [2]
        run_to_the_end(run)
        assert_same(run, undisturbed)


def test_a_name_that_is_another_device_is_one_clear_error(undisturbed: SmallRun, tmp_path: Path) -> None:
    """The rename of the temporary folder would cross file systems."""
    with two_steps_done(undisturbed, tmp_path) as run:
        with mounted(run.layout.checkpoints / "step-000004"):
            with session_of(run) as session, pytest.raises(CheckpointError, match=r"step-000004: cannot be published"):
                session.train(4)
            assert not list(run.layout.checkpoints.glob(".tmp-*"))
        (run.layout.checkpoints / "step-000004").rmdir()
        assert verified_steps(run) == [2]
        run_to_the_end(run)
        assert weights_of(run) == weights_of(undisturbed)


def test_a_folder_that_is_deleted_during_the_run(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *steps(60, chunk=60), QUIET)
    with session_of(run) as session:
        session.train(2)
        shutil.rmtree(run.layout.checkpoints)
        session.train(60)
    assert verified_steps(run) == [60]
    found = steps_of(run)
    assert len(found) == 61
    assert {step: found[step] for step in range(7)} == steps_of(undisturbed)


def test_a_run_deleted_while_open_frees_everything(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *steps(2), QUIET)
    session = session_of(run).__enter__()
    session.train(2)
    before = {thread.name for thread in threading.enumerate()}
    shutil.rmtree(run.layout.run_dir)
    session.__exit__(None, None, None)
    assert before - {thread.name for thread in threading.enumerate()} == {"watch"}
    assert not run.layout.run_dir.exists()


def test_a_start_that_fails_gives_the_run_back(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *steps(2), QUIET)
    session = session_of(run)
    run.layout.run_json.unlink()
    with pytest.raises(DataError, match=r"run\.json"):
        session.__enter__()
    with RunLock(run.layout.run_dir):
        assert not (run.layout.logs / "stacks").exists()


def test_a_run_without_its_checkpoints_begins_again(undisturbed: SmallRun, tmp_path: Path) -> None:
    found = []
    for lr in ("3e-4", "1e-2"):
        run = elsewhere(undisturbed, tmp_path, *steps(2), QUIET, "run_id=again", f"optim.lr={lr}")
        shutil.rmtree(run.layout.checkpoints, ignore_errors=True)
        with session_of(run) as session:
            session.validate("start", "before")
            session.train(2)
            session.validate("last", "after")
            session.export("last")
        validations = (run.layout.validation / f"{name}.json" for name in ("before", "after"))
        found.append([file.read_bytes() for file in (*validations, run.layout.exported_model / "model.safetensors")])
    assert [one == other for one, other in zip(*found, strict=True)] == [True, False, False]
    assert (run.layout.run_dir / "model.left.1").is_dir()
