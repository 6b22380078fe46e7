"""A running stack, and access to it by Prefect's command line, its API and files on disk."""

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.server.api import LocalServer
from flows.server.watch import CANCELLED
from flows.stack.control import down, service_states, up
from flows.stack.state import CLIENT_LOGIN, SECRET_FILE, read_stack, root_login
from rlcore.storage.locks import read_holder
from tests import SHARED_STAGES
from tests.flows.conftest import REPOSITORY, WAIT_S, Api, Millrace, mlflow_rows, wait_until

ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
RETRY = {"type": "SCHEDULED", "name": "AwaitingRetry"}
"""The state that the page's button sends, and `prefect flow-run retry`."""
SUSPEND = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
"""The state that the page's button sends."""


@dataclass(frozen=True)
class Stack:
    root: Path

    @property
    def url(self) -> str:
        return read_stack(self.root).prefect_api_url

    @property
    def login(self) -> str:
        return root_login(self.root)

    @property
    def environment(self) -> dict[str, str]:
        return {"PREFECT_API_URL": self.url, CLIENT_LOGIN: self.login}

    @property
    def api(self) -> Api:
        return Api(self.url, self.login)

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        with (
            temporary_settings({PREFECT_API_URL: self.url, PREFECT_API_AUTH_STRING: self.login}),
            get_client(sync_client=True) as client,
        ):
            yield client

    def prefect(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**self.environment, "PREFECT_HOME": str(self.root / "prefect"), "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *words],
            cwd=REPOSITORY,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def ask(self, path: str, body: Mapping[str, Any] | None = None, method: str | None = None) -> Any:
        return self.api.ask(path, body, method)

    def deployment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(f"deployments/name/{name}")
        return found

    def start(self, name: str, **parameters: Any) -> str:
        made = self.ask(f"deployments/{self.deployment(name)['id']}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(f"flow_runs/{run_id}")
        return found

    def set_state(self, run_id: str, state: Mapping[str, Any]) -> None:
        answer = self.ask(f"flow_runs/{run_id}/set_state", {"state": state})
        assert answer["status"] == "ACCEPT", answer

    def retry_cancelled(self, run_id: str) -> None:
        """Request another try once Prefect's worker has ended the cancelled process, whose slot it takes back."""
        logs = {"flow_run_id": {"any_": [run_id]}}
        is_over = "Cancelled flow run"
        wait_until(
            lambda: any(one["message"].startswith(is_over) for one in self.api.filter("logs", logs=logs)), is_over
        )
        wait_until(lambda: self.run(run_id)["state"]["message"] == CANCELLED, "our message of the cancelled run")
        self.set_state(run_id, RETRY)

    def wait(self, run_id: str, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.run(run_id)["state_type"] in (*states, *ENDS), f"{run_id} is {states}")
        found = self.run(run_id)
        assert found["state_type"] in states, (found["state"]["type"], found["state"]["message"])
        return found

    def newest(self, flow: str = "pipeline") -> dict[str, Any]:
        return self.api.filter("flow_runs", flows={"name": {"any_": [flow]}}, sort="START_TIME_DESC", limit=1)[0]

    def run_dir(self, name: str) -> Path:
        (found,) = self.root.glob(f"runs/{name}-*")
        return found

    def wait_for_step(self, name: str, step: int) -> None:
        Millrace(self.root, {}).wait_for_step(step, f"{name}-*")

    def trainer(self, name: str) -> psutil.Process:
        holder = read_holder(self.run_dir(name) / "run.lock")
        assert holder is not None
        return psutil.Process(holder.pid)

    def process_of(self, run_id: str) -> psutil.Process:
        return psutil.Process(int(self.run(run_id)["infrastructure_pid"].rpartition(":")[2]))

    def steps_saved(self, name: str) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.run_dir(name) / "checkpoints").glob("step-*"))

    def mlflow_status(self, name: str) -> str:
        query = "select status from runs join tags using (run_uuid) where key = 'millrace.run_id' and value = '{}'"
        ((found,),) = mlflow_rows(self.root, query.format(self.run_dir(name).name))
        return found

    def kill(self, name: str, *, with_children: bool = False) -> None:
        """Send SIGKILL to a service."""
        service = read_stack(self.root).service(name)
        process = None if service is None else service.process()
        assert process is not None
        for member in [*(process.children() if with_children else []), process]:
            member.send_signal(signal.SIGKILL)
        psutil.wait_procs([process])
        assert (name, "gone") in [(service.name, state) for service, state in service_states(self.root)]

    def assert_hidden(self, *secrets: str) -> None:
        """Assert that no command line of a service and no file except the login's file contains one of the texts."""
        services = [service.process() for service in read_stack(self.root).services]
        family = [one for found in services if found for one in (found, *found.children(recursive=True))]
        lines = str([member.cmdline() for member in family])
        files = [file for file in self.root.rglob("*") if file.is_file() and file.name != SECRET_FILE]
        for secret in secrets:
            assert secret not in lines
            for file in files:
                assert secret.encode() not in file.read_bytes(), f"{file} says a secret"

    def log(self, service: str = "flow-runs") -> str:
        return (self.root / "stack-logs" / f"{service}.log").read_text(errors="replace")


def prefect_home(home: Path) -> Path:
    """Copy an empty database of Prefect into a server's home. Making the database takes seconds."""
    shared = Path(os.environ[SHARED_STAGES])
    made = shared / "prefect.db"
    with (shared / "prefect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            server = LocalServer(shared / "prefect")
            server.wait()
            server.stop()
            with closing(sqlite3.connect(shared / "prefect" / "prefect.db")) as database:
                database.execute("vacuum into ?", (str(made),))
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, home / "prefect.db")
    return home


@contextmanager
def stack_up(root: Path, **options: Any) -> Iterator[Stack]:
    prefect_home(root / "prefect")
    try:
        up(root, **options)
        yield Stack(root)
    finally:
        down(root)
