"""The record of a stack (`stack.json` in its workspace), and the addresses and login that runs in the workspace use.

A process is identified by its id and start time. The login is one line `millrace:<random>` in a file that
only its owner can read. It is passed in the environment, because every user can read a command line or `stack.json`.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

import psutil
from pydantic import TypeAdapter, ValidationError

from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import MillraceError
from rlcore.storage.documents import read_ordinary, sqlite_address
from rlcore.storage.locks import process_of
from rlcore.storage.publish import write_secret_once, write_text_atomically

STATE_FILE = "stack.json"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Service:
    """A process of the stack. `born` is the start time of the process.

    `version` is the version of a Prefect or MLflow server, otherwise ''. `ready_url` is a page that answers once the
    service is up. `url` or `ready_url` is '' if the service has no such address.
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
        """Return the process, or None if it has ended. A new process with the same id does not count."""
        return process_of(self.pid, self.born)

    @property
    def is_worker(self) -> bool:
        """True if the service is a Prefect worker."""
        return self.name.startswith("worker-")


@dataclass(frozen=True, slots=True)
class StackState:
    """The services of the stack under `root`.

    `mlflow_database` is the address of MLflow's database, without the password.
    """

    format_version: Literal[2] = 2
    root: str = ""
    mlflow_database: str = ""
    services: tuple[Service, ...] = ()

    def service(self, name: str) -> Service | None:
        """Return the service with this name, or None."""
        return next((service for service in self.services if service.name == name), None)

    def running_service(self, name: str) -> Service | None:
        """Return the service with this name if its process is alive."""
        return next((service for service in self.running() if service.name == name), None)

    def running(self) -> set[Service]:
        """Return the services whose processes are alive."""
        return {service for service in self.services if service.process() is not None}

    @property
    def prefect_api_url(self) -> str:
        """The address of Prefect's API, or '' if no server is recorded."""
        prefect = self.service("prefect")
        return "" if prefect is None else f"{prefect.url}/api"

    @property
    def mlflow_url(self) -> str:
        """The address of MLflow's server, or '' if no server is recorded."""
        mlflow = self.service("mlflow")
        return "" if mlflow is None else mlflow.url


_STATE = TypeAdapter(StackState)


def read_stack(root: Path) -> StackState:
    """Return the record of a workspace's stack, or an empty record if there is none or the folder was copied or moved.
    Raises MillraceError if the file is damaged or has another format.
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
            "Run `millrace down` with the Millrace that wrote it, or stop its services yourself and delete the file; "
            "then `millrace up`."
        ) from error
    return state if state.root == str(root.resolve()) else StackState()


def write_stack(root: Path, state: StackState) -> None:
    """Write the record of a stack atomically to the folder `root`."""
    state = replace(state, root=str(root.resolve()))
    write_text_atomically(root / STATE_FILE, _STATE.dump_json(state, indent=2).decode() + "\n")


PREFECT_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
PREFECT_SERVER_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"


def prefect_database(home: Path) -> str:
    """Return the address of a Prefect server's database. The default is a file in the server's home folder."""
    named = os.environ.get(PREFECT_DATABASE) or os.environ.get(PREFECT_SERVER_DATABASE)
    return named or sqlite_address(home / "prefect.db", "sqlite+aiosqlite:///")


def mlflow_database(root: Path) -> str:
    """Return the address of the MLflow server's database. The default is a file in the workspace."""
    return os.environ.get(MLFLOW_DATABASE) or default_mlflow_database(root)


def default_mlflow_database(root: Path) -> str:
    """Return the address of the MLflow store in the workspace, which runs use by default."""
    return sqlite_address(root / "mlflow.db")


def served_mlflow(uri: str, root: Path) -> str:
    """Return the address of the stack's MLflow server, or '' if the server is down.

    If `uri` is not the default MLflow store of the workspace, also return ''.
    """
    root = Path(os.environ.get(STACK_ROOT, root)).resolve()
    service = read_stack(root).running_service("mlflow")
    return service.url if service is not None and uri == default_mlflow_database(root) else ""


