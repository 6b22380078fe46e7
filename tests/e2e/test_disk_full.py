"""A small disk becomes full: the run pauses before a chunk or a checkpoint, or ends, and resumes."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
from torch import Tensor

from rlcore.checkpoint import shards
from rlcore.config.compose import load_config
from rlcore.errors import DiskSpaceError, StopRequestedError
from rlcore.run.layout import RunLayout, disk_needs
from rlcore.storage.disk import CHECKPOINT_SLACK_BYTES, free_bytes
from rlcore.tracking.journal import Journal, load_journal
from tests.helpers.running import answers_of, assert_same
from tests.helpers.sessions import Event, elsewhere, run_to_the_end, session_of, train_in_chunks, verified_steps
from tests.helpers.small_run import SmallRun, prepare
from tests.storage.small_disk import mounted

pytestmark = pytest.mark.slow

# A checkpoint of some 10 MB: a save takes long enough to be hit in the middle. At this rate sixty steps of the warm
# start are enough for scores that differ, from which a step learns.
OVERRIDES = (
    "model.scratch.hidden_size=192", "model.scratch.intermediate_size=512", "model.scratch.num_heads=2",
    "warm_start.max_steps=60", "warm_start.batch_size=32", "warm_start.optim.lr=3e-3", "warm_start.stop_at_reward=null",
    "trainer.total_steps=9", "trainer.steps_per_chunk=3", "validation.every_steps=0",
    "checkpoint.keep_last=1", "checkpoint.keep_best=0", "tracking.enabled=false",
)  # fmt: skip
DISK_MIB = 96
LEFT_BYTES = 1 << 20


def test_an_initial_policy_is_in_the_disk_plan(tmp_path: Path) -> None:
    debug = load_config(["experiment=debug", f"paths.root={tmp_path}"])
    for case in product([False, True], repeat=3):
        has_initial_policy, is_given, has_warm_start = case
        model = debug.model.model_copy(update={"path": str(tmp_path) if is_given else None})
        warm = debug.warm_start.model_copy(update={"enabled": has_warm_start})
        config = debug.model_copy(update={"model": model, "warm_start": warm})
        given = {"checkpoints_bytes": 0, "num_weights": 10, "steps_left": 1, "has_initial_policy": has_initial_policy}
        names = {need.what for need in disk_needs(config, RunLayout.of(config), **given)}
        assert ("initial policy" in names) == (not has_initial_policy and (has_warm_start or not is_given)), case
        assert ("checkpoints of the warm start" in names) == (not has_initial_policy and has_warm_start), case


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = prepare(tmp_path_factory.mktemp("undisturbed"), *OVERRIDES)
    run_to_the_end(run)
    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", DISK_MIB) as folder:
        yield folder


@dataclass
class FullDisk:
    """Fills the disk at chosen moments, and frees space when the run reports a pause."""

    run: SmallRun
    disk: Path
    makes_room: bool = True
    fill_after: dict[tuple[str, int], int] = field(default_factory=dict)
    """Event and its step -> bytes to leave free then."""
    paused: list[tuple[int, str, int, list[int]]] = field(default_factory=list)
    """Step, path, bytes missing, and the checkpoints that were whole at that moment."""
    is_stop_requested: bool = False

    @property
    def ballast(self) -> Path:
        return self.disk / "ballast"

    def fill(self, leave_bytes: int) -> None:
        with self.ballast.open("wb") as file:
            size = 0
            while (more := free_bytes(self.disk) - leave_bytes) > 0:
                with suppress(OSError):  # the run takes some of it at the same time
                    os.posix_fallocate(file.fileno(), size, more)
                    size += more

    def receive(self, event: Event) -> None:
        step = event.get("step")
        assert step is None or isinstance(step, int)
        match event["event"]:
            case str(name) if (name, step) in self.fill_after:
                self.fill(self.fill_after.pop((name, step)))
            case "paused_for_disk":
                self.paused.append((step, event["path"], event["missing_bytes"], verified_steps(self.run)))
                if self.makes_room:
                    self.ballast.unlink(missing_ok=True)

    def stop(self) -> bool:
        return self.is_stop_requested


def run_to_the_end_in_spite(fault: FullDisk) -> list[tuple[str, list[int]]]:
    ends: list[tuple[str, list[int]]] = []
    while True:
        try:
            run_to_the_end(fault.run, fault.receive, fault.stop)
            return ends
        except DiskSpaceError as reason:
            ends.append((str(reason), verified_steps(fault.run)))
            assert len(ends) < 9, ends
            fault.ballast.unlink(missing_ok=True)


def test_a_full_disk_at_the_journal_and_in_saves(
    undisturbed: SmallRun, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere(undisturbed, disk, *OVERRIDES)
    fault = FullDisk(run, disk, fill_after={("progress", 1): 0, ("progress", 3): 0, ("progress", 6): 1 << 20})
    write_file, in_the_middle = shards.save_file, ["step-000009"]

    def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if path.parts[-3].removeprefix(".tmp-")[: len("step-000000")] in in_the_middle:
            in_the_middle.clear()
            fault.fill(0)
        write_file(dict(tensors), path, metadata=metadata)

    monkeypatch.setattr(shards, "save_file", save_file)
    ends = run_to_the_end_in_spite(fault)

    assert [steps for _, steps in ends] == [[], [], [6]], ends
    assert str(run.layout.journal) in ends[0][0]
    assert str(run.layout.answers) in ends[1][0]
    assert "step-000009" in ends[2][0]
    before = fault.paused[-1]
    assert (before[0], before[1], before[3]) == (6, str(run.layout.checkpoints), [3])
    assert before[2] > 1 << 20, "the bytes that are missing"
    assert_same(run, undisturbed)
    assert answers_of(run) == answers_of(undisturbed)
    assert verified_steps(run) == [9]
    events = [event.name for event in load_journal(run.layout.journal).events]
    assert events.count("paused_for_disk") == events.count("disk_room") == 1
    assert not list(run.layout.checkpoints.glob(".tmp-*"))


def test_no_room_in_the_middle_of_a_shard(undisturbed: SmallRun, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk stays full, or as under a quota, writes fail although the file system reports free space."""
    run = elsewhere(undisturbed, disk, *OVERRIDES)
    fault = FullDisk(run, disk)
    write_file = shards.save_file
    refused: list[tuple[str, str]] = []
    still = ["step-000003", "step-000006", "step-000006"]

    def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        step = path.parts[-3].removeprefix(".tmp-")[: len("step-000000")]
        if still[:1] != [step]:
            return write_file(dict(tensors), path, metadata=metadata)
        still.pop(0)
        fault.fill(LEFT_BYTES)  # there was room when the save began, and there is for a part of the shard
        assert sum(tensor.nbytes for tensor in tensors.values()) > 2 * LEFT_BYTES
        try:
            write_file(dict(tensors), path, metadata=metadata)
        except Exception as reason:
            refused.append((step, str(reason)))
            if step == "step-000006":
                fault.ballast.unlink()
            raise

    monkeypatch.setattr(shards, "save_file", save_file)
    ends = run_to_the_end_in_spite(fault)

    assert [step for step, _ in refused] == ["step-000003", "step-000006", "step-000006"]
    assert all("No space left on device" in text for _, text in refused)
    assert [steps for _, steps in ends] == [[], [3], [3]], "the last good one stays"
    assert not fault.paused
    assert_same(run, undisturbed)
    assert verified_steps(run) == [9]
    assert not list(run.layout.checkpoints.glob(".tmp-*"))


