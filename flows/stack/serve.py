"""The servers of Prefect and MLflow behind a guard, which checks the host name, origin and login of each request.

    python -m flows.stack.serve PORT            the Prefect server of a stack
    python -m flows.stack.serve one-command FD  the server of one command (`flows.server.api`) on an open socket

This module starts Prefect's server itself, because `prefect server start` has no option for a guard. `mlflow server`
finds `guarded_mlflow` by an entry point in `pyproject.toml`. Clients of the open socket FD wait until the server is up.
Secrets are in the environment, because any user can see a command line.
"""

import asyncio
import hmac
import logging
import os
import socket
import sys
from base64 import b64decode
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.stack.state import LOOPBACK, MLFLOW_LOGIN, RESPONSES_ROOT, SERVER_LOGIN, STACK_ROOT
from flows.work.slots import Slots

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})  # with any port, because an SSH tunnel may end at another
HEALTH = "/health"
FOREIGN_SITES = ("cross-site", "same-site")  # Sec-Fetch-Site of requests caused by a page of another host or port
LIMIT = "millrace-slots"
LIMITS = "/api/v2/concurrency_limits"

log = logging.getLogger(__name__)


class Guard:
    """An ASGI application that protects `app` from other websites and from users without the login.

    It refuses a request whose Host header does not name the loopback interface (DNS rebinding). It also refuses
    requests that are caused by pages of another origin. Requests other than `/health` need `login` (`user:password`).
    If `login` is None, `app` checks logins.
    """

    def __init__(self, app: ASGIApp, login: str | None = None) -> None:
        self._app = app
        self._login = login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the guarded application."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # not accepted yet, so the client gets a 403
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_loopback_name(hosts[0]):
            return PlainTextResponse("This server has no such name; use 127.0.0.1 or localhost.\n", 403)
        if _is_cross_origin(headers, hosts[0]):
            return PlainTextResponse("Pages of other origins may not use this server.\n", 403)
        is_health = scope["path"] == HEALTH and scope.get("method") == "GET"
        if self._login is not None and not is_health and not _has_login(headers.get("authorization", ""), self._login):
            challenge = {"WWW-Authenticate": 'Basic realm="millrace", charset="UTF-8"'}
            return PlainTextResponse("This server requires the login that `millrace up` names.\n", 401, challenge)
        return None


def is_loopback_name(host: str) -> bool:
    """Return whether a Host header names the loopback interface.

    >>> [is_loopback_name(host) for host in ("127.0.0.1:4200", "LOCALHOST", "[::1]:80")]
    [True, True, True]
    >>> [is_loopback_name(host) for host in ("evil.example:4200", "127.0.0.1.evil.example", "10.1", "localhost@evil")]
    [False, False, False, False]
    >>> [is_loopback_name(host) for host in ("", "[")]
    [False, False]
    """
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK_NAMES
    except ValueError:
        return False


def _is_cross_origin(headers: Headers, host: str) -> bool:
    """Return whether a page of another origin caused the request. A link that a user follows does not count."""
    if any(origin not in (f"http://{host}", f"https://{host}") for origin in headers.getlist("origin")):
        return True
    return headers.get("sec-fetch-site") in FOREIGN_SITES and headers.get("sec-fetch-mode") != "navigate"


def _has_login(authorization: str, login: str) -> bool:
    """Return whether an Authorization header contains the login.

    >>> [_has_login(given, "a:b") for given in ("Basic YTpi", "Basic YTpj", "Basic YTp", "Basic é", "Bearer YTpi", "")]
    [True, False, False, False, False, False]
    """
    scheme, _, given = authorization.partition(" ")
    try:
        return scheme.lower() == "basic" and hmac.compare_digest(b64decode(given, validate=True), login.encode())
    except ValueError:  # not base64 or not ASCII
        return False


class SlotsLimit:
    """An ASGI application in front of Prefect's server. It lets Prefect's pages show the trainer slots in use.

    The application updates the limit `millrace-slots` before a client reads concurrency limits. Prefect only displays
    this limit. Trainers reserve their slots by locked files in the workspace.
    """

    def __init__(self, app: ASGIApp, root: Path) -> None:
        self._app = app
        self._slots = Slots(root)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to Prefect. Before a request that reads concurrency limits, update the limit `millrace-slots`.
        The limit shows the number of trainer slots, and how many of them are in use."""
        path = scope.get("path", "")
        if path.startswith(LIMITS) and (scope.get("method") == "GET" or path.endswith("/filter")):
            try:
                await self._update()
            except Exception as error:  # the page shows the last known state
                log.warning("the concurrency limit %s is not up to date: %s", LIMIT, error)
        await self._app(scope, receive, send)

    async def _update(self) -> None:
        state = await asyncio.to_thread(self._slots.read_state)
        shown = {"limit": len(state.devices), "active_slots": len(state.holders)}
        user, _, password = os.environ[SERVER_LOGIN].partition(":")
        prefect = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=prefect, base_url="http://localhost", auth=(user, password)) as client:
            known = await client.get(f"{LIMITS}/{LIMIT}")
            if known.is_success and not state.devices:
                await client.delete(f"{LIMITS}/{LIMIT}")
            elif known.is_success and not shown.items() <= known.json().items():
                await client.patch(f"{LIMITS}/{LIMIT}", json=shown)
            elif known.status_code == httpx.codes.NOT_FOUND and state.devices:
                await client.post(f"{LIMITS}/", json={"name": LIMIT, **shown})


def main() -> None:
    """Serve Prefect until SIGTERM. A temporary server, started for a single command, has no web pages."""
    import uvicorn
    from prefect.server.api.server import create_app

    logging.getLogger("prefect.server.utilities.messaging.memory").addFilter(hide_address)
    *one_command, place = sys.argv[1:]
    # Prefect checks its login itself, also on websockets.
    prefect = create_app(final=True, ephemeral=bool(one_command))
    app = Guard(prefect if one_command else SlotsLimit(prefect, Path(os.environ[STACK_ROOT])))
    if one_command:
        uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run([socket.socket(fileno=int(place))])
    else:
        uvicorn.run(app, host=LOOPBACK, port=int(place), log_level="warning", lifespan="on")


def hide_address(record: logging.LogRecord) -> bool:
    """Remove httpx's error text from a log record. The text contains the secret address of a notification block."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
        status = f" {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {type(error).__name__}{status}", (), None
    return True


def guarded_mlflow() -> Guard:
    """Return MLflow's application and the page of responses, both behind a login. MLflow's own logins are not used,
    because they need a second database and hash a password for each request.
    """
    from flows.stack.responses import with_responses
    from rlcore.tracking.connection import mlflow_app

    login = os.environ.pop(MLFLOW_LOGIN)
    return Guard(with_responses(Path(os.environ[RESPONSES_ROOT]), mlflow_app()), login)


if __name__ == "__main__":
    main()
