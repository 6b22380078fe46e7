"""The record of a run's attempts and the state of its delivery on disk. No MLflow."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlcore.errors import DiskSpaceError, TrackingError
from rlcore.tracking.attempts import (
    Attempt,
    AttemptLog,
    Commit,
    Destination,
    Finish,
    History,
    Owner,
    has_begun,
    read_acts,
    read_history,
)
from rlcore.tracking.delivery import TrackingState, attempt_tags, change_state, read_state
from tests.storage.small_disk import fill, small_disk

__all__ = ["small_disk"]

OWNER = Owner("host", 1, 1.0)
TARGET = Destination("sqlite:///x", "millrace", "/x", "run-1", {"stage": "train"}, {"seed": 1})


def begun(number: int, step: int, journal_bytes: int, abandoned: str | None = None, *, repeats: bool = True) -> Attempt:
    return Attempt(number, step, journal_bytes, abandoned, 5.0, OWNER, TARGET, repeats)


def test_acts_come_back_as_they_were(tmp_path: Path):
    acts = [begun(1, 0, 0), Commit(20, 111), Finish("KILLED", 150, 6.5), begun(2, 20, 111, "metrics.abandoned-1.jsonl")]
    with AttemptLog(tmp_path / "attempts.jsonl") as file:
        for act in acts:
            file.add(act)
    path = tmp_path / "attempts.jsonl"
    assert [act for act, _ in read_acts(path)] == acts
    after_the_first = read_acts(path)[0][1]
    assert [act for act, _ in read_acts(path, after_the_first)] == acts[1:]
    assert read_history(path).attempts == (acts[0], acts[3])


def test_lines_that_are_no_acts_are_left_out(tmp_path: Path):
    path = tmp_path / "attempts.jsonl"
    path.write_text(
        "[" * 200_000
        + '\n{"finish":"MAYBE","journal_bytes":1,"time":2}\n{"attempt":1}\nnull\n{"commit":3,"journal_bytes":4}\n{"c'
    )
    assert [act for act, _ in read_acts(path)] == [Commit(3, 4)]


def history_of(tmp_path: Path, *acts: Attempt | Commit | Finish) -> History:
    with AttemptLog(tmp_path / "attempts.jsonl") as file:
        for act in acts:
            file.add(act)
    return read_history(tmp_path / "attempts.jsonl")


def test_a_folder_without_attempts_has_an_empty_history(tmp_path: Path):
    assert read_history(tmp_path / "attempts.jsonl") == History()
    assert History().end is None


def test_a_run_has_begun_with_its_first_act(tmp_path: Path):
    assert not has_begun(tmp_path)
    with AttemptLog(tmp_path / "attempts.jsonl") as file:
        assert not has_begun(tmp_path), "the file is there, and empty"
        file.add(begun(1, 0, 0))
        assert has_begun(tmp_path)


def test_each_attempt_is_told_by_its_step_its_time_its_process_and_its_end(tmp_path: Path):
    first = replace(begun(1, 0, 0), time=1_763_805_600.5, owner=Owner("node7", 411, 1.0))
    acts = [first, replace(first, number=2, step=20), Finish("FAILED", 9, 1_763_809_265.0)]
    told = {
        "attempts": "3",
        "attempt.1": "from step 0, 2025-11-22 10:00:00 UTC, node7 process 411, lost",
        "attempt.2": "from step 20, 2025-11-22 10:00:00 UTC, node7 process 411, FAILED 2025-11-22 11:01:05 UTC",
        "attempt.3": "from step 40, 2025-11-22 10:00:00 UTC, node7 process 411",
    }
    history = history_of(tmp_path, *acts, replace(first, number=3, step=40))
    assert attempt_tags(history) == told, "the newest goes on"
    ended = attempt_tags(history, Finish("KILLED", 9, 1_763_809_266.0))
    assert ended == told | {"attempt.3": f"{told['attempt.3']}, KILLED 2025-11-22 11:01:06 UTC"}


def test_the_end_is_the_newest_attempts(tmp_path: Path):
    first, second = Finish("FAILED", 150, 6.5), Finish("FINISHED", 300, 7.5)
    assert history_of(tmp_path, begun(1, 0, 0), Commit(20, 111), first).end == first
    assert history_of(tmp_path, begun(2, 20, 111)).end is None
    history = history_of(tmp_path, Finish("KILLED", 200, 7.0), second)
    assert history.end == second, "the last one counts"
    assert history.ends == {1: first, 2: second}
    assert history.end_bytes == (tmp_path / "attempts.jsonl").stat().st_size


def test_a_resume_from_the_newest_checkpoint_goes_on_with_the_same_line_of_steps(tmp_path: Path):
    acts = [begun(1, 0, 0), Commit(20, 500), begun(2, 20, 500, "cut-1"), begun(3, 20, 500), begun(4, 20, 500, "cut-2")]
    history = history_of(tmp_path, *acts, Commit(40, 900))
    assert (history.line, history.cuts) == (0, {2: "cut-1", 4: "cut-2"})


def test_going_back_behind_a_checkpoint_begins_another_line_of_steps(tmp_path: Path):
    acts = [begun(1, 0, 0), begun(2, 0, 0, "cut-1"), Commit(20, 500), Commit(40, 900), begun(3, 20, 500, "cut-2")]
    history = history_of(tmp_path, *acts, begun(4, 20, 500, "cut-3"), Commit(40, 880), begun(5, 40, 880, "cut-4"))
    assert (history.line, history.cuts) == (3, {4: "cut-3", 5: "cut-4"})


def test_an_alarms_roll_back_begins_another_line_of_steps_whichever_checkpoint_it_takes(tmp_path: Path):
    acts = [begun(1, 0, 0), Commit(20, 500), begun(2, 20, 500, "cut-1", repeats=False), begun(3, 20, 500, "cut-2")]
    history = history_of(tmp_path, *acts)
    assert (history.line, history.cuts) == (2, {3: "cut-2"})


def test_a_run_of_which_nothing_was_delivered_has_a_fresh_state(tmp_path: Path):
    fresh = TrackingState(format_version=1, uri="", mlflow_run_id=None, attempt=0, main_bytes=0,
                          settled_status=None, num_failures=0)  # fmt: skip
    assert read_state(tmp_path) == fresh


def test_the_state_comes_back_as_it_was(tmp_path: Path):
    state = TrackingState(uri="u", mlflow_run_id="r", attempt=3, main_bytes=77, settled_status="FAILED", num_failures=2)
    assert change_state(tmp_path, lambda _: state) == state
    assert read_state(tmp_path) == state
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"main_bytes": "many"}', "cannot be read"),
        ('{"format_version": 99}', "format version 99"),
    ],
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
