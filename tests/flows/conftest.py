"""Shared Prefect server, reference run and command line of the tests of flows."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.cli import app, exit_code
from flows.server.api import LocalServer
from flows.stages.stage import StageStatus
from flows.work.open_run import with_absolute_paths
from flows.work.plan import RunPlan
from rlcore.checkpoint.catalog import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.run.layout import RunLayout
from rlcore.tracking.lineage import Origin
from tests.helpers.forked import ForkedCommand
from tests.helpers.repeatable import repeatable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

REPOSITORY = Path(__file__).resolve().parents[2]
HELD = Path(__file__).parent / "held"
"""Folder for PYTHONPATH: its sitecustomize holds a trainer in a phase."""
SMALL = (
    "experiment=debug", "trainer.total_steps=60", "trainer.steps_per_chunk=20", "validation.every_steps=20",
    "runtime.stop_deadline_s=200", "alarms.entropy_below=50",
)  # fmt: skip
"""The debug experiment with chunks long enough for a kill, time to save on a busy disk, and an alarm."""
WAIT_S = 280.0


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


_started: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Kill the processes of a failed test."""
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
    """Start a command in a separate session."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    _started.append(process)
    return process


def forked(
    module: str, words: Sequence[str], environment: Mapping[str, str], folder: Path = REPOSITORY
) -> ForkedCommand:
    """Fork `python -m MODULE ARGUMENTS` from a process that has imported most of the module's imports."""
    process = ForkedCommand(module, words, environment, folder)
    _started.append(process)
    return process


@dataclass
class Millrace:
    """The command line with one root and one Prefect server."""

    root: Path
    environment: Mapping[str, str]

    def start(self, verb: str, *settings: str, spawned: bool = False) -> "subprocess.Popen[str]":
        """Start a command; `spawned`: with a separate command line, which others see."""
        root = [f"paths.root={self.root}"] if any("=" in word for word in settings) else []
        words, environment = [*verb.split(), *settings, *root], os.environ | self.environment
        if spawned:
            return start([sys.executable, "-m", "flows.cli", *words], environment)
        return forked("flows.cli", words, environment)

    def __call__(self, verb: str, *settings: str, code: int | None = None) -> Finished:
        return ended(self.start(verb, *settings), code)

    def run_dir(self) -> Path:
        """Return the folder of the only run."""
        (run_dir,) = (self.root / "runs").iterdir()
        return run_dir

    def steps(self) -> list[int]:
        return [record["step"] for record in journal(self.run_dir())]

    def wait_for_step(self, step: int, run: str = "*") -> None:
        """Wait until a run, by default the only one, has this step in its journal."""

        def is_there() -> bool:
            found = list(self.root.glob(f"runs/{run}/metrics.jsonl"))
            return bool(found) and any(record["step"] >= step for record in journal(found[0].parent))

        wait_until(is_there, f"step {step} of {run}")


def ended(process: "subprocess.Popen[str]", code: int | None = None) -> Finished:
    """Wait for the end of a command, and require its exit code."""
    out, err = process.communicate(timeout=WAIT_S)
    assert code in (None, process.returncode), err
    return Finished(process.returncode, out, err)


def in_this_process(capsys: pytest.CaptureFixture[str], *words: str, code: int | None = None) -> Finished:
    """Run a command, and require its exit code."""
    done = Finished(exit_code(lambda: app(words)), *capsys.readouterr())
    assert code in (None, done.code), done
    return done


def journal(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete step lines of a run's journal."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    return [record for record in map(json.loads, lines) if "metrics" in record]


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the reproducible metrics of each step."""
    return {record["step"]: repeatable(record["metrics"]) for record in journal(run_dir)}


def mlflow_rows(root: Path, query: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        return database.execute(query).fetchall()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll at most a tenth of the time, since a polled server works too, and fail after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while True:
        asked = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"not after {WAIT_S:.0f} s: {what}"
        time.sleep(min(max(0.02, 10 * (now - asked)), 1))


def changed(config: RunConfig, section: str, **settings: object) -> RunConfig:
    """Return the settings with these changes in a section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})


