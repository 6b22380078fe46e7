"""The trainer's client with a real process that speaks the protocol, and the protocol's messages."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Thread, Timer

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.server import launch
from flows.server.launch import log_tail
from flows.work import trainer
from flows.work.protocol import CheckpointSaved, Done, Event, Failed, Note, Progress, RunEvent, Validated, parse_reply
from flows.work.slots import SlotRequest, Slots
from flows.work.trainer import CHILD_ENVIRONMENT, WAITS_FOR_SLOTS, LogTail, TrainerProcess, trainer_logs
from rlcore.errors import DataError, MillraceError, NonFiniteError, StopRequestedError, WorkerLostError
from rlcore.run.watchdog import read_failures
from tests.flows.conftest import wait_until
from tests.helpers import small_trainer
from tests.helpers.hub_server import HUB_ID, Repository, serving
from tests.models.tiny import write_model


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        (b'{"event": "note", "text": "hello"}', Note("hello")),
        (b'{"event": "checkpoint", "step": 20, "path": "/x"}', CheckpointSaved(20, "/x")),
        (b'{"event": "validated", "name": "a", "step": 1, "summary": {"x": 1.5}}', Validated("a", 1, {"x": 1.5})),
        (b'{"event": "done", "command": "train", "result": {"step": 2}}', Done("train", {"step": 2})),
        (b'{"event": "error", "command": "c", "type": "T", "message": "m"}', Failed("c", "T", "m")),
        (b'{"event": "alarm", "step": 3, "text": "x"}', RunEvent("alarm", {"step": 3, "text": "x"})),
        (b'{"event": "progress", "stage": "s", "step": 1, "total_steps": 9, "metrics": {}, "eta_s": NaN}',
         Progress("s", 1, 9, {}, to_step=None, eta_s=None, tokens_per_s=None)),
        (b'{"event": "progress", "stage": "s", "step": 1, "total_steps": 9, "metrics": {"a": 1}, "to_step": 5, "eta_s":'
         b' 2.5, "tokens_per_s": 7.5}', Progress("s", 1, 9, {"a": 1.0}, to_step=5, eta_s=2.5, tokens_per_s=7.5)),
    ],
)  # fmt: skip
def test_lines_are_parsed_as_replies(line, reply):
    assert parse_reply(line) == reply


@pytest.mark.parametrize("line", [b"hello", b"[1]", b"{}", b'{"event": 1}', b'{"event": "note"}'])
def test_invalid_line_is_refused(line):
    with pytest.raises(ValueError, match=r"not a reply|Expecting value|Field required|Missing required"):
        parse_reply(line)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("DataError", DataError),
        *((name, MillraceError) for name in ("KeyError", "annotations", "EXIT_RESUMABLE", "Path")),
    ],
)
def test_error_keeps_its_class(kind, expected):
    error = Failed("train", kind, "row 7").error()
    assert (type(error), str(error)) == (expected, "row 7")


WAIT_S = 60.0
SMALL_TRAINER = str(Path(small_trainer.__file__))


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lines: list[str] = []

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, Progress)]

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@pytest.fixture
def heard() -> Heard:
    return Heard()


def client_of(
    run_dir: Path,
    behavior: str,
    on_event: Callable[[Event], None],
    on_line: Callable[[str], None] = print,
    root: Path | None = None,
    priority: int = 0,
) -> TrainerProcess:
    request, command = SlotRequest(run_dir.name, 1, priority, time.time(), os.getpid()), (SMALL_TRAINER, behavior)
    slots = Slots(root or run_dir)
    made = TrainerProcess(run_dir, stop_wait_s=WAIT_S, slots=slots, request=request, command=command)
    made.on_event, made.on_line = on_event, on_line
    return made


@pytest.fixture
def start(tmp_path: Path, heard: Heard) -> Iterator[Callable[..., TrainerProcess]]:
    with ExitStack() as started:
        yield lambda behavior: started.enter_context(
            closing(client_of(tmp_path, behavior, heard.events.append, heard.lines.append))
        )


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_process_serves_calls_until_closed(start, heard, tmp_path):
    logs = tmp_path / "logs"
    (logs / "trainer-12.log").mkdir(parents=True)
    others = ("trainer-2.log", "trainer-10.log", "trainer-13-copy.log", "trainer-.log", "trainer-14.txt")
    for name in others:
        (logs / name).touch()
    with start("well") as client:
        assert client.pid is None
        assert client.call("train", to_step=2) == {"step": 2}
        first = client.pid
        assert client.call("train", to_step=4) == {"step": 4}
        assert client.pid == first
    assert heard.steps == [1, 2, 3, 4]
    assert heard.lines == ["ready", "closed"]
    assert trainer_logs(logs) == {number: logs / f"trainer-{number}.log" for number in (2, 10, 11)}
    assert len(list(logs.iterdir())) == len(others) + 2
    assert not is_running(first)


def test_process_has_separate_session(start):
    with start("well") as client:
        who = client.call("who")
        assert who["session"] == who["pid"] == client.pid
        streams = {str(Path(f"/proc/{client.pid}/fd/{number}").readlink()) for number in (0, 1, 2)}
    assert "/dev/null" in streams
    assert all("pipe" not in stream and "pts" not in stream for stream in streams)


def test_call_after_kill_resumes(start, heard, tmp_path):
    with start("killed") as client:
        with pytest.raises(WorkerLostError, match=r"(?s)signal SIGKILL.*trainer-1\.log.*about to be killed"):
            client.call("train", to_step=5)
        assert client.call("train", to_step=5) == {"step": 5}
    assert heard.steps == [1, 2, 3, 3, 4, 5]
    assert [(failure.kind, failure.step) for failure in read_failures(tmp_path)] == [("lost worker", 3)]


def test_dead_process_with_held_pipe_is_lost(start, tmp_path):
    with start("orphans") as client:
        with pytest.raises(WorkerLostError):
            client.call("train", to_step=5)
        helper = int((tmp_path / "helper").read_text())
        wait_until(lambda: not is_running(helper), "the end of the helper")


@pytest.mark.parametrize(
    ("behavior", "kind", "message"),
    [
        ("nonfinite", NonFiniteError, "loss is nan"),
        ("bug", MillraceError, "KeyError: 'x'"),
        ("babble", WorkerLostError, "hello"),
    ],
)
def test_error_is_raised_as_its_class(start, behavior, kind, message):
    with start(behavior) as client, pytest.raises(MillraceError, match=message) as caught:
        client.call("train", to_step=9)
    assert caught.type is kind


def test_stopped_process_is_not_lost(start):
    with start("slow") as client:
        client.call("who")
        pid = client.pid
        Timer(0.3, os.kill, (pid, signal.SIGTERM)).start()
        with pytest.raises(StopRequestedError, match="saved step"):
            client.call("train", to_step=100_000)
    assert not is_running(pid)


CALLER = """
import json, signal, sys
from pathlib import Path
from flows.work.protocol import Note, Progress
from flows.work.slots import Slots, SlotRequest
from flows.work.trainer import TrainerProcess
run_dir, behavior, stop_wait_s = Path(sys.argv[1]), sys.argv[3], float(sys.argv[4])
signal.signal(signal.SIGINT, signal.default_int_handler)
events = []
def heard(event):
    events.append(event)
    if isinstance(event, Progress):
        (run_dir / "under-way").touch()
