"""Attempts at a run, and the process that delivers them."""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlcore.config import TrackingConfig
from rlcore.storage.locks import Holder
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, Companion, Destination, End, read_attempts

TARGET = Destination("sqlite:///x", "millrace", "/x", {"stage": "train"}, {"seed": 1})


def attempt(from_step: int, journal_bytes: int) -> Attempt:
    return Attempt(from_step, journal_bytes, 1_763_805_600.5, Holder(411, "node7", "train", "now", 1.0), TARGET)


def write(run_dir: Path, *lines: Attempt | End) -> None:
    with AttemptLog(run_dir / ATTEMPTS_FILE) as file:
        for line in lines:
            file.add(line)


def test_attempts_are_read_with_their_last_end(tmp_path: Path):
    assert read_attempts(tmp_path) == []
    first, second = attempt(0, 0), attempt(20, 111)
    write(tmp_path, first)
    assert read_attempts(tmp_path) == [(first, None)]
    write(tmp_path, second, End("KILLED", 6.5))
    assert read_attempts(tmp_path) == [(first, None), (second, End("KILLED", 6.5))]
    write(tmp_path, End("FINISHED", 7.5))
    assert read_attempts(tmp_path)[-1] == (second, End("FINISHED", 7.5))


def test_unreadable_lines_are_skipped(tmp_path: Path):
    lines = ["[" * 200_000, '{"status":"FAILED","time":1}', '{"status":"MAYBE","time":2}', '{"from_step":1}', "null"]
    (tmp_path / ATTEMPTS_FILE).write_text("\n".join([*lines, ""]))
    write(tmp_path, attempt(0, 0))
    with (tmp_path / ATTEMPTS_FILE).open("a") as file:
        file.write('{"from_st')
    assert read_attempts(tmp_path) == [(attempt(0, 0), None)]


def test_attempt_is_lost_without_its_process():
    me = replace(attempt(0, 0), owner=Holder.me())
    assert (me.owner.pid, me.owner.host) == (os.getpid(), socket.gethostname())
    assert not me.is_lost()
    assert replace(me, owner=replace(me.owner, born=me.owner.born - 3600)).is_lost(), "another process had this id"
    unused = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    assert replace(me, owner=replace(me.owner, pid=unused)).is_lost()
    assert not replace(me, owner=replace(me.owner, pid=unused, host="elsewhere")).is_lost(), "of other hosts is unknown"


def test_failed_starts_are_reported_and_limited(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "executable", str(run_dir / "no-python"))
    companion = Companion(run_dir, TrackingConfig())
    for _ in range(10):
        companion.ensure_running()
    assert not companion.finish(1.0)
    assert caplog.text.count("cannot be started") == 3


def test_ended_process_is_reported_and_restarted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    companion = Companion(run_dir, TrackingConfig())
    until = time.monotonic() + 60
    while "restarting" not in caplog.text and time.monotonic() < until:
        companion.ensure_running()
    assert caplog.messages == ["the process that delivers values to MLflow ended with code 1; restarting it"]
    companion.finish(60.0)


def test_delivery_imports_nothing_from_working_directory(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "argparse.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    companion = Companion(run_dir, TrackingConfig())
    companion.ensure_running()
    companion.finish(60.0)
    assert not (tmp_path / "imported").exists()
