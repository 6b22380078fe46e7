"""Servers for the tests of `data.openenv`: one of the package openenv, and one whose replies a test chooses.

The package needs a separate environment, because its versions exclude those of vLLM. `OPENENV_PYTHON` names its
interpreter. Without it, this interpreter must have the package, or the tests are skipped.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from flows import SOURCE_FOLDER
from flows.stack.services import free_port
from tests.helpers.pages import BLOCK

PAGE = SOURCE_FOLDER / "docs" / "environments.md"


def block_of_the_page(name: str) -> str:
    """The Python block of docs/environments.md that begins with the name of its file."""
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return next(block for _, block in blocks if block.startswith(f"# {name}\n"))


@contextmanager
def game_server(folder: Path) -> Iterator[str]:
    """Run the server of the documentation with the package openenv, and yield its address."""
    python = os.environ.get("OPENENV_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import openenv.core.env_server"], capture_output=True, check=False).returncode:
        pytest.skip("needs the package openenv in this environment, or in that of the interpreter OPENENV_PYTHON")
    port = free_port()
    file = folder / "guess_server.py"
    file.write_text(re.sub(r"port=\d+", f"port={port}", block_of_the_page(file.name)))
    server = subprocess.Popen([python, str(file)])
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


class Replies:
    """The schema and the replies of a server, and what it received. `reply`: from a message to text, or None to close
    the session."""

    def __init__(self) -> None:
        self.action: dict[str, Any] = {"guess": {"type": "string"}}
        self.observation: dict[str, Any] = {"hint": {"type": "string"}, "turn": {"type": "integer"}}
        self.reply: Callable[[dict[str, Any]], str | None] = lambda message: observed(hint=message["type"], turn=1)
        self.received: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open, self.sessions, self.ends, self.address = 0, list[ServerConnection](), Event(), ""

    def schema(self) -> str:
        general = {"metadata": {}, "done": {}, "reward": {}}
        parts = {"action": {"metadata": {}, **self.action}, "observation": {**general, **self.observation}}
        return json.dumps({name: {"properties": properties} for name, properties in parts.items()})


def observed(*, done: Any = False, reward: Any = None, **fields: Any) -> str:
    data = {"observation": fields | {"metadata": {}}, "done": done, "reward": reward}
    return json.dumps({"type": "observation", "data": data})


def failed(code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": "as asked", "code": code, **more}})


@contextmanager
def any_server() -> Iterator[Replies]:
    """Run a server of the protocol and yield its replies."""
    replies = Replies()

    def play(session: ServerConnection) -> None:
        replies.num_open += 1
        replies.sessions.append(session)
        try:
            for text in session:
                replies.received.append(json.loads(text))
                if (reply := replies.reply(replies.received[-1])) is None:
                    return
                session.send(reply)
        except ConnectionClosed:
            pass
        finally:
            replies.num_open -= 1

    def begin(session: ServerConnection, request: Any) -> Any:
        replies.keys.append(request.headers.get("Authorization"))
        return session.respond(HTTPStatus.OK, replies.schema()) if request.path == "/schema" else None

    with serve(play, "127.0.0.1", 0, process_request=begin) as server:
        replies.address = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield replies
        finally:
            replies.ends.set()
            for session in replies.sessions:
                session.close()
            server.shutdown()
            thread.join()