client = TrainerProcess(run_dir, stop_wait_s=stop_wait_s, slots=Slots(run_dir),
                        request=SlotRequest("a", 1, 0, 0.0, 0), command=(sys.argv[2], behavior))
client.on_event = heard
client.call("who")
(run_dir / "pid").write_text(str(client.pid))
try:
    client.call("train", to_step=100_000)
except KeyboardInterrupt:
    notes = [event.text for event in events if isinstance(event, Note)]
    print(json.dumps([client.pid, notes, [event.step for event in events if isinstance(event, Progress)]]))
"""


def start_caller(folder: Path, behavior: str, stop_wait_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CALLER, str(folder), SMALL_TRAINER, behavior, str(stop_wait_s)]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: (folder / "under-way").exists() or caller.poll() is not None, "a step")
    return caller


@pytest.mark.parametrize(("behavior", "stop_wait_s"), [("slow", 60), ("deaf", 1)])
def test_interrupt_lets_process_save_or_ends_it(tmp_path, behavior, stop_wait_s):
    caller = start_caller(tmp_path, behavior, stop_wait_s)
    caller.send_signal(signal.SIGINT)
    pid_after, notes, steps = json.loads(caller.communicate(timeout=WAIT_S)[0])
    assert pid_after is None
    assert not is_running(int((tmp_path / "pid").read_text()))
    if behavior == "slow":
        saved = int((tmp_path / "step").read_text())
        assert (f"saved step {saved}" in notes, steps[-1]) == (True, saved)


def train_and_raise(client: TrainerProcess, error: BaseException) -> None:
    with client:
        client.call("train", to_step=2)
        raise error


def test_interrupt_between_calls_saves_without_popen_poll(start, heard, monkeypatch):
    """An interrupt inside `Popen.poll` left its lock taken, and the following stop never ended."""

    def poll(process: "subprocess.Popen[bytes]") -> None:
        raise AssertionError("an interrupt here may leave the lock taken")

    client = start("good")
    monkeypatch.setattr(subprocess.Popen, "poll", poll)
    with pytest.raises(KeyboardInterrupt):
        train_and_raise(client, KeyboardInterrupt())
    assert client.pid is None
    assert heard.notes[-1] == "saved step 2"


def test_deleted_log_does_not_end_a_run(tmp_path):
    def on_event(event: Event) -> None:
        for log in (tmp_path / "logs").iterdir():
            log.unlink()

    with client_of(tmp_path, "well", on_event) as client:
        assert client.call("train", to_step=5) == {"step": 5}


def test_process_is_closed_after_our_error(start, heard):
    with pytest.raises(KeyError):
        train_and_raise(start("good"), KeyError())
    assert heard.lines[-1] == "closed"


class Run(Heard):
    def __init__(self, root: Path, name: str, to_steps: tuple[int, ...], priority: int = 0) -> None:
        super().__init__()
        self.to_steps = to_steps
        self.folder = root / name
        self.folder.mkdir()
        self.client = client_of(self.folder, "slow", self.events.append, root=root, priority=priority)
        self.thread = Thread(target=self._train)

    def _train(self) -> None:
        with self.client:
            for to_step in self.to_steps:
                self.client.call("train", to_step=to_step)

    @property
    def step(self) -> int:
        file = self.folder / "step"
        return int(file.read_text() or 0) if file.exists() else 0

    @property
    def waits(self) -> list[str]:
        events = [event for event in self.events if isinstance(event, RunEvent)]
        return [event.data["text"] for event in events if event.name == WAITS_FOR_SLOTS]


def test_run_of_higher_priority_gets_the_slot(tmp_path):
    Slots(tmp_path).set_devices([""])
    low, urgent = Run(tmp_path, "low", (20, 21)), Run(tmp_path, "urgent", (2,), 5)
    low.thread.start()
    wait_until(lambda: low.step == 1, "a change")
    urgent.thread.start()
    wait_until(lambda: urgent.step == 1, "a change")
    assert low.step == 20
    low.thread.join(WAIT_S)
    assert (low.step, urgent.step) == (21, 2)
    assert "waits for 1 of 1 slots with priority 5: 0 free, held by low (priority 0)" in urgent.waits[0]
    assert "held by urgent (priority 5)" in low.waits[-1]
    assert Slots(tmp_path).read_state().holders == {}


def test_damaged_slots_file_ends_no_trainer(tmp_path):
    slots = Slots(tmp_path)
    slots.set_devices([""])
    low = Run(tmp_path, "low", (8, 9))
    low.thread.start()
    wait_until(lambda: low.step == 1, "a change")
    (slots.folder / "slots.json").write_text("{")
    low.thread.join(WAIT_S)
    assert low.step == 9


@pytest.mark.parametrize("where", ["on_wait", "on_event"])
def test_error_during_step_lets_process_save(tmp_path, where):
    def fail(event: Event | None = None) -> None:
        if low.step or event:
            raise MillraceError("the flow run was cancelled")

    low = Run(tmp_path, "low", ())
    setattr(low.client, where, fail)
    with low.client, pytest.raises(MillraceError, match="the flow run was cancelled"):
        low.client.call("train", to_step=1_000)
    assert f"signal {int(signal.SIGTERM)}" in (low.folder / "logs" / "trainer-1.log").read_text()
    assert low.step
    if where == "on_wait":
        assert low.notes[-1] == f"saved step {low.step}"


def test_killed_flow_keeps_slot_until_trainer_has_saved(tmp_path):
    Slots(tmp_path).set_devices([""])
    parent = start_caller(tmp_path, "slow", 5)
    trainer = psutil.Process(int((tmp_path / "pid").read_text()))
    trainer.suspend()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert parent.returncode == -signal.SIGKILL
    assert Slots(tmp_path).read_state().num_free == 0
    trainer.resume()
    wait_until(lambda: Slots(tmp_path).read_state().num_free == 1, "a change")
    assert f"signal {int(signal.SIGTERM)}" in (tmp_path / "logs" / "trainer-1.log").read_text()
    # The kernel closes the files of a process before it ends the process.
    wait_until(lambda: not is_running(trainer.pid), "a change")


def test_growing_log_is_read_by_line(tmp_path):
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"one\n\xff two\r\n10%\r 99%\r100%\nthr")
    tail = LogTail(log)
    assert not tail.is_at_end()
    assert list(tail.new_lines()) == ["one", "\N{REPLACEMENT CHARACTER} two", "100%"]
    assert (tail.rest, tail.is_at_end(), list(tail.new_lines())) == ("thr", True, [])
    with log.open("ab") as file:
        file.write(b"ee\n\nfour")
    assert not tail.is_at_end()
    assert (list(tail.new_lines()), tail.rest) == (["three", ""], "four")
    log.unlink()
    assert (list(tail.new_lines()), tail.is_at_end()) == ([], True)
    assert log_tail(log) == f"The end of {log}:"


def test_large_log_is_read_in_pieces(tmp_path, monkeypatch):
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"one\n\n  \ntwo\nthree\n")
    assert log_tail(log).splitlines()[1:] == ["    one", "    two", "    three"]
    monkeypatch.setattr(trainer, "MAX_READ_BYTES", 9)
    tail = LogTail(log)
    assert list(tail.new_lines()) == ["one", "", "  "]
    assert not tail.is_at_end()
    assert list(tail.new_lines()) == ["two", "three"]
    assert tail.is_at_end()
    monkeypatch.setattr(launch, "MAX_TAIL_BYTES", 9)
    monkeypatch.setattr(launch, "NUM_LAST_LINES", 1)
    log.write_bytes(b"already in use\ntw\r99%\r100%\r\n\n")
    assert log_tail(log) == f"The end of {log}:\n    100%"
    assert log_tail(log, {"100%": "Be glad."}).startswith("Be glad. The end of")


def test_trainer_has_module_path_of_its_flow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/first", here := str(tmp_path), "/second"])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    found = trainer.trainer_variables(None)
    places = found["PYTHONPATH"].split(os.pathsep)
    assert ([place for place in places if place in ("/first", "/second", "")], places[-1]) == (
        ["/first", "/second"],
        here,
    )
    assert places.count(here) == 1
    assert found["TOKENIZERS_PARALLELISM"] == "true"
    assert found["PYTHONFAULTHANDLER"] == CHILD_ENVIRONMENT["PYTHONFAULTHANDLER"] == "1"


LOAD = """
import sys, torch
from rlcore.config.model import ModelConfig
from rlcore.models.load import load_policy
load_policy(sys.argv[1], model=ModelConfig(), device=torch.device("cpu"))
"""


def test_libraries_print_nothing_about_a_model_of_the_hub(tmp_path):
    model = write_model("qwen2-tied", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "model.extra": torch.zeros(2)}, model / "model.safetensors", metadata={"format": "pt"})
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    with serving({HUB_ID: Repository({"a" * 40: files}, {"main": "a" * 40})}) as hub:
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        environment = {**trainer.trainer_variables(None), **own, "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-P", "-c", LOAD, HUB_ID]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "1 weights are ignored, first model.extra" in done.stderr
    assert done.stderr.count("\n") == 1
