"""Nested flow runs when the flow run around them is tried again, against a real server."""

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.flow_engine import run_flow
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_RESULTS_PERSIST_BY_DEFAULT,
    temporary_settings,
)
from prefect.states import Cancelled, Completed, Failed, Paused, Scheduled, State

from flows.server.api import LocalServer
from flows.server.nested import begin_anew

pytestmark = pytest.mark.prefect


@dataclass(frozen=True)
class Made:
    """A stage's result: as a nested flow's stored one, Prefect 3.7 reads it back as a dict."""

    data: int


on_disk: list[int] = []


@flow
def stage() -> Made:
    on_disk.append(len(on_disk))
    return Made(on_disk[-1])


@flow
def chain() -> int:
    begin_anew(stage)
    return stage().data


@pytest.fixture
def client(prefect_server: LocalServer) -> Iterator[SyncPrefectClient]:
    settings = {
        PREFECT_API_URL: prefect_server.url,
        PREFECT_API_AUTH_STRING: prefect_server.login,
        PREFECT_RESULTS_PERSIST_BY_DEFAULT: True,
    }
    with temporary_settings(settings), get_client(sync_client=True) as client:
        yield client


def nested_states(client: SyncPrefectClient, parent: UUID) -> list[str]:
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]))
    return sorted(str(run.state_name) for run in client.read_flow_runs(flow_run_filter=below))


@pytest.mark.parametrize("end", [Completed, Failed, Cancelled])
def test_a_flow_run_that_is_tried_again_runs_its_nested_flows_again(
    client: SyncPrefectClient, end: type[State[object]]
) -> None:
    on_disk.clear()
    run = client.create_flow_run(chain)
    assert run_flow(chain, client.read_flow_run(run.id)) == 0
    client.set_flow_run_state(run.id, end(), force=True)
    client.set_flow_run_state(run.id, Scheduled(), force=True)
    assert run_flow(chain, client.read_flow_run(run.id)) == 1
    assert nested_states(client, run.id) == ["Completed", "Completed"]


def test_a_nested_flow_run_that_was_paused_is_ended_and_takes_no_new_place(client: SyncPrefectClient) -> None:
    on_disk.clear()
    run = client.create_flow_run(chain)
    run_flow(chain, client.read_flow_run(run.id))
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run.id]))
    (first,) = client.read_flow_runs(flow_run_filter=below)
    client.set_flow_run_state(first.id, Paused(), force=True)
    client.set_flow_run_state(run.id, Scheduled(), force=True)
    assert run_flow(chain, client.read_flow_run(run.id)) == 1
    assert nested_states(client, run.id) == ["Cancelled", "Completed"]