def commit(config: RunConfig, step: int, metrics: Mapping[str, float] | None = None, num_bytes: int = 1) -> Path:
    """Write a checkpoint of this step without training, and return its folder."""
    layout = RunLayout.of(config)
    state = TrainerState(
        step=step, policy_version=step, num_prompts_drawn=8, num_tokens=9, kl_coef=0.0,
        settings_fingerprint=settings_fingerprint(config),
    )  # fmt: skip
    store = CheckpointStore(layout.checkpoints, config.checkpoint, config)
    with store.writing(state, metrics or {}) as folder:
        (folder / "weights").write_bytes(bytes(num_bytes))
    return store.path_of(step)


@pytest.fixture
def config(artifacts_root: Path) -> RunConfig:
    return load_config(["experiment=debug", f"paths.root={artifacts_root}"])


@pytest.fixture
def layout(config: RunConfig) -> RunLayout:
    """Return the layout of a run whose folder has only its settings."""
    layout = RunLayout.of(config)
    layout.run_dir.mkdir(parents=True)
    Origin(with_absolute_paths(config, layout)).write(layout.run_dir)
    return layout


def stage_of(plan: RunPlan, name: str) -> StageStatus:
    return next(stage for stage in plan.stages if stage.name == name)


@pytest.fixture(scope="package")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Start a Prefect server with a separate database, which runs until the tests of flows end."""
    from tests.helpers.stack import prefect_home

    server = LocalServer(prefect_home(tmp_path_factory.mktemp("prefect")))
    server.wait()
    yield server
    server.stop()


@pytest.fixture
def client(prefect_server: LocalServer) -> "Iterator[SyncPrefectClient]":
    """Return a client of the server, which this process uses too. Tasks store their results."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_RESULTS_PERSIST_BY_DEFAULT
    from prefect.settings import temporary_settings as settings

    server = {PREFECT_API_URL: prefect_server.url, PREFECT_API_AUTH_STRING: prefect_server.login}
    with settings(server | {PREFECT_RESULTS_PERSIST_BY_DEFAULT: True}), get_client(sync_client=True) as client:
        yield client


def under(server: LocalServer, root: Path) -> Millrace:
    return Millrace(root, {**server.environment, "PREFECT_HOME": str(server.home)})


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of SMALL."""

    millrace: Millrace
    done: Finished

    @property
    def run_dir(self) -> Path:
        return self.millrace.run_dir()


@pytest.fixture(scope="package")
def reference(prefect_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    command = under(prefect_server, tmp_path_factory.mktemp("reference"))
    done = command("run", *SMALL, code=0)
    return Reference(command, done)


@pytest.fixture
def millrace(prefect_server: LocalServer, reference: Reference, artifacts_root: Path, empty_store: Path) -> Millrace:
    """Return the command line on a root with data, initial policy and an empty MLflow store, and without a run."""
    shutil.copy(empty_store, artifacts_root / "mlflow.db")
    for stage in ("datasets", "filtered", "models", "tokenizers"):
        shutil.copytree(reference.millrace.root / stage, artifacts_root / stage)
    return under(prefect_server, artifacts_root)


@pytest.fixture
def bare(artifacts_root: Path) -> Millrace:
    """Return the command line on an empty root, without a Prefect server."""
    return Millrace(artifacts_root, {})


def basic(login: str) -> str:
    return f"Basic {b64encode(login.encode()).decode()}"


@dataclass(frozen=True)
class Api:
    """Prefect's API, with the login of its server."""

    url: str
    login: str

    def filter(self, what: str, **body: Any) -> list[dict[str, Any]]:
        return self.ask(f"{what}/filter", body)

    def events(self, run_id: str, name: str) -> list[dict[str, Any]]:
        """Return payloads of a run's events of that name, oldest first."""
        chosen = {"event": {"name": [f"millrace.{name}"]}, "resource": {"id": [f"millrace.run.{run_id}"]}}
        found = self.ask("events/filter", {"filter": {**chosen, "order": "ASC"}})
        return [one["payload"] for one in found["events"]]

    def ask(self, path: str, body: Mapping[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": basic(self.login)}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        request.method = method or request.get_method()
        for last in (False,) * 9 + (True,):
            try:
                with urllib.request.urlopen(request) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                if error.code != 503 or last:  # sqlite is busy; Prefect's own client asks again too
                    raise
                time.sleep(1)

    def flow_runs(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return self.filter("flow_runs", flows={"name": {"any_": list(names)}}, sort="START_TIME_ASC")


@pytest.fixture
def api(prefect_server: LocalServer) -> Api:
    return Api(prefect_server.url, prefect_server.login)
