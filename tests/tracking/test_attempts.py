"""The record of a run's attempts. No MLflow."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import psutil

from rlcore.storage.locks import Holder
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, Destination, End, read_attempts

TARGET = Destination("sqlite:///x", "millrace", "/x", {"stage": "train"}, {"seed": 1})


def begun(from_step: int, journal_bytes: int) -> Attempt:
    return Attempt(from_step, journal_bytes, 1_763_805_600.5, Holder(411, "node7", "train", "now", 1.0), TARGET)


def write(run_dir: Path, *lines: Attempt | End) -> None:
    with AttemptLog(run_dir / ATTEMPTS_FILE) as file:
        for line in lines:
            file.add(line)


def test_attempts_come_back_as_they_were_with_their_last_end(tmp_path: Path):
    assert read_attempts(tmp_path) == []
    first, second = begun(0, 0), begun(20, 111)
    write(tmp_path, first)
    assert read_attempts(tmp_path) == [(first, None)]
    write(tmp_path, second, End("KILLED", 6.5))
    assert read_attempts(tmp_path) == [(first, None), (second, End("KILLED", 6.5))]
    write(tmp_path, End("FINISHED", 7.5))
    assert read_attempts(tmp_path)[-1] == (second, End("FINISHED", 7.5))


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path):
    lines = ["[" * 200_000, '{"status":"FAILED","time":1}', '{"status":"MAYBE","time":2}', '{"from_step":1}', "null"]
    (tmp_path / ATTEMPTS_FILE).write_text("\n".join([*lines, ""]))
    write(tmp_path, begun(0, 0))
    with (tmp_path / ATTEMPTS_FILE).open("a") as file:
        file.write('{"from_st')
    assert read_attempts(tmp_path) == [(begun(0, 0), None)]


def test_an_attempt_is_lost_when_its_process_is_gone():
    me = replace(begun(0, 0), owner=Holder.me())
    assert (me.owner.pid, me.owner.host) == (os.getpid(), socket.gethostname())
    assert not me.is_lost()
    assert replace(me, owner=replace(me.owner, born=me.owner.born - 3600)).is_lost(), "another process had this id"
    unused = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    assert replace(me, owner=replace(me.owner, pid=unused)).is_lost()
    assert not replace(me, owner=replace(me.owner, pid=unused, host="elsewhere")).is_lost(), "of other hosts is unknown"
