"""Access to our Prefect server: no web page, no foreign host name and no client without the login is
allowed. The slots of a workspace are a concurrency limit of the server.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from flows.stack.services import start_prefect, stop_server, wait_until_ready
from flows.stack.state import SECRET_FILE, StackState, mlflow_login_environment, root_login, write_stack
from flows.work.slots import SlotRequest, Slots
from rlcore.errors import MillraceError
from tests.flows.conftest import wait_until
from tests.helpers.attempts import Attempt
from tests.helpers.stack import Stack, prefect_home

pytestmark = pytest.mark.prefect

EVENTS = "/api/events/filter"
EVIL = "http://evil.example"


def test_a_request_needs_our_name_our_origin_and_the_login(prefect_server):
    server, login = prefect_server.url.removesuffix("/api"), prefect_server.login
    port = server.rpartition(":")[2]
    for attempt in (
        Attempt("POST", EVENTS, {}, status=401),
        Attempt("POST", EVENTS, {}, login="millrace:guessed", status=401),
        Attempt("GET", "/api/admin/settings", status=401),
        Attempt("DELETE", "/api/admin/database/clear", status=401),
        Attempt("POST", EVENTS, {}, login=login, host=f"evil.example:{port}"),
        Attempt("GET", "/api/health", host=f"127.0.0.1.evil.example:{port}"),
        Attempt("POST", EVENTS, {}, login=login, origin=EVIL),
        Attempt("POST", EVENTS, {}, login=login, origin="null"),
        Attempt("POST", EVENTS, {}, login=login, origin="http://127.0.0.1:9"),
        Attempt("OPTIONS", EVENTS, origin=EVIL),
        Attempt("GET", "/api/health", fetched_for="cross-site"),
        Attempt("GET", "/api/health", status=200),
        Attempt("POST", EVENTS, {}, login=login, status=200),
        Attempt("POST", EVENTS, {}, login=login, origin=server, fetched_for="same-origin", status=200),
        Attempt("POST", EVENTS, {}, login=login, host="localhost:8", origin="http://localhost:8", status=200),
    ):
        attempt.try_at(server)


def test_a_websocket_needs_them_too(prefect_server):
    address = f"{prefect_server.url.replace('http', 'ws', 1)}/events/in"
    prefect = [Subprotocol("prefect")]
    # h11, unlike httptools, refuses a second Host by itself (400).
    for refused in ({"origin": Origin(EVIL)}, {"additional_headers": {"Host": "evil.example"}}):
        with pytest.raises(InvalidStatus, match=r"40[03]"), connect(address, subprotocols=prefect, **refused):
            pass
    for token, is_let_in in ((None, False), ("millrace:guessed", False), (prefect_server.login, True)):
        with connect(address, subprotocols=prefect) as socket:
            socket.send(json.dumps({"type": "auth", "token": token}))
            if is_let_in:
                assert json.loads(socket.recv()) == {"type": "auth_success"}
            else:
                with pytest.raises(ConnectionClosed):
                    socket.recv()


def test_concurrent_requests_for_the_first_login_get_the_same(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        for number in range(100):
            root = tmp_path / str(number)
            assert len(set(pool.map(root_login, [root] * 4))) == 1
            assert [file.name for file in root.iterdir()] == [SECRET_FILE]


def test_login_file_is_private(tmp_path):
    login, file = root_login(tmp_path), tmp_path / SECRET_FILE
    assert login == root_login(tmp_path) != root_login(tmp_path / "other")
    assert file.read_text() == f"{login}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(login) > 40
    assert ":".join(mlflow_login_environment(login).values()) == login
    file.chmod(0o644)
    with pytest.raises(MillraceError, match=rf"{SECRET_FILE}: must be a file of yours .*mode 0600.*delete the file"):
        root_login(tmp_path)
    with (
        patch.object(Path, "open", side_effect=PermissionError(13, "Permission denied")),
        pytest.raises(MillraceError, match=rf"{SECRET_FILE}: may not be read: another user .* under {tmp_path}"),
    ):
        root_login(tmp_path)
    if os.geteuid() == 0:
        file.chmod(0o600)
        os.chown(file, 12_345, -1)
        with pytest.raises(MillraceError, match="must be a file of yours"):
            root_login(tmp_path)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stack")
    prefect_home(root / "prefect")
    server = start_prefect(root, None, StackState())
    process = server.process()
    try:
        wait_until_ready(server)
        write_stack(root, StackState(services=(server,)))
        yield Stack(root)
    finally:
        stop_server(process)


def read_limits(stack: Stack) -> list[tuple[Any, ...]]:
    rows = stack.api.filter("v2/concurrency_limits")
    return [(row["name"], row["limit"], row["active_slots"], row["active"]) for row in rows]


def test_the_limit_has_the_slots_and_those_in_use(stack):
    slots = Slots(stack.root)
    assert read_limits(stack) == []
    slots.set_devices(["0", "0", "1"])
    # Each read updates the limit. If sqlite is busy and refuses the update, a page shows the last known state.
    wait_until(lambda: read_limits(stack) == [("millrace-slots", 3, 0, True)], "the slots are shown")
    held = slots.acquire(SlotRequest("a-run", 2, 0, 0.0, 1), lambda reason: None)
    place = "v2/concurrency_limits/millrace-slots"
    wait_until(lambda: stack.ask(place)["active_slots"] == 2, "the slots in use are shown")
    stack.ask(place, {"limit": 9, "active_slots": 5}, "PATCH")
    wait_until(lambda: read_limits(stack) == [("millrace-slots", 3, 2, True)], "the slots are shown again")
    held.release()
    wait_until(lambda: read_limits(stack) == [("millrace-slots", 3, 0, True)], "the slots are free")
    (slots.folder / "slots.json").write_text("damaged")
    assert read_limits(stack) == [("millrace-slots", 3, 0, True)], "a page is shown anyway"
    slots.set_devices([])
    wait_until(lambda: read_limits(stack) == [], "the limit is gone")


def test_a_read_without_a_change_writes_no_event(stack):
    Slots(stack.root).set_devices([""])

    def changes() -> int:
        chosen = {"event": {"prefix": ["prefect.concurrency-limit"]}}
        return len(stack.ask("events/filter", {"filter": chosen})["events"])

    read_limits(stack)
    before = changes()
    read_limits(stack)
    read_limits(stack)
    assert changes() == before
    assert root_login(stack.root) not in stack.log("prefect")
