"""What `millrace up` has started under a root: `stack.json` there. A process is known by its id and its birth."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from flows.server.database import DATABASE, PREFECT_DATABASE, PREFECT_DATABASE_TOO, PREFECT_SQLITE
from flows.server.secret import login_of, mlflow_client
from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import MillraceError
from rlcore.storage.documents import read_ordinary
from rlcore.storage.locks import process_of
from rlcore.storage.publish import write_text_atomically
from rlcore.storage.sqlite import sqlite_address

STATE_FILE = "stack.json"
LOOPBACK = "127.0.0.1"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Service:
    """One process; `born`: see `birth_of`. `url`: its page, if it has one; `ready_url` answers once up."""

    name: str
    pid: int
    born: float
    port: int
    url: str
    ready_url: str
    log: str

    def process(self) -> psutil.Process | None:
        """The process, if it is the one that was started; another one may have its id by now."""
        return process_of(self.pid, self.born)


@dataclass(frozen=True, slots=True)
class StackState:
    """All of it. `prefect_api_url`: for flows; `mlflow_url`: for people; `mlflow_database`: without a password; `root`:
    the folder that it was written to.
    """

    format_version: int = FORMAT_VERSION
    root: str = ""
    prefect_version: str = ""
    mlflow_version: str = ""
    mlflow_database: str = ""
    prefect_api_url: str = ""
    mlflow_url: str = ""
    services: tuple[Service, ...] = ()

    def service(self, name: str) -> Service | None:
        """The service of that name."""
        return next((service for service in self.services if service.name == name), None)


_STATE = TypeAdapter(StackState)


def read_stack(root: Path) -> StackState:
    """What is recorded; an empty state where nothing is, and in a copied or moved folder: that stack is another root's.

    Raises:
        MillraceError: the file is damaged or of another format.
    """
    path = root / STATE_FILE
    try:
        state = _STATE.validate_json(read_ordinary(path))
    except (FileNotFoundError, NotADirectoryError):
        return StackState()
    except ValidationError as error:
        raise MillraceError(
            f"{path}: is no record of a stack ({error.errors()[0]['msg']}). End what it started by hand, delete it, "
            "and run `millrace up` again."
        ) from error
    if state.format_version != FORMAT_VERSION:
        raise MillraceError(
            f"{path}: format_version must be {FORMAT_VERSION}, got {state.format_version}. Run `millrace down` with "
            "the Millrace that wrote it, then `millrace up`."
        )
    return state if state.root == str(root.resolve()) else StackState()


def write_stack(root: Path, state: StackState) -> None:
    """Write the state to disk, whole or not at all."""
    state = replace(state, root=str(root.resolve()))
    write_text_atomically(root / STATE_FILE, _STATE.dump_json(state, indent=2).decode() + "\n")


MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"


@dataclass(frozen=True, slots=True, repr=False)
class Databases:
    """Addresses, with passwords if they have any."""

    prefect: str
    mlflow: str

    @classmethod
    def chosen(cls, root: Path, environment: Mapping[str, str] = os.environ) -> "Databases":
        """What the environment names, else files under the root."""
        prefect = environment.get(PREFECT_DATABASE) or environment.get(PREFECT_DATABASE_TOO)
        mlflow = environment.get(MLFLOW_DATABASE)
        files = cls(
            sqlite_address(root / "prefect" / DATABASE, PREFECT_SQLITE),
            sqlite_address(root / "mlflow.db"),
        )
        return cls(prefect or files.prefect, mlflow or files.mlflow)

    def mlflow_is_the_file(self, root: Path) -> bool:
        """Whether runs under this root find their metrics in the database without being told where it is."""
        return self.mlflow == sqlite_address(root / "mlflow.db")


FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable of a process that a worker has started: the id of its flow run."""
WORKERS_COMMAND = "-m prefect.engine"
"""End of the command line of such a process."""
STACK = "MILLRACE_STACK"
"""Environment of flows under a stack: its root, which is theirs where no other one is named."""


def stack_store(root: Path) -> str | None:
    """The address of the stack's MLflow server; None: the file under the root. See `log_in`.

    Raises:
        MillraceError: `stack.json` is damaged or of another format, or the login's file can be read by others.
    """
    root = Path(os.environ.get(STACK, root)).resolve()
    stack = read_stack(root)
    if not stack.mlflow_database or Databases("", stack.mlflow_database).mlflow_is_the_file(root):
        return None
    return log_in(stack.mlflow_url, root) if stack.mlflow_url else None


_given: dict[str, str | None] = {}
"""What the environment had in place of the stack's login, while that is there."""


def log_in(uri: str, root: Path) -> str:
    """Return the address. If it is the stack's server, and that is up, this process and those that it starts log in
    from now on; if not, they have the login that the user has given, if any: MLflow's clients send one login to
    whatever server they ask, and a port that a stack had may be another user's by now.
    """
    root = Path(os.environ.get(STACK, root)).resolve()
    wanted: Mapping[str, str | None] = _given
    stack = read_stack(root)
    server = stack.service("mlflow")
    if uri.rstrip("/") == stack.mlflow_url and server is not None and server.process() is not None:
        wanted = mlflow_client(login_of(root))
        _given.update({name: os.environ.get(name) for name in wanted.keys() - _given.keys()})
    for name, value in wanted.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if wanted is _given:
        _given.clear()
    return uri


def tracking_in_stack(tracking: TrackingConfig, root: Path) -> TrackingConfig:
    """The tracking settings with the stack's store, if they name none."""
    uri = stack_store(root) if tracking.uri is None else log_in(tracking.uri, root)
    return tracking if uri == tracking.uri else tracking.model_copy(update={"uri": uri})


def in_stack(config: RunConfig) -> RunConfig:
    """The settings with the stack's store, if they name none."""
    tracking = tracking_in_stack(config.tracking, Path(config.paths.root))
    return config if tracking is config.tracking else config.model_copy(update={"tracking": tracking})
