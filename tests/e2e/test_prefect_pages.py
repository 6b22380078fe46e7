"""The pages of Prefect in a browser: a user logs in, and schedules a sweep only by the page."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.conftest import wait_until
from tests.helpers.chromium import Tab, open_tab
from tests.helpers.small_run import prepare
from tests.helpers.stack import Stack, stack_up

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.slow,
    pytest.mark.lengthy,
    pytest.mark.program("chromium"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stack")
    prepare(root)
    with stack_up(root) as stack:
        yield stack


@pytest.fixture
def tab(stack: Stack, tmp_path: Path) -> Iterator[Tab]:
    """A browser whose user has logged in."""
    with open_tab(tmp_path) as tab:
        tab.call("Page.navigate", url=stack.url.removesuffix("/api") + "/deployments")
        tab.wait("!!document.querySelector('input[type=password]')")
        tab.click("input[type=password]")
        tab.type(stack.login)
        tab.click("button[type=submit]")
        yield tab


def click_text(tab: Tab, selector: str, text: str) -> None:
    """Click the first element with this text, once the page shows it."""
    found = f"[...document.querySelectorAll('{selector}')].find((each) => each.innerText.trim() === {json.dumps(text)})"
    tab.wait(f"!!{found}")
    tab.value(f"{found}.setAttribute('data-test', 'found')")
    tab.click("[data-test=found]")
    tab.value("document.querySelector('[data-test=found]')?.removeAttribute('data-test')")


def test_a_sweep_runs_by_a_schedule_made_in_the_page(stack: Stack, tab: Tab) -> None:
    click_text(tab, "a", "debug-sweep")
    click_text(tab, "button", "Schedule")
    dialog = "[role=dialog]"
    tab.wait(f"!!document.querySelector('{dialog} input[type=number]')")
    tab.click(f"{dialog} input[type=number]")
    tab.call("Input.dispatchKeyEvent", type="keyDown", commands=["selectAll"])
    tab.type("1")  # minute
    click_text(tab, f"{dialog} button", "Save")
    tab.wait("document.body.innerText.includes('Every minute')")
    (schedule,) = stack.deployment("sweep/debug-sweep")["schedules"]
    assert schedule["active"]
    assert schedule["schedule"]["interval"] == 60

    def begun() -> list[str]:
        chosen = {"tags": {"all_": ["auto-scheduled"]}, "start_time": {"is_null_": False}}
        return [str(run["id"]) for run in stack.api.filter("flow_runs", flow_runs=chosen)]

    wait_until(lambda: bool(begun()), "the schedule has started the sweep")
    tab.click("[role=switch]")
    wait_until(lambda: not stack.deployment("sweep/debug-sweep")["schedules"][0]["active"], "the schedule is off")
    done = [stack.wait(run, "COMPLETED") for run in begun()]
    assert all(run["state"]["message"].startswith("4 of 4 points finished") for run in done)
    (record,) = stack.root.glob("sweeps/debug_grid-*/sweep.json")
    assert {point["state"] for point in json.loads(record.read_text())["points"]} == {"finished"}
