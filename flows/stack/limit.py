"""The slots of a root, shown as a concurrency limit in the web page of the stack's Prefect server."""

import asyncio
import logging
import os
from pathlib import Path

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.stack.state import SERVER_LOGIN
from flows.work.slots import Slots

LIMIT = "millrace-slots"
LIMITS = "/api/v2/concurrency_limits"

log = logging.getLogger(__name__)


class SlotsLimit:
    """An ASGI application that passes requests to Prefect's server.

    Before a client reads the concurrency limits, it sets the limit `millrace-slots` to the number of the root's slots
    and the number of slots in use. The locks of the slots decide who runs, and the limit shows their state.
    """

    def __init__(self, app: ASGIApp, root: Path) -> None:
        self._app = app
        self._slots = Slots(root)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to Prefect's server. If the request reads concurrency limits, update the limit first."""
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
