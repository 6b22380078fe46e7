"""The log of a trainer process, read while it grows, and the logs of a run by their numbers."""

import os
import sys
from pathlib import Path

import pytest

from flows.work import trainer
from flows.work.trainer import CHILD_ENVIRONMENT, LogTail, trainer_logs


def test_a_log_is_read_line_by_line_while_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"one\n\xff two\r\n10%\r 99%\r100%\nthr")
    tail = LogTail(log)
    assert not tail.is_at_end()
    assert list(tail.new_lines()) == ["one", "\N{REPLACEMENT CHARACTER} two", "100%"]
    assert (tail.rest, tail.is_at_end()) == ("thr", True)
    assert list(tail.new_lines()) == []
    with log.open("ab") as file:
        file.write(b"ee\n\nfour")
    assert not tail.is_at_end()
    assert list(tail.new_lines()) == ["three", ""]
    assert tail.rest == "four"
    log.unlink()
    assert list(tail.new_lines()) == []
    assert (tail.is_at_end(), tail.last_lines(3)) == (True, [])


def test_a_flood_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "MAX_READ_BYTES", 8)
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"one\ntwo\nthree\n")
    tail = LogTail(log)
    assert list(tail.new_lines()) == ["one", "two"]
    assert not tail.is_at_end()
    assert list(tail.new_lines()) == ["three"]
    assert tail.is_at_end()
    assert tail.last_lines(9) == ["o", "three"]


def test_the_end_of_a_log_has_no_empty_lines(tmp_path: Path) -> None:
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"one\n\n  \ntwo\nthree\n")
    assert LogTail(log).last_lines(2) == ["two", "three"]
    assert LogTail(log).last_lines(9) == ["one", "two", "three"]


def test_logs_have_the_numbers_of_their_processes(tmp_path: Path) -> None:
    for name in ("trainer-2.log", "trainer-10.log", "trainer-3-copy.log", "trainer-.log", "trainer-4.txt"):
        (tmp_path / name).touch()
    (tmp_path / "trainer-11.log").mkdir()
    assert trainer_logs(tmp_path) == {2: tmp_path / "trainer-2.log", 10: tmp_path / "trainer-10.log"}
    fresh = tmp_path / "a" / "logs"
    assert [trainer._new_log(fresh).name for _ in range(3)] == [f"trainer-{number}.log" for number in (1, 2, 3)]
    assert len(list(fresh.iterdir())) == 3


def test_a_trainer_imports_what_its_flow_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/first", here, "/second"])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    found = trainer._environment()
    places = found["PYTHONPATH"].split(os.pathsep)
    assert [place for place in places if place in ("/first", "/second", here, "")] == ["/first", "/second", here]
    assert places[-1] == here
    assert found["TOKENIZERS_PARALLELISM"] == "true", "the user's own counts"
    assert found["PYTHONFAULTHANDLER"] == CHILD_ENVIRONMENT["PYTHONFAULTHANDLER"] == "1"
