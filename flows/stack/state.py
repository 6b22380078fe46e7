"""The record of a stack, `stack.json` under its root, and the addresses and login that runs under the root use.

A process is identified by its id and its birth.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
from pydantic import TypeAdapter, ValidationError

from flows.server.secret import mlflow_login_environment, root_login
from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import MillraceError
from rlcore.storage.documents import read_ordinary, sqlite_address
from rlcore.storage.locks import process_of
from rlcore.storage.publish import write_text_atomically

STATE_FILE = "stack.json"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Service:
    """One process; `born`: see `start_time_of`. `url`: its page, if it has one; `ready_url` answers once it is up.

    `version`: release of a server at its start.
    """

    name: str
    pid: int
    born: float
    port: int
    url: str
    ready_url: str
    log: str
    version: str = ""

    def process(self) -> psutil.Process | None:
        """The process that was started; None if it has ended, even where another process has its id."""
        return process_of(self.pid, self.born)

    @property
    def is_worker(self) -> bool:
        """Whether it is a Prefect worker."""
        return self.name.startswith("worker-")


@dataclass(frozen=True, slots=True)
class StackState:
    """A stack. `mlflow_database` has no password; `root` is the folder that the record was written to."""

    format_version: Literal[2] = 2
    root: str = ""
    mlflow_database: str = ""
    services: tuple[Service, ...] = ()

    def service(self, name: str) -> Service | None:
        """The service of that name."""
        return next((service for service in self.services if service.name == name), None)

    def running(self) -> set[Service]:
        """The services whose processes live."""
        return {service for service in self.services if service.process() is not None}

    @property
    def prefect_api_url(self) -> str:
        """Address of Prefect's API, running or not; '' where none was started."""
        prefect = self.service("prefect")
        return "" if prefect is None else f"{prefect.url}/api"

    @property
    def mlflow_url(self) -> str:
        """Address of MLflow's server, running or not; '' where none was started."""
        mlflow = self.service("mlflow")
        return "" if mlflow is None else mlflow.url


_STATE = TypeAdapter(StackState)


def read_stack(root: Path) -> StackState:
    """Read the record of a root's stack. It is empty without a record, and in a copied or moved folder.

    Raises:
        MillraceError: the file is damaged or of another format.
    """
    path = root / STATE_FILE
    try:
        state = _STATE.validate_json(read_ordinary(path))
    except (FileNotFoundError, NotADirectoryError):
        return StackState()
    except ValidationError as error:
        (first, *_) = error.errors()
        raise MillraceError(
            f"{path}: is no record of a stack of this Millrace ({'.'.join(map(str, first['loc']))}: {first['msg']}). "
            "Run `millrace down` with the Millrace that wrote it, or end what it started by hand and delete it; then "
            "`millrace up`."
        ) from error
    return state if state.root == str(root.resolve()) else StackState()


def write_stack(root: Path, state: StackState) -> None:
    """Write the record atomically."""
    state = replace(state, root=str(root.resolve()))
    write_text_atomically(root / STATE_FILE, _STATE.dump_json(state, indent=2).decode() + "\n")


PREFECT_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
PREFECT_SERVER_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"


def prefect_database(home: Path) -> str:
    """Address of the database of a Prefect server: the one in the environment, else a file in the server's home."""
    named = os.environ.get(PREFECT_DATABASE) or os.environ.get(PREFECT_SERVER_DATABASE)
    return named or sqlite_address(home / "prefect.db", "sqlite+aiosqlite:///")


def mlflow_database(root: Path) -> str:
    """Address of the database of MLflow's server: the one in the environment, else the file under the root."""
    return os.environ.get(MLFLOW_DATABASE) or default_mlflow_database(root)


def default_mlflow_database(root: Path) -> str:
    """Address of the MLflow store that runs use where their settings and the stack name no other one."""
    return sqlite_address(root / "mlflow.db")


FLOW_RUN_ID = "PREFECT__FLOW_RUN_ID"
"""Environment variable of a process that a worker has started: the id of its flow run."""
FLOW_RUN_COMMAND = "-m prefect.engine"
"""End of the command line of such a process."""
STACK_ROOT = "MILLRACE_STACK"
"""Environment variable of flows under a stack: its root, which is theirs where no other one is named."""


def stack_tracking_uri(root: Path) -> str | None:
    """The address of the stack's MLflow server; None: the file under the root. See `log_in`.

    Raises:
        MillraceError: `stack.json` is damaged or of another format, or others can read the login's file.
    """
    root = Path(os.environ.get(STACK_ROOT, root)).resolve()
    stack = read_stack(root)
    if stack.mlflow_database in ("", default_mlflow_database(root)) or not stack.mlflow_url:
        return None
    return set_mlflow_login(stack.mlflow_url, root)


_user_login: dict[str, str | None] = {}
"""The user's own MLflow login, while the environment has the stack's in its place."""


def set_mlflow_login(uri: str, root: Path) -> str:
    """Return the address, and set the login of MLflow's clients in the environment of this process for it.

    The stack's login for the stack's server while that is up, else the user's own: MLflow's clients send one login to
    every server, and another user may have the port of a stack that was stopped.
    """
    root = Path(os.environ.get(STACK_ROOT, root)).resolve()
    stack = read_stack(root)
    server = stack.service("mlflow")
    wanted: Mapping[str, str | None] = dict(_user_login)
    if uri.rstrip("/") == stack.mlflow_url and server is not None and server.process() is not None:
        wanted = mlflow_login_environment(root_login(root))
        _user_login.update({name: os.environ.get(name) for name in wanted.keys() - _user_login.keys()})
    else:
        _user_login.clear()
    for name, value in wanted.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return uri


def with_stack_store(tracking: TrackingConfig, root: Path) -> TrackingConfig:
    """The tracking settings with the stack's store, if they name none."""
    uri = stack_tracking_uri(root) if tracking.uri is None else set_mlflow_login(tracking.uri, root)
    return tracking if uri == tracking.uri else tracking.model_copy(update={"uri": uri})


def with_stack_tracking(config: RunConfig) -> RunConfig:
    """The settings with the stack's store, if they name none."""
    tracking = with_stack_store(config.tracking, Path(config.paths.root))
    return config if tracking is config.tracking else config.model_copy(update={"tracking": tracking})
