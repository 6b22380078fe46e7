"""The trainer process, run in this process: its channel, its commands, and the causes of its end."""

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

import pytest

from flows import SOURCE_FOLDER
from rlcore.config import RunConfig
from rlcore.errors import DataError, StopRequestedError
from rlcore.run import process
from rlcore.run.process import Channel, Session, serve
from rlcore.run.stop import StopFlag
from rlcore.tracking.lineage import Origin

Event = Mapping[str, object]


class Commands:
    """A session that records its calls and raises the test's errors."""

    def __init__(self, error: Exception | None = None, at_the_end: Exception | None = None) -> None:
        self.error, self.at_the_end = error, at_the_end
        self.called: list[object] = []

    def train(self, **arguments: object) -> Event:
        self.called.append(arguments)
        if self.error is not None:
            raise self.error
        return {"step": 3}

    def record_failure(self, error: Exception, *, fails: bool = True) -> Exception:
        self.called += [error, "failed"] if fails else [error]
        return error

    def save_finished(self) -> str:
        if self.at_the_end is not None:
            raise self.at_the_end
        return "stopped after step 3"


def served(session: Commands, *commands: Event, is_stopped: bool = False) -> tuple[int, list[Event]]:
    replies, stop = list[Event](), StopFlag(lambda: None)
    if is_stopped:
        stop._handle(signal.SIGTERM, None)
    return serve(cast(Session, session), iter(commands), replies.append, stop), replies


def test_commands_are_served_until_close() -> None:
    session, train = Commands(), {"command": "train", "to_step": 3}
    done = {"event": "done", "command": "train", "result": {"step": 3}}
    assert served(session, train, {**train, "settle": False}) == (0, [done, done])
    assert session.called == [{"to_step": 3}, {"to_step": 3, "settle": False}]
    assert served(session, {"command": "close"}, train) == (0, [])
    assert len(session.called) == 2


@pytest.mark.parametrize(("error", "code", "message"), [
    (KeyError("a bug"), 1, "KeyError: 'a bug'"),
    (DataError("a row breaks the schema"), 1, "a row breaks the schema"),
    (StopRequestedError("step 3 is saved"), 75, "step 3 is saved"),
])  # fmt: skip
def test_error_ends_the_process(caplog: pytest.LogCaptureFixture, error: Exception, code: int, message: str) -> None:
    session = Commands(error)
    reply = {"event": "error", "command": "train", "type": type(error).__name__, "message": message}
    assert served(session, {"command": "train"}, {"command": "train"}) == (code, [reply])
    is_stop = code == 75
    assert session.called == [{}, *([] if is_stop else [error, "failed"])], "a stop is no failure"
    assert ("step 3 is saved" if is_stop else "train failed\nTraceback") in caplog.text
    number, (unknown,) = served(Commands(), {"to_step": 3})
    assert (number, unknown["command"], unknown["type"]) == (1, "None", "AttributeError")


def test_stop_between_two_commands_saves(caplog: pytest.LogCaptureFixture) -> None:
    no_room = DataError("no room")
    saved = (None, "StopRequestedError", "stopped after step 3")
    for error, kind, message in (saved, (no_room, "DataError", "no room")):
        session = Commands(at_the_end=error)
        reply = {"event": "error", "command": "stop", "type": kind, "message": message}
        assert served(session, {"command": "train"}, is_stopped=True) == (75, [reply])
        assert session.called == ([error] if error else [])
    assert "the last finished step is not saved\nTraceback" in caplog.text


def test_stages_send_commands_of_the_session() -> None:
    sources = "".join(file.read_text() for file in (SOURCE_FOLDER / "flows" / "stages").glob("*.py"))
    sent = set(re.findall(r'call_trainer\(run, "(\w+)"', sources))
    assert {"warm_start", "measure_pass_rates", "train", "validate", "evaluate", "export"} == sent
    assert [name for name in sent if not callable(getattr(Session, name, None))] == []


class Pipes(NamedTuple):
    """A channel, and its other end."""

    channel: Channel
    commands: int
    replies: int


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    (reads, commands), (replies, writes) = os.pipe(), os.pipe()
    channel = Channel(reads, writes)
    yield Pipes(channel, commands, replies)
    for close in (channel._replies.close, *(partial(os.close, end) for end in (reads, commands, replies))):
        with suppress(OSError):
            close()


def test_commands_arrive_in_parts(pipes: Pipes) -> None:
    commands = pipes.channel.commands(lambda: False)
    os.write(pipes.commands, b'{"command": "a"}\n{"command": "b"}\n{"comm')
    assert [next(commands), next(commands)] == [{"command": "a"}, {"command": "b"}]
    os.write(pipes.commands, b'and": "c"}\n{"command": "torn')
    assert next(commands) == {"command": "c"}
    os.close(pipes.commands)
    assert next(commands, None) is None


def test_no_command_is_read_after_a_stop(pipes: Pipes) -> None:
    os.write(pipes.commands, b'{"command": "a"}\n{"command": "b"}\n')
    assert list(pipes.channel.commands(lambda: True)) == []
    answers = iter([False, False, True])
    assert list(pipes.channel.commands(lambda: next(answers))) == [{"command": "a"}]


def test_replies_are_lines_without_a_required_reader(pipes: Pipes, caplog: pytest.LogCaptureFixture) -> None:
    for text in "ab":
        pipes.channel.send({"event": "note", "text": text})
    assert os.read(pipes.replies, 1000) == b'{"event": "note", "text": "a"}\n{"event": "note", "text": "b"}\n'
    assert caplog.text == ""
    os.close(pipes.replies)
    pipes.channel.send({"event": "note", "text": "c"})
    assert "no process reads the replies any more; continuing until the next checkpoint" in caplog.text


@pytest.mark.parametrize(("error", "code"), [(DataError("no inputs"), 1), (StopRequestedError("stopped"), 75)])
def test_error_before_the_first_command_is_reported(monkeypatch, tmp_path, pipes, caplog, error, code) -> None:
    def fails(*given: object, **named: object) -> Session:
        raise error

    monkeypatch.setattr(process, "Session", fails)
    Origin(RunConfig()).write(tmp_path)
    assert process.run(tmp_path, pipes.channel, StopFlag(lambda: None)) == code
    assert str(error) in caplog.text
    reply = {"event": "error", "command": "start", "type": type(error).__name__, "message": str(error)}
    assert json.loads(os.read(pipes.replies, 1000)) == reply