@pytest.mark.parametrize("ending", ["time", "stop"])
def test_a_run_without_room_ends_and_resumes_later(undisturbed: SmallRun, disk: Path, ending: str) -> None:
    wait_s = "0.1" if ending == "time" else "3600"
    run = elsewhere(undisturbed, disk, *OVERRIDES, f"checkpoint.wait_for_room_s={wait_s}")
    fault = FullDisk(run, disk, makes_room=False, fill_after={("checkpoint", 3): 1 << 20})

    def receive(event: Event) -> None:
        fault.receive(event)
        fault.is_stop_requested = ending == "stop" and bool(fault.paused)

    expected = DiskSpaceError if ending == "time" else StopRequestedError
    words = r"[kMG]B are missing|no room|could not be written"
    with session_of(run, receive, fault.stop) as session, pytest.raises(expected, match=words):
        train_in_chunks(session, 3, 6)
    assert verified_steps(run) == [3]
    fault.ballast.unlink()
    run_to_the_end(run)
    assert_same(run, undisturbed)


def test_a_save_that_takes_the_room_is_committed(undisturbed: SmallRun, disk: Path) -> None:
    words = [word for word in OVERRIDES if not word.startswith("trainer.")]
    chunks = ("trainer.total_steps=3", "trainer.steps_per_chunk=1", "checkpoint.wait_for_room_s=0")
    run = elsewhere(undisturbed, disk, *words, *chunks)
    size = 0

    def stop() -> bool:
        nonlocal size
        for folder in run.layout.checkpoints.glob(".tmp-step-000002-*"):
            while sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 0.9 * size:
                time.sleep(0.01)
        return False

    def receive(event: Event) -> None:
        nonlocal size
        if event["event"] == "checkpoint" and event["step"] == 1:
            size = sum(file.stat().st_size for file in run.layout.checkpoints.glob("step-000001/**/*.safetensors"))
            FullDisk(run, disk).fill(int(1.1 * size) + CHECKPOINT_SLACK_BYTES)
        assert event["event"] != "paused_for_disk"

    with session_of(run, receive, stop) as session:
        train_in_chunks(session, 1, 2, 3)
    assert verified_steps(run) == [3]


def test_a_full_disk_is_noticed_before_a_chunk(undisturbed: SmallRun, disk: Path) -> None:
    run = elsewhere(undisturbed, disk, *OVERRIDES)
    with session_of(run) as session:
        session.train(3)
    events: list[Event] = []
    fault = FullDisk(run, disk)

    def receive(event: Event) -> None:
        events.append(event)
        fault.receive(event)

    with session_of(run, receive, fault.stop) as session:
        fault.fill(LEFT_BYTES)  # for the journal, and not for a checkpoint
        session.train(6)
    assert [pause[:2] for pause in fault.paused] == [(3, str(run.layout.checkpoints))]
    reported = [
        (event["event"], event["step"]) for event in events if event["event"] in ("paused_for_disk", "progress")
    ]
    assert reported[:2] == [("paused_for_disk", 3), ("progress", 4)]


def test_a_resume_on_a_full_disk_keeps_the_journal(undisturbed: SmallRun, disk: Path) -> None:
    run = elsewhere(undisturbed, disk, *OVERRIDES)
    with session_of(run) as session:
        session.train(3)
    with Journal(run.layout.journal) as journal:  # lines that a killed trainer has left
        for step in range(10, 50):
            journal.append_step(step, {f"test/m{number}": 1.0 for number in range(100)})
    fault, content = FullDisk(run, disk), run.layout.journal.read_bytes()
    with session_of(run) as session:
        fault.fill(0)
        with pytest.raises(DiskSpaceError, match=r"metrics\.jsonl: no room"):
            train_in_chunks(session, 6, 9)
    assert run.layout.journal.read_bytes().startswith(content)
    fault.ballast.unlink()
    run_to_the_end(run)
    assert not list(run.layout.run_dir.glob(".tmp-*"))
    assert_same(run, undisturbed)
