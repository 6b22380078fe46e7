"""Flow runs below one that was ended from outside: those in its process, and a sweep's on workers."""

import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.flows import Flow
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled, Cancelling, Crashed, Paused
from prefect.tasks import Task

POLL_S = 0.5


def begin_anew(*nested: Flow[..., Any]) -> None:
    """Give this attempt at the current flow run nested flow runs of its own; call it before the first of them.

    Prefect counts the calls of a nested flow and takes the n-th one for the n-th of the attempt before: a Completed one
    is not run again but its stored result is handed out, a Paused one goes on with the parameters that it had. What is
    done is known from the run's files, which may have changed meanwhile, and nested flows skip it by themselves.
    """
    context = FlowRunContext.get()
    assert context is not None, "called in a flow"
    with get_client(sync_client=True) as client:
        _end_below(client, UUID(str(this_run.id)), is_crash=False)
    for one in nested:
        known_as = Task(name=one.name, fn=one.fn).task_key
        context.task_run_dynamic_keys[known_as] = time.time_ns()  # a number that no attempt has used


def end_nested(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A hook for `on_cancellation` and `on_crashed`: Prefect's worker calls it once the process is gone.

    Those on workers are cancelled too. After a crash they go on, and whoever comes next finds their work.
    """
    with get_client(sync_client=True) as client:
        _end_below(client, flow_run.id, is_crash=state.is_crashed())
        if not state.is_crashed():
            _cancel_on_workers(client, flow_run.id)


def cancel_nested(client: SyncPrefectClient, parent: UUID, *, wait_s: float) -> None:
    """Those in this process are over. Those on workers are cancelled, and waited for so long: they save first."""
    _end_below(client, parent, is_crash=False)
    _cancel_on_workers(client, parent)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and _alive_on_workers(client, parent):
        time.sleep(POLL_S)


def pause_nested(client: SyncPrefectClient, parent: UUID) -> None:
    """Those in this process, which ends: the flow run around them is suspended, and goes on with them when resumed.

    They are Paused: Prefect suspends no flow run inside another one, and who is told of a suspension is told once.
    """
    for run in _below(client, parent):
        if run.deployment_id is None and run.state is not None and run.state.is_running():
            pause_nested(client, run.id)
            client.set_flow_run_state(run.id, Paused(message="The flow run around it is suspended."))


def _cancel_on_workers(client: SyncPrefectClient, parent: UUID) -> None:
    for run in _alive_on_workers(client, parent):
        client.set_flow_run_state(run.id, Cancelling(message="The flow run around it was stopped."))


def _alive_on_workers(client: SyncPrefectClient, parent: UUID) -> list[FlowRun]:
    return [run for run in _below(client, parent) if run.deployment_id is not None and not _is_over(run)]


def _end_below(client: SyncPrefectClient, parent: UUID, *, is_crash: bool) -> None:
    message = "The flow run around it has ended."
    for run in _below(client, parent):
        if run.deployment_id is not None:  # in a process of its own
            continue
        _end_below(client, run.id, is_crash=is_crash)
        if not _is_over(run):
            ended: State[Any] = Crashed(message=message) if is_crash else Cancelled(message=message)
            client.set_flow_run_state(run.id, ended, force=True)


def _below(client: SyncPrefectClient, parent: UUID) -> list[FlowRun]:
    """The newest ones: the server gives 200 at most, and older ones are over."""
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]))
    return client.read_flow_runs(flow_run_filter=below, sort=FlowRunSort.EXPECTED_START_TIME_DESC)


def _is_over(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()
