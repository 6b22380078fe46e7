"""A command that was told to end ends though its Prefect server is gone; nothing else is ever ended."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from flows.server.api import LocalServer
from flows.server.untold import not_kept_by
from tests.flows.conftest import Reference, ended, start, under, wait_until
from tests.flows.serving import serving

COMMAND = """
import signal, sys, time
from flows.server.api import LocalServer
from flows.server import untold
signal.signal(signal.SIGINT, lambda *_: None)
untold.own_process()
untold.PATIENCE_S = 0.5
with untold.not_kept_by(sys.argv[1], lambda: print("the screen is in order", flush=True)):
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""
"""It does not end by itself, as Prefect's engine while its server is away."""


def told_to_end(url: str) -> "subprocess.Popen[str]":
    process = start([sys.executable, "-c", COMMAND, url], os.environ)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    return process


def test_without_its_server_a_command_that_was_told_to_end_ends() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/api"
        done = ended(told_to_end(url))
    assert (done.code, done.out) == (75, "the screen is in order\n")
    assert f"Prefect was not told, since no server answers at {url}" in done.err


def test_while_its_server_answers_it_is_left_alone() -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

    with serving(Handler) as server:
        process = told_to_end(f"{server}/api")
        wait_until(lambda: len(asked) >= 4 or process.poll() is not None, "it asks for longer than its patience")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    done = ended(process)
    assert (done.code, "Exception ignored" in done.err) == (75, False), done.err


def test_a_process_that_is_no_command_is_not_watched() -> None:
    with not_kept_by("http://127.0.0.1:1/api", lambda: None):
        assert "untold" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.lengthy
@pytest.mark.prefect
@pytest.mark.slow
def test_a_run_whose_server_is_killed_saves_and_ends_when_told(
    reference: Reference, artifacts_root: Path, tmp_path: Path
) -> None:
    for stage in ("datasets", "filtered", "models", "tokenizers"):
        shutil.copytree(reference.millrace.root / stage, artifacts_root / stage)
    server = LocalServer(tmp_path)
    server.wait()
    millrace = under(server, artifacts_root)
    endless = ("trainer.total_steps=100000", "trainer.steps_per_chunk=50000", "validation.every_steps=0")
    process = millrace.start("run", "experiment=debug", *endless)
    wait_until(lambda: any(artifacts_root.glob("runs/*/metrics.jsonl")) and len(millrace.steps()) > 3, "a few steps")
    server._process.kill()
    process.send_signal(signal.SIGTERM)
    stopped = ended(process)
    assert stopped.code == 75, stopped.err
    assert "Prefect was not told, since no server answers" in stopped.err
    assert "Traceback" not in stopped.err
    (saved,) = (millrace.run_dir() / "checkpoints").glob("step-*")
    assert saved.name == f"step-{max(millrace.steps()):06d}"


DONE = """
import sys, threading
from flows.cli import leave
from flows.server.untold import not_kept_by

def command():
    with not_kept_by(sys.argv[1], lambda: None):
        print("done", flush=True)
    threading._register_atexit(threading.Event().wait)
    if sys.argv[2:]:
        raise SystemExit(int(sys.argv[2]))

leave(command)
"""
"""At its end it waits for ever, as Prefect does for the events that no server takes."""


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.lengthy), 75])
def test_without_its_server_a_command_that_has_done_its_work_ends_with_its_own_code(code: int) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/api"
        done = ended(start([sys.executable, "-c", DONE, url, str(code)], os.environ))
    assert (done.code, done.out) == (code, "done\n"), done.err
    assert done.err == f"Prefect was not told of the end, since no server answers at {url}\n"


RUNS = """
import os, sys
from pathlib import Path
from flows.cli import leave
from flows.commands.run import flow_of_a_command
from flows.server.api import _servers, start_prefect

def command():
    api = start_prefect(Path(sys.argv[1]))
    from prefect import flow
    from rlcore.errors import MillraceError

    @flow
    def work():
        _servers[api.home]._process.kill()
        if sys.argv[2] == "fails":
            raise MillraceError("our own error")
        return "its result"

    with flow_of_a_command(api, verbose=False):
        print(work(), flush=True)

leave(command)
"""


@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "out", "err"),
    [
        pytest.param("succeeds", 0, "its result\n", "", marks=pytest.mark.lengthy),
        ("fails", 1, "", "our own error\n"),
    ],
)
def test_a_flow_whose_own_server_dies_ends_as_its_work_does(
    how: str, code: int, out: str, err: str, tmp_path: Path
) -> None:
    done = ended(start([sys.executable, "-c", RUNS, str(tmp_path), how], os.environ))
    assert (done.code, done.out) == (code, out), done.err
    assert "Traceback" not in done.err
    told = [line for line in done.err.splitlines(keepends=True) if not line.startswith("Prefect was not told")]
    assert "".join(told) == err
