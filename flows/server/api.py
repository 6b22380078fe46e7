"""Which Prefect server a command talks to, and the settings under which it does. Call before Prefect is imported.

`PREFECT_API_URL` names a server; else the one that `millrace up` has started under the same root; else one is started
for this command, with its database in `<root>/prefect`, and ends with it.
"""

import atexit
import os
import socket
import subprocess
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.error import HTTPError

from flows.parameters import MLFLOW_PAGE
from flows.server.launch import log_tail, python_path, start_process
from flows.server.secret import CLIENT_LOGIN, SERVER_LOGIN, new_login, root_login
from flows.stack.serve import ONE_COMMAND
from flows.stack.state import PREFECT_DATABASE, prefect_database, read_stack
from rlcore.errors import MillraceError
from rlcore.storage.locks import HeldLock

START_WAIT_S = 600.0
"""The first start makes the database: 7 s of computing, minutes on a busy machine. One that dies is noticed at once."""
ANSWER_WAIT_S = 10.0
"""Seconds to wait for a server that should be up already."""
STOP_WAIT_S = 10.0
PREFECT_ENVIRONMENT: Mapping[str, str] = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # No result is kept in Prefect: what is done is known from the run's files. Exceptions are written in any case.
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    # 2^n s in all: a server that is away for a quarter of an hour does not fail a run that is done.
    "PREFECT_CLIENT_MAX_RETRIES": "9",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "rlcore,data,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Prefect's own lines would tear the live line apart; they still go to the server.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
}
"""Environment of Prefect, as far as the user's environment does not set it."""
COMMAND_ENVIRONMENT = {"PREFECT_CLIENT_MAX_RETRIES": "3"}
"""What is other in a command, whose work has an outcome without a server too: 14 s in all."""


@dataclass(frozen=True, slots=True)
class PrefectApi:
    """A server that answers, or will in a moment. `home`: of a server that ends with this command, else None."""

    url: str
    home: Path | None


class LocalServer:
    """A Prefect server that ends with this process. Its login is known to this process and to those that it starts.

    Prefect's own ephemeral server would outlive a killed process, answer under any name, choose a port that
    another user may take first, and not start while Prefect is imported.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / "server.log"
        # Two servers that make the database at the same time would get in each other's way.
        self._making = HeldLock(home / "server-start.lock", what=f"the Prefect database in {home}", wait_s=START_WAIT_S)
        self._making.__enter__()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        self.login = new_login()
        own = {
            "PREFECT_HOME": str(home),
            **self.environment,
            SERVER_LOGIN: self.login,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.url.removesuffix("/api"),
            "PYTHONPATH": python_path(),
            "PREFECT_UI_ENABLED": "false",
            PREFECT_DATABASE: prefect_database(home),
        }
        self._log.unlink(missing_ok=True)
        with listener:
            command = [sys.executable, "-P", "-m", "flows.stack.serve", ONE_COMMAND, str(listener.fileno())]
            self._process = start_process(command, self._log, os.environ | own, [listener.fileno()])
        # Registered before Prefect is imported, so called after Prefect has sent its last logs and events.
        atexit.register(self.stop)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for clients of the server."""
        return {"PREFECT_API_URL": self.url, CLIENT_LOGIN: self.login}

    def wait(self) -> None:
        """Wait until the server answers.

        Raises:
            MillraceError: it does not; with the end of its log.
        """
        try:
            _check_health(self.url, START_WAIT_S)
        except OSError as error:
            raise MillraceError(
                f"The Prefect server of this command does not start ({error}). `millrace train` does the same training "
                f"without Prefect. {log_tail(str(self._log))}"
            ) from error
        finally:
            self._making.__exit__(None, None, None)

    def stop(self) -> None:
        """End the server. Safe to call twice."""
        self._process.terminate()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_servers: dict[Path, LocalServer] = {}


def start_prefect(root: Path, *, verbose: bool = False) -> PrefectApi:
    """Choose the server and set Prefect's environment; where one has to be started it comes up meanwhile.

    Raises:
        MillraceError: a server that was named or recorded does not answer.
    """
    for name, value in {**PREFECT_ENVIRONMENT, **COMMAND_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)
    if verbose:
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    if (known := running_prefect(root)) is not None:
        return known
    home = Path(os.environ.setdefault("PREFECT_HOME", str(root.resolve() / "prefect")))
    if home not in _servers:
        _servers[home] = LocalServer(home)
    os.environ |= _servers[home].environment
    return PrefectApi(_servers[home].url, home)


def running_prefect(root: Path) -> PrefectApi | None:
    """The server that is there already: named, or recorded under the root and up. None: one has to be started.

    Raises:
        MillraceError: a server that was named does not answer.
    """
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    for home, server in _servers.items():
        if server.url == url:
            return PrefectApi(server.url, home)
    if url:
        _require_prefect(url)
        return PrefectApi(url, None)
    stack = read_stack(root)
    recorded = stack.service("prefect")
    if recorded is None or recorded.process() is None or not is_reachable(stack.prefect_api_url):
        return None
    os.environ |= {"PREFECT_API_URL": stack.prefect_api_url, CLIENT_LOGIN: root_login(root.resolve())}
    os.environ.setdefault(MLFLOW_PAGE, stack.mlflow_url)
    return PrefectApi(stack.prefect_api_url, None)


def wait_for_prefect(api: PrefectApi) -> None:
    """Wait until a server that was started here answers."""
    if api.home is not None:
        _servers[api.home].wait()


def is_reachable(url: str) -> bool:
    """Whether a Prefect server answers there."""
    try:
        _check_health(url, ANSWER_WAIT_S)
    except (OSError, ValueError, HTTPException):
        return False
    return True


def _require_prefect(url: str) -> None:
    """Require a Prefect server of the installed series, such as 3.7, that accepts our login."""
    what, remedy = f"PREFECT_API_URL: the server at {url}", "or unset PREFECT_API_URL: then one is started here."
    try:
        _check_health(url, ANSWER_WAIT_S)
        theirs = _get(f"{url}/admin/version", ANSWER_WAIT_S).strip().strip(b'"').decode()
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, HTTPError) and error.code == HTTPStatus.UNAUTHORIZED:
            raise MillraceError(
                f"{CLIENT_LOGIN}: {what} asks for a login, and this is another one or none. Set it by the line that "
                f"`millrace up` prints, {remedy}"
            ) from error
        raise MillraceError(
            f"PREFECT_API_URL: no Prefect server answers at {url} ({error}). Start it, {remedy}"
        ) from error
    ours = version("prefect")
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise MillraceError(
            f"{what} is Prefect {theirs}, and {ours} is installed here; both must be of one series. Bring that server "
            f"to {'.'.join(ours.split('.')[:2])}, {remedy}"
        )


def _check_health(url: str, timeout_s: float) -> None:
    """Ask for the server's health."""
    if _get(f"{url}/health", timeout_s).strip() != b"true":
        raise OSError("something else than a Prefect server answers there")


def _get(url: str, timeout_s: float) -> bytes:
    """Read a page with the environment's login, and never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    login = b64encode(os.environ.get(CLIENT_LOGIN, "").encode()).decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {login}"} if login else {})
    with opener.open(request, timeout=timeout_s) as answer:
        content: bytes = answer.read()
    return content
