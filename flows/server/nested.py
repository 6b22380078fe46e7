"""Flow runs nested in one that was ended from outside: they were in its process, and nobody else ends them."""

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.states import Cancelled, Crashed


def end_nested(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A hook for `on_cancellation` and `on_crashed`: Prefect's worker calls it once the process is gone."""
    with get_client(sync_client=True) as client:
        _end_below(client, flow_run.id, is_crash=state.is_crashed())


def _end_below(client: SyncPrefectClient, parent: UUID, *, is_crash: bool) -> None:
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]))
    message = "The flow run around it has ended."
    for run in client.read_flow_runs(flow_run_filter=below):
        if run.deployment_id is not None:  # in a process of its own
            continue
        _end_below(client, run.id, is_crash=is_crash)
        if run.state is None or not run.state.is_final():
            ended: State[Any] = Crashed(message=message) if is_crash else Cancelled(message=message)
            client.set_flow_run_state(run.id, ended, force=True)