FLOW_RUN_ID = "PREFECT__FLOW_RUN_ID"  # the id of the flow run, in a process that a worker has started
FLOW_RUN_COMMAND = "-m prefect.engine"  # the end of the command line of such a process
STACK_ROOT = "MILLRACE_STACK"  # the workspace of a stack, which is the default for runs in its flows


def stack_tracking_uri(root: Path) -> str | None:
    """Return the address of the stack's MLflow server, and set its login in the environment. Return None if runs use
    the MLflow file in the workspace.
    """
    root = Path(os.environ.get(STACK_ROOT, root)).resolve()
    stack = read_stack(root)
    if stack.mlflow_database in ("", default_mlflow_database(root)) or not stack.mlflow_url:
        return None
    return set_mlflow_login(stack.mlflow_url, root)


_user_login: dict[str, str | None] = {}  # the user's own, while the environment has the login of the stack


def set_mlflow_login(uri: str, root: Path) -> str:
    """Set the login for this address in the environment of MLflow's clients, and return the address.

    The stack's login is used only for the stack's running server. Any other address gets the login that the user has
    set, because another user's server may have the port of a stopped stack.
    """
    root = Path(os.environ.get(STACK_ROOT, root)).resolve()
    stack = read_stack(root)
    login: Mapping[str, str | None] = dict(_user_login)
    if uri.rstrip("/") == stack.mlflow_url and stack.running_service("mlflow") is not None:
        login = mlflow_login_environment(root_login(root))
        _user_login.update({name: os.environ.get(name) for name in login.keys() - _user_login.keys()})
    else:
        _user_login.clear()
    for name, value in login.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return uri


def with_stack_store(tracking: TrackingConfig, root: Path) -> TrackingConfig:
    """Return the tracking settings. If they name no store, use the store of the stack."""
    uri = stack_tracking_uri(root) if tracking.uri is None else set_mlflow_login(tracking.uri, root)
    return tracking if uri == tracking.uri else tracking.model_copy(update={"uri": uri})


def with_stack_tracking(config: RunConfig) -> RunConfig:
    """Return the settings of a run. If they name no MLflow store, use the store of the stack."""
    tracking = with_stack_store(config.tracking, Path(config.paths.root))
    return config if tracking is config.tracking else config.model_copy(update={"tracking": tracking})


ONE_COMMAND = "one-command"
MLFLOW_APP = "millrace"  # our application in the option `--app-name` of `mlflow server`
MLFLOW_LOGIN = "MILLRACE_MLFLOW_LOGIN"
RESPONSES_ROOT = "MILLRACE_ANSWERS_ROOT"  # the workspace of the responses on MLflow's server (`flows.stack.responses`)

SECRET_FILE = "stack-secret"
USER = "millrace"
CLIENT_LOGIN = "PREFECT_API_AUTH_STRING"
SERVER_LOGIN = "PREFECT_SERVER_API_AUTH_STRING"  # of Prefect's server, whose clients read `CLIENT_LOGIN`


def new_login() -> str:
    """Return a new login with a random password of 256 bits."""
    return f"{USER}:{secrets.token_urlsafe(32)}"


def root_login(root: Path) -> str:
    """Return the login of this workspace's servers. The first call creates the login. Raises MillraceError if another
    user can read the login's file or has written it.
    """
    path = root / SECRET_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret_once(path, new_login() + "\n")
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            login = file.read().strip()
    except PermissionError as error:
        raise MillraceError(
            f"{path}: may not be read: another user has started a stack under {root}. Name another workspace by --root "
            "or paths.root."
        ) from error
    if found.st_mode & 0o077 or found.st_uid != os.geteuid() or not login.startswith(f"{USER}:"):
        raise MillraceError(
            f"{path}: must be a file of yours that no other user may read (mode 0600, one line {USER}:...). `millrace "
            f"down --root {quote(str(root))}`, delete the file, and `millrace up` creates another one."
        )
    return login


def login_hint(root: Path) -> str:
    """Return a text about how to log in to the web pages. The text continues a sentence that the caller begins."""
    return f"the line in {root / SECRET_FILE}: Prefect takes it whole, MLflow as user and password around the colon"


def mlflow_login_environment(login: str) -> dict[str, str]:
    """Return a login as the environment variables that MLflow's clients read."""
    user, _, password = login.partition(":")
    return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
