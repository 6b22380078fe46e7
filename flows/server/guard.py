"""ASGI middleware that checks the host, origin and login of each request to our servers on the loopback interface."""

import hmac
from base64 import b64decode
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""The host names of the loopback interface. Any port is allowed, because an SSH tunnel may end at another port."""
HEALTH = "/health"
FOREIGN_SITES = ("cross-site", "same-site")
"""The values of the header Sec-Fetch-Site for a request that was caused by a page of another host or port."""


class Guard:
    """An ASGI application that passes the requests of our own clients and pages to another application.

    It refuses a request whose Host header does not name the loopback interface, which prevents DNS rebinding. It
    refuses requests of pages of another origin. If `login` is set, it also refuses requests without that login.

    Args:
        app: The application that receives the allowed requests.
        login: The `user:password` of HTTP's basic authentication, which all paths except `/health` require. None if the
            application checks logins itself.
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
    """Return whether the request was caused by a page of another origin. A link that a user follows is allowed."""
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
