"""Which bytes belong where, after anything that a trainer can do. No MLflow."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlcore.errors import DiskSpaceError, TrackingError
from rlcore.tracking.attempts import Attempt, AttemptLog, Commit, Destination, Finish, Owner, last_attempt, read_acts
from rlcore.tracking.journal import Journal
from rlcore.tracking.ledger import heed
from rlcore.tracking.state import TrackingState, change_state, read_state
from tests.storage.small_disk import fill, small_disk

__all__ = ["small_disk"]

OWNER = Owner("host", 1, 1.0)
TARGET = Destination("sqlite:///x", "millrace", "/x", "run-1", {"stage": "train"}, {"seed": 1})


def begun(number: int, step: int, journal_bytes: int, abandoned: str | None = None) -> Attempt:
    return Attempt(number, step, journal_bytes, abandoned, 5.0, OWNER, TARGET)


def test_acts_come_back_as_they_were(tmp_path: Path):
    acts = [begun(1, 0, 0), Commit(20, 111), Finish("KILLED", 150, 6.5), begun(2, 20, 111, "metrics.abandoned-1.jsonl")]
    with AttemptLog(tmp_path / "attempts.jsonl") as file:
        for act in acts:
            file.add(act)
    path = tmp_path / "attempts.jsonl"
    assert [act for act, _ in read_acts(path)] == acts
    after_the_first = read_acts(path)[0][1]
    assert [act for act, _ in read_acts(path, after_the_first)] == acts[1:]
    assert last_attempt(path) == acts[3]


def test_lines_that_are_no_acts_are_left_out(tmp_path: Path):
    path = tmp_path / "attempts.jsonl"
    path.write_text(
        "[" * 200_000
        + '\n{"finish":"MAYBE","journal_bytes":1,"time":2}\n{"attempt":1}\nnull\n{"commit":3,"journal_bytes":4}\n{"c'
    )
    assert [act for act, _ in read_acts(path)] == [Commit(3, 4)]


def test_only_what_a_checkpoint_covers_is_committed(tmp_path: Path):
    state = heed(TrackingState(), begun(1, 0, 0), 10, tmp_path)
    assert state.committed_bytes == 0
    state = heed(state, Commit(20, 500), 20, tmp_path)
    assert (state.committed_bytes, state.control_bytes) == (500, 20)


@pytest.mark.parametrize(("status", "committed"), [("FINISHED", 900), ("FAILED", 500), ("KILLED", 500)])
def test_the_last_lines_stay_only_if_the_run_finished(tmp_path: Path, status, committed: int):
    state = heed(TrackingState(attempt=1, committed_bytes=500), Finish(status, 900, 7.0), 30, tmp_path)
    assert (state.committed_bytes, state.final_status, state.settled) == (committed, status, False)


def test_a_new_attempt_starts_its_own_live_run_and_closes_the_lost_one(tmp_path: Path):
    before = TrackingState(attempt=1, attempt_run_id="live-1", committed_bytes=500, main_bytes=500, live_bytes=800)
    state = heed(before, begun(2, 20, 500), 40, tmp_path)
    assert (state.attempt, state.attempt_run_id, state.lost_attempt_run_ids) == (2, None, ("live-1",))
    assert (state.main_bytes, state.live_bytes, state.committed_bytes) == (500, 500, 500)


def test_an_attempt_whose_end_is_known_is_not_lost(tmp_path: Path):
    before = TrackingState(attempt=1, attempt_run_id="live-1", final_status="KILLED", settled=True)
    assert heed(before, begun(2, 20, 0), 40, tmp_path).lost_attempt_run_ids == ()


def cut_journal(tmp_path: Path, kept_steps: list[int], cut_steps: list[int]) -> tuple[int, int, str]:
    """A journal cut after `kept_steps`: bytes kept, bytes before the cut, name of the file with what was cut."""
    with Journal(tmp_path / "metrics.jsonl") as journal:
        for step in kept_steps:
            journal.append_step(step, {"a": float(step)})
        kept = journal.size_bytes
        for step in cut_steps:
            journal.append_step(step, {"a": float(step), "b": 1.0})
        before = journal.size_bytes
        aside = journal.truncate(kept)
    assert aside is not None
    return kept, before, aside.name


def test_steps_taken_back_after_they_were_delivered_need_another_run(tmp_path: Path):
    kept, before, aside = cut_journal(tmp_path, [1, 2], [3, 4])
    state = TrackingState(mlflow_run_id="old", attempt=1, main_bytes=before, described_attempt=1)
    state = heed(state, begun(2, 2, kept, aside), 40, tmp_path)
    assert (state.mlflow_run_id, state.superseded_run_ids, state.main_bytes) == (None, ("old",), 0)


def test_lines_of_the_checkpoints_own_step_come_again_and_are_not_sent_twice(tmp_path: Path):
    kept, before, aside = cut_journal(tmp_path, [1, 2], [2])
    state = TrackingState(mlflow_run_id="old", attempt=1, main_bytes=before)
    state = heed(state, begun(2, 2, kept, aside), 40, tmp_path)
    assert (state.mlflow_run_id, state.superseded_run_ids, state.main_bytes) == ("old", (), kept)
    assert state.delivered_ahead == ((2, "a"), (2, "b"))


def test_only_the_delivered_part_of_what_was_cut_counts(tmp_path: Path):
    kept, before, aside = cut_journal(tmp_path, [1, 2], [2, 3])
    first_cut_line = len((tmp_path / aside).read_bytes().splitlines(keepends=True)[0])
    delivered = TrackingState(mlflow_run_id="old", attempt=1, main_bytes=kept + first_cut_line)
    assert heed(delivered, begun(2, 2, kept, aside), 40, tmp_path).mlflow_run_id == "old"
    more = replace(delivered, main_bytes=before)
    assert heed(more, begun(2, 2, kept, aside), 40, tmp_path).mlflow_run_id is None


def test_what_was_cut_and_is_gone_counts_as_taken_back(tmp_path: Path):
    state = TrackingState(mlflow_run_id="old", attempt=1, main_bytes=500)
    assert heed(state, begun(2, 2, 100, "metrics.abandoned-1.jsonl"), 40, tmp_path).superseded_run_ids == ("old",)
    assert heed(state, begun(2, 2, 100, None), 40, tmp_path).superseded_run_ids == ("old",)


def test_the_state_comes_back_as_it_was(tmp_path: Path):
    state = TrackingState(
        uri="u",
        mlflow_run_id="r",
        superseded_run_ids=("o",),
        lost_attempt_run_ids=("l", "m"),
        delivered_ahead=((3, "a"),),
        final_status="FAILED",
        final_time=1.5,
    )
    assert change_state(tmp_path, lambda _: state) == state
    assert read_state(tmp_path) == state
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "damaged"), ('{"main_bytes": "many"}', "damaged"), ('{"format_version": 99}', "format version 99")],
)
def test_a_state_that_is_not_ours_is_refused_by_name(tmp_path: Path, content: str, message: str):
    (tmp_path / "tracking.json").write_text(content)
    with pytest.raises(TrackingError, match=rf"tracking\.json: {message}.* [Mm]ove the file away"):
        read_state(tmp_path)


def test_a_process_is_known_by_its_start_time_too():
    me = Owner.this_process()
    assert (me.pid, me.host) == (os.getpid(), socket.gethostname())
    assert not me.is_gone()
    assert replace(me, started=me.started - 3600).is_gone(), "another process had this id before"
    unused = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    assert replace(me, pid=unused).is_gone()
    assert not replace(me, pid=unused, host="elsewhere").is_gone(), "of other hosts nobody knows"


def test_a_full_disk_keeps_the_old_state_and_leaves_nothing(small_disk: Path):
    change_state(small_disk, lambda state: replace(state, uri="a", main_bytes=7))
    ballast = fill(small_disk)
    with pytest.raises(DiskSpaceError):
        change_state(small_disk, lambda state: replace(state, uri="b" * 8192))
    ballast.unlink()
    assert not list(small_disk.glob(".tmp-*"))
    assert read_state(small_disk).main_bytes == 7
