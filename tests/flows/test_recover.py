"""Which flow runs `millrace up` starts again: those whose process is gone, and no others."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Running, Scheduled, Suspended

from flows.server.api import LocalServer
from flows.server.watch import NO_HEARTBEAT
from flows.stack.deploy import recover_lost_runs
from flows.stack.services import POOL
from flows.stack.state import FLOW_RUN

pytestmark = pytest.mark.prefect

WAITING = [sys.executable, "-c", "input()"]


@pytest.fixture
def client(prefect_server: LocalServer) -> Iterator[SyncPrefectClient]:
    server = {PREFECT_API_URL: prefect_server.url, PREFECT_API_AUTH_STRING: prefect_server.login}
    with temporary_settings(server), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def deployment(client: SyncPrefectClient) -> Iterator[UUID]:
    """A deployment in our work pool, where no worker is."""
    client.create_work_pool(WorkPoolCreate(name=POOL, type="process"), overwrite=True)
    made = client.create_deployment(client.create_flow_from_name("recovered"), "recovered", work_pool_name=POOL)
    yield made
    client.delete_deployment(made)


def begun(client: SyncPrefectClient, deployment: UUID, pid: int) -> FlowRun:
    """A flow run that a worker has started, as that process."""
    run = client.create_flow_run_from_deployment(deployment)
    client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{pid}")
    now_in(client, run, Running())
    return run


def now_in(client: SyncPrefectClient, run: FlowRun, state: State[object]) -> None:
    client.set_flow_run_state(run.id, state, force=True)


def test_a_run_is_started_again_only_if_its_process_is_gone_and_nobody_has_suspended_it(
    client: SyncPrefectClient, deployment: UUID
) -> None:
    gone = subprocess.Popen(WAITING, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    gone.wait()
    lost, suspended, reused, again, aborted, failed = (begun(client, deployment, gone.pid) for _ in range(6))
    now_in(client, suspended, Suspended(timeout_seconds=3600))
    now_in(client, aborted, Crashed(message=NO_HEARTBEAT))
    now_in(client, failed, Crashed(message="Flow run was terminated by signal 9."))
    environment = os.environ | {FLOW_RUN: str(again.id)}
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE, env=environment) as process:
        for run in (reused, again):
            client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{process.pid}")
        now_in(client, again, Scheduled(name="AwaitingRetry"))
        now_in(client, again, Running())  # its second attempt, in that process
        assert sorted(recover_lost_runs(client, workers_are_up=True)) == sorted(
            run.name for run in (lost, reused, aborted)
        )
        process.communicate()
    states = {
        run.id: client.read_flow_run(run.id).state_name for run in (lost, reused, suspended, again, aborted, failed)
    }
    assert states == {
        lost.id: "AwaitingRetry",
        reused.id: "AwaitingRetry",
        suspended.id: "Suspended",
        again.id: "Running",
        aborted.id: "AwaitingRetry",
        failed.id: "Crashed",
    }
    assert recover_lost_runs(client, workers_are_up=True) == [again.name]
