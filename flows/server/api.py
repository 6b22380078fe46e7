"""The choice and start of a command's Prefect server. Call these functions before Prefect is imported.

A command uses the server of `PREFECT_API_URL`, or else the running server of `millrace up` of the same workspace. If
neither exists, the command starts a server that ends with the command. The database of this server is in
`<root>/prefect`.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.error import HTTPError

from flows.server.launch import log_tail, python_path, start_process
from flows.stack.state import (
    CLIENT_LOGIN,
    ONE_COMMAND,
    PREFECT_DATABASE,
    SERVER_LOGIN,
    new_login,
    prefect_database,
    read_stack,
    root_login,
)
from rlcore.errors import MillraceError, StopRequestedError
from rlcore.storage.locks import HeldLock

START_WAIT_S = 600.0  # seconds for a server to start; the first start creates the database, which may take minutes
ANSWER_WAIT_S = 10.0  # seconds for an answer from a server that should be running
STOP_WAIT_S = 10.0
PREFECT_ENVIRONMENT: Mapping[str, str] = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # Prefect stores no results, because the run's files show what is done. Exceptions are always stored.
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    # The retries take 2^n s in total. A finished run survives a server that is down for a quarter of an hour.
    "PREFECT_CLIENT_MAX_RETRIES": "9",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "rlcore,data,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Prefect's own lines would break the live line on the console. The server still gets them.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
}
"""The default environment variables of Prefect. Variables that the user has set have priority."""
COMMAND_ENVIRONMENT = {"PREFECT_CLIENT_MAX_RETRIES": "3"}  # a command can finish without a server: retries for 14 s


class LocalServer:
    """A Prefect server that ends with this process. Only this process and its children know the login.

    Prefect's own ephemeral server would outlive a killed process and accept any Host header. Another user could take
    the port of the ephemeral server. The ephemeral server would also start later, after the import of Prefect.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / "server.log"
        # Two servers must not create the database concurrently.
        self._start = HeldLock(home / "server-start.lock", what=f"the Prefect database in {home}", wait_s=START_WAIT_S)
        self._start.__enter__()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        self.login = new_login()
        environment = {
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
            self._process = start_process(command, self._log, os.environ | environment, [listener.fileno()])
        # Registered before Prefect is imported, so it runs after Prefect has sent its last logs and events.
        atexit.register(self.stop)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give a client the server's address and login."""
        return {"PREFECT_API_URL": self.url, CLIENT_LOGIN: self.login}

    def wait(self) -> None:
        """Wait until the server is up. If it does not start, raises MillraceError with the end of the log."""
        try:
            _check_health(self.url, START_WAIT_S)
        except OSError as error:
            raise MillraceError(
                f"The Prefect server of this command does not start ({error}). `millrace train` does the same training "
                f"without Prefect. {log_tail(self._log)}"
            ) from error
        finally:
            self._start.__exit__(None, None, None)

    def stop(self) -> None:
        """Stop the server. A second call has no effect."""
        self._process.terminate()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_own: LocalServer | None = None  # the server that this process has started


def start_prefect(root: Path, *, verbose: bool = False) -> LocalServer | None:
    """Choose a command's Prefect server: a running one, or one that this process starts but does not wait for. Return
    the latter, otherwise None.

    Prefect's environment variables are set. With `verbose`, Prefect's log lines of level INFO are also shown.
    """
    for name, value in {**PREFECT_ENVIRONMENT, **COMMAND_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)
    if verbose:
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    global _own
    if (url := running_prefect(root)) is not None:
        return _own if _own is not None and _own.url == url else None
    _own = LocalServer(Path(os.environ.setdefault("PREFECT_HOME", str(root.resolve() / "prefect"))))
    os.environ |= _own.environment
    return _own


def running_prefect(root: Path) -> str | None:
    """Return `PREFECT_API_URL`, else the URL of the running server recorded in the workspace, else None. Set the
    recorded server's URL and login in `os.environ`. Raises MillraceError if `PREFECT_API_URL` cannot be used.
    """
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if url:
        if _own is None or _own.url != url:
            _require_prefect(url)
        return url
    stack = read_stack(root)
    if stack.running_service("prefect") is None or not is_reachable(stack.prefect_api_url):
        return None
    os.environ |= {"PREFECT_API_URL": stack.prefect_api_url, CLIENT_LOGIN: root_login(root.resolve())}
    return stack.prefect_api_url


def is_reachable(url: str) -> bool:
    """Return whether a Prefect server responds at this address."""
    try:
        _check_health(url, ANSWER_WAIT_S)
    except (OSError, ValueError, HTTPException):
        return False
    return True


def _require_prefect(url: str) -> None:
    """Raise MillraceError unless a Prefect server of the installed minor version accepts our login at `url`."""
    what, remedy = f"PREFECT_API_URL: the server at {url}", "or unset PREFECT_API_URL to start one here."
    try:
        _check_health(url, ANSWER_WAIT_S)
        theirs = _get(f"{url}/admin/version", ANSWER_WAIT_S).strip().strip(b'"').decode()
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, HTTPError) and error.code == HTTPStatus.UNAUTHORIZED:
            raise MillraceError(
                f"{CLIENT_LOGIN}: {what} requires a login, and this is missing or wrong. Set it by the line that "
                f"`millrace status` prints, {remedy}"
            ) from error
        raise MillraceError(
            f"PREFECT_API_URL: no Prefect server answers at {url} ({error}). Start it, {remedy}"
        ) from error
    ours = version("prefect")
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise MillraceError(
            f"{what} is Prefect {theirs}, and {ours} is installed here; both must be of one series. Update that server "
            f"to {'.'.join(ours.split('.')[:2])}, {remedy}"
        )


def _check_health(url: str, timeout_s: float) -> None:
    if _get(f"{url}/health", timeout_s).strip() != b"true":
        raise OSError("something else than a Prefect server answers there")


def _get(url: str, timeout_s: float) -> bytes:
    """Return the content of a page. The request sends the login in PREFECT_API_AUTH_STRING and never uses a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    login = b64encode(os.environ.get(CLIENT_LOGIN, "").encode()).decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {login}"} if login else {})
    with opener.open(request, timeout=timeout_s) as response:
        content: bytes = response.read()
    return content


@contextmanager
def command_flow(server: LocalServer | None, *, verbose: bool) -> Iterator[None]:
    """Wait until the server of `start_prefect` is up, and show the progress of the flow that the block runs.

    Raises StopRequestedError if the flow run is stopped.
    """
    from flows.progress import display_for_console, use_display

    if server is not None:
        server.wait()
    from prefect.exceptions import TerminationSignal

    from flows.server.watch import FlowCancelledError

    if not verbose:
        _hide_prefect_logs()
    try:
        with use_display(display_for_console()):
            yield
    except FlowCancelledError as ended:
        raise StopRequestedError(str(ended)) from ended
    except TerminationSignal as ended:
        raise StopRequestedError("stop requested; the same command resumes from the last checkpoints") from ended


def _hide_prefect_logs() -> None:
    """Hide the log lines of flow runs and task runs on the console, which has Millrace's progress lines instead."""
    hidden = ("prefect.flow_runs", "prefect.task_runs")
    for handler in logging.getLogger().handlers:
        if hasattr(handler, "console"):
            handler.addFilter(lambda record: not record.name.startswith(hidden))
    for name in ("prefect._internal.concurrency", "prefect.events.clients", "EventsWorker", "APILogWorker"):
        logging.getLogger(name).disabled = True  # they ignore levels and print each rejected event
    logging.raiseExceptions = False  # one traceback per rejected batch of log lines
