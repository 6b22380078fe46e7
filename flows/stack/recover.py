"""Flow runs whose process is gone, though Prefect says that they run: after a crash of worker and flow together."""

import socket
from datetime import UTC, datetime, timedelta

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Crashed, Scheduled

from flows.server.watch import NO_HEARTBEAT
from flows.stack.recipes import POOL
from flows.stack.state import BIRTH_TOLERANCE_S

LOST = "Its process is gone."
GIVEN_UP_WITHIN = timedelta(days=1)
"""A run that was given up longer ago stays as it is: nobody waits for it."""
ALIVE = (StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED)
"""States of a run that has a process; while it waits for room on a disk it is Paused."""
SUSPENDED = "Suspended"
"""Of the type Paused too, but without a process: it goes on when somebody resumes it, and not before."""


def recover_lost_runs(client: SyncPrefectClient, *, workers_are_up: bool) -> list[str]:
    """Schedule them again, so that they go on from their last checkpoint; the names of those runs.

    A run that was being cancelled is cancelled. Only runs of processes on this host are judged: the true guard against
    two processes on one run is the run's lock. Where no worker is up, a run that waits to be started has lost the
    worker that was about to start it.
    """
    recovered = []
    for run in _given_up(client):
        if _has_lost_its_process(client, run):
            _schedule_again(client, run)
            recovered.append(run.name)
    for run in client.read_flow_runs(flow_run_filter=_running(), work_pool_filter=_our_pool()):
        if run.state_name == SUSPENDED:
            continue
        # A pending one may still say the process of its last attempt: it is lost only with the worker that had it.
        is_pending = run.state_type == StateType.PENDING
        if workers_are_up if is_pending else not _has_lost_its_process(client, run):
            continue
        if run.state_type == StateType.CANCELLING:
            client.set_flow_run_state(run.id, Cancelled(message=LOST), force=True)
            continue
        _schedule_again(client, run)
        recovered.append(run.name)
    _end_nested(client)
    return recovered


def _schedule_again(client: SyncPrefectClient, run: FlowRun) -> None:
    state: State[object] = Scheduled(scheduled_time=datetime.now(UTC), name="AwaitingRetry", message=LOST)
    client.set_flow_run_state(run.id, state, force=True)


def _given_up(client: SyncPrefectClient) -> list[FlowRun]:
    """Runs that the automation has given up while nobody was there: it may be quicker than we are."""
    since = FlowRunFilterEndTime.model_validate({"after_": datetime.now(UTC) - GIVEN_UP_WITHIN})
    crashed = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=crashed, end_time=since), work_pool_filter=_our_pool()
    )
    return [run for run in found if run.state is not None and run.state.message == NO_HEARTBEAT]


def _has_lost_its_process(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Prefect's process worker notes `<host>:<pid>`. Another process has the number by now if it was born later than
    the run last began.
    """
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if not pid.isdigit() or host not in ("", socket.gethostname()):
        return False
    try:
        process = psutil.Process(int(pid))
        began = _last_began(client, run)
        is_older = began is None or process.create_time() <= began.timestamp() + BIRTH_TOLERANCE_S
        return not is_older or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _last_began(client: SyncPrefectClient, run: FlowRun) -> datetime | None:
    """Its `start_time` is that of its first attempt; each attempt has a process of its own."""
    times = [state.timestamp for state in client.read_flow_run_states(run.id) if state.is_running()]
    return max(times, default=run.start_time)


def _end_nested(client: SyncPrefectClient) -> None:
    """Flows nested in one that does not run do not run either: they were in its process."""
    for run in client.read_flow_runs(flow_run_filter=_running()):
        if run.deployment_id is None and run.parent_task_run_id is not None:
            parent = _parent(client, run)
            if parent is not None and parent.state_type not in ALIVE:
                client.set_flow_run_state(run.id, Crashed(message=LOST), force=True)


def _parent(client: SyncPrefectClient, run: FlowRun) -> FlowRun | None:
    assert run.parent_task_run_id is not None
    task_run = client.read_task_run(run.parent_task_run_id)
    return None if task_run.flow_run_id is None else client.read_flow_run(task_run.flow_run_id)


def _running() -> FlowRunFilter:
    kinds = [StateType.PENDING, *ALIVE]
    return FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)))


def _our_pool() -> WorkPoolFilter:
    return WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
