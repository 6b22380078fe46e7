"""The Prefect server of a command ends with the command. Other servers are checked before use."""

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler

import psutil
import pytest

from tests.flows.conftest import REPOSITORY, Millrace, wait_until
from tests.helpers.serving import serving
from tests.helpers.stack import prefect_home

pytestmark = pytest.mark.prefect

STARTER = """
import sys, time
from pathlib import Path
from flows.server.api import start_prefect
server = start_prefect(Path(sys.argv[1]))
assert start_prefect(Path(sys.argv[1])) is server, "one server for a process"
server.wait()
print(server.url, flush=True)
time.sleep(600)
"""


def test_a_killed_command_leaves_no_server(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    root = tmp_path / "why? 50%41 #1"
    prefect_home(root / "prefect")
    (root / "uvicorn.py").write_text("raise SystemExit('somebody else\\'s uvicorn.py')\n")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", STARTER, str(root)], cwd=root, stdout=subprocess.PIPE, text=True, env=environment
    ) as starter:
        url = starter.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        (server,) = psutil.Process(starter.pid).children()
        assert {"prefect.db", "prefect.db-wal"} <= {file.name for file in (root / "prefect").iterdir()}
        assert [folder.name for folder in tmp_path.iterdir()] == [root.name]
        starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server's end")


OTHERS = {
    "/old/api/health": b"true", "/old/api/admin/version": b'"2.20.1"', "/other/api/health": b"<html>hello</html>",
}  # fmt: skip
"""Responses of an old Prefect, and of something else."""


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in OTHERS else 404)
        self.end_headers()
        self.wfile.write(OTHERS.get(self.path, b""))


def test_a_server_absent_or_of_another_version_or_kind_is_refused(artifacts_root):
    with serving(Stranger) as stranger:
        for url, words in (
            (f"{stranger}/old/api/", "is Prefect 2.20.1, and 3."),
            (f"{stranger}/other/api/", "something else than a Prefect server answers"),
            ("http://127.0.0.1:9/api", "no Prefect server answers at http://127.0.0.1:9/api"),
        ):
            done = Millrace(artifacts_root, {"PREFECT_API_URL": url})("run", "experiment=debug", code=1)
            assert "PREFECT_API_URL: " in done.err
            assert words in done.err
            assert "Traceback" not in done.err
            assert list(artifacts_root.iterdir()) == []
