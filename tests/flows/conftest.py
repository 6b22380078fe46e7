"""One Prefect server for all tests of flows, one finished run to compare with, and the command line as a process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.cli import app, exit_code
from flows.server.api import LocalServer
from tests.helpers.forked import ForkedCommand
from tests.helpers.repeatable import repeatable

REPOSITORY = Path(__file__).resolve().parents[2]
HELD = Path(__file__).parent / "held"
"""In PYTHONPATH, it lets a trainer stay in a phase."""
SMALL = (
    "experiment=debug",
    "trainer.total_steps=60",
    "trainer.steps_per_chunk=20",
    "validation.every_steps=20",
    "runtime.stop_deadline_s=200",
    "alarms.entropy_below=50",
)
"""The debug experiment with chunks long enough to be killed in, time to save where a disk is busy, and an alarm."""
WAIT_S = 280.0
"""On a machine that others keep busy too."""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


_started: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A test that fails leaves no process behind."""
    yield
    for process in _started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    _started.clear()


def start(command: Sequence[str], environment: Mapping[str, str], folder: Path = REPOSITORY) -> "subprocess.Popen[str]":
    """A command in this checkout or another folder, in a session of its own."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def forked(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path = REPOSITORY
) -> ForkedCommand:
    """`python -m MODULE ARGUMENTS` in a folder, forked from a process that has imported most of it."""
    process = ForkedCommand(module, arguments, environment, folder)
    _started.append(process)
    return process


@dataclass
class Millrace:
    """The command line, with one root and one Prefect server."""

    root: Path
    environment: Mapping[str, str]

    def words(self, verb: str, *settings: str) -> list[str]:
        """What follows `millrace`."""
        root = [f"paths.root={self.root}"] if any("=" in word for word in settings) else []
        return [*verb.split(), *settings, *root]

    def start(self, verb: str, *settings: str, spawned: bool = False) -> "subprocess.Popen[str]":
        """Start a command; `spawned`: with a command line of its own, which others see."""
        words, environment = self.words(verb, *settings), os.environ | self.environment
        if spawned:
            return start([sys.executable, "-m", "flows.cli", *words], environment)
        return forked("flows.cli", words, environment)

    def __call__(self, verb: str, *settings: str) -> Finished:
        """Run a command to its end."""
        return ended(self.start(verb, *settings))

    def run_dir(self) -> Path:
        """The folder of the only run."""
        (run_dir,) = (self.root / "runs").iterdir()
        return run_dir

    def steps(self) -> list[int]:
        """Steps in the run's journal."""
        return [record["step"] for record in journal(self.run_dir())]


def ended(process: "subprocess.Popen[str]") -> Finished:
    """Wait for a command."""
    out, err = process.communicate(timeout=WAIT_S)
    return Finished(process.returncode, out, err)


def in_this_process(capsys: pytest.CaptureFixture[str], *words: str) -> Finished:
    """`millrace WORDS` in this process."""
    code = exit_code(lambda: app(words))
    return Finished(code, *capsys.readouterr())


def journal(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's journal that are steps."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    return [record for record in map(json.loads, lines) if "metrics" in record]


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """What a run has measured at each step, without what the machine says."""
    return {record["step"]: repeatable(record["metrics"]) for record in journal(run_dir)}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll, for a tenth of the time at most: a server that is asked works too. Waiting in vain is a failure."""
    deadline = time.monotonic() + WAIT_S
    while True:
        asked = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"waited {WAIT_S:.0f} s in vain: {what}"
        time.sleep(min(max(0.02, 10 * (now - asked)), 1))


@pytest.fixture(scope="package")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A Prefect server with a database of its own; until the tests of flows are done, for an idle one works too."""
    from tests.helpers.stack import prefect_home

    server = LocalServer(prefect_home(tmp_path_factory.mktemp("prefect")))
    server.wait()
    yield server
    server.stop()


def under(server: LocalServer, root: Path) -> Millrace:
    """The command line with this server."""
    return Millrace(root, {**server.environment, "PREFECT_HOME": str(server.home)})


@dataclass(frozen=True)
class Reference:
    """A run of SMALL from nothing to its report, which nobody disturbed."""

    millrace: Millrace
    done: Finished

    @property
    def run_dir(self) -> Path:
        """Its folder."""
        return self.millrace.run_dir()


@pytest.fixture(scope="package")
def reference(prefect_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The first run of the server."""
    command = under(prefect_server, tmp_path_factory.mktemp("reference"))
    done = command("run", *SMALL)
    assert done.code == 0, done.err
    return Reference(command, done)


@pytest.fixture
def millrace(prefect_server: LocalServer, reference: Reference, artifacts_root: Path, empty_store: Path) -> Millrace:
    """The command line on a root that has data, start model and an empty MLflow store, and no run."""
    shutil.copy(empty_store, artifacts_root / "mlflow.db")
    for stage in ("datasets", "filtered", "models", "tokenizers"):
        shutil.copytree(reference.millrace.root / stage, artifacts_root / stage)
    return under(prefect_server, artifacts_root)


@pytest.fixture
def bare(artifacts_root: Path) -> Millrace:
    """The command line on an empty root, without a Prefect server."""
    return Millrace(artifacts_root, {})


def basic(login: str) -> str:
    """The header of HTTP's basic authentication."""
    return f"Basic {b64encode(login.encode()).decode()}"


@dataclass(frozen=True)
class Api:
    """Prefect's own API, asked with the login of its server."""

    url: str
    login: str

    def filter(self, what: str, **body: Any) -> list[dict[str, Any]]:
        """`POST /<what>/filter`."""
        found: list[dict[str, Any]] = self.post(f"{what}/filter", body)
        return found

    def events(self, run_id: str, name: str) -> list[dict[str, Any]]:
        """Payloads of a run's events of that name, oldest first."""
        chosen = {"event": {"name": [f"millrace.{name}"]}, "resource": {"id": [f"millrace.run.{run_id}"]}}
        found = self.post("events/filter", {"filter": {**chosen, "order": "ASC"}})
        return [one["payload"] for one in found["events"]]

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """`POST /<path>`."""
        request = urllib.request.Request(
            f"{self.url}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": basic(self.login)},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def flow_runs(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Flow runs of flows with these names, oldest first."""
        return self.filter("flow_runs", flows={"name": {"any_": list(names)}}, sort="START_TIME_ASC")


@pytest.fixture
def api(prefect_server: LocalServer) -> Api:
    """Prefect's API."""
    return Api(prefect_server.url, prefect_server.login)
