"""The slots of a root as a concurrency limit of a real Prefect server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.stack.services import start_prefect, stop_server, wait_until_ready
from flows.stack.state import StackState, root_login, write_stack
from flows.work.slots import SlotRequest, Slots
from tests.flows.conftest import wait_until
from tests.helpers.stack import Stack, prefect_home

pytestmark = pytest.mark.prefect


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    prefect_home(tmp_path / "prefect")
    server = start_prefect(tmp_path, None, StackState())
    process = server.process()
    assert process is not None
    try:
        wait_until_ready(server)
        write_stack(tmp_path, StackState(services=(server,)))
        yield Stack(tmp_path)
    finally:
        stop_server(process)


def read_limits(stack: Stack) -> list[tuple[Any, ...]]:
    rows = stack.api.filter("v2/concurrency_limits")
    return [(row["name"], row["limit"], row["active_slots"], row["active"]) for row in rows]


def test_the_limit_has_the_slots_and_those_in_use(stack: Stack) -> None:
    slots = Slots(stack.root)
    assert read_limits(stack) == []
    slots.set_devices(["0", "0", "1"])
    assert read_limits(stack) == [("millrace-slots", 3, 0, True)]
    held = slots.acquire(SlotRequest("a-run", 2, 0, 0.0, 1), lambda reason: None)
    assert stack.ask("v2/concurrency_limits/millrace-slots")["active_slots"] == 2
    stack.ask("v2/concurrency_limits/millrace-slots", {"limit": 9, "active_slots": 5}, "PATCH")
    # On a busy machine, sqlite may refuse an update, and a page shows the last known state.
    wait_until(lambda: read_limits(stack) == [("millrace-slots", 3, 2, True)], "the slots are shown again")
    held.release()
    wait_until(lambda: read_limits(stack) == [("millrace-slots", 3, 0, True)], "the slots are free")
    (slots.folder / "slots.json").write_text("damaged")
    assert read_limits(stack) == [("millrace-slots", 3, 0, True)], "a page is shown anyway"
    slots.set_devices([])
    wait_until(lambda: read_limits(stack) == [], "the limit is gone")


def test_a_read_without_a_change_writes_no_event(stack: Stack) -> None:
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
