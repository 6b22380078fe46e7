"""Millrace's objects in a Prefect server: the file of deployments, their forms, the work pool, lost runs."""

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Crashed, Pending, Running, Scheduled, Suspended
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from flows import SOURCE_FOLDER, pipeline
from flows.server.api import LocalServer
from flows.stack.deploy import DEPLOYMENTS, QUEUES, ensure_pool, recover_lost_runs, without_null_types
from flows.stack.services import POOL
from flows.stack.state import FLOW_RUN_ID
from flows.sweep import flow as sweep
from rlcore.config.base import group_members
from rlcore.config.compose import load_config
from tests.helpers.attempts import Attempt

ALL = yaml.safe_load((SOURCE_FOLDER / DEPLOYMENTS).read_text())["deployments"]
OF_ONE_RUN = [one for one in ALL if "experiment" in one.get("parameters", {})]
WAITING = [sys.executable, "-c", "input()"]


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    file, _, name = deployment["entrypoint"].partition(":")
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    return found


def name_of(deployment: dict[str, Any]) -> str:
    return f"{flow_of(deployment).name}/{deployment['name']}"


def form_of(deployment: dict[str, Any]) -> dict[str, Any]:
    return parameter_schema(flow_of(deployment)).model_dump_for_openapi()


@pytest.mark.parametrize("one", ALL, ids=name_of)
def test_a_deployment_has_known_parameters_and_our_pool(one: dict[str, Any]) -> None:
    assert {*one.get("parameters", {}), "root"} <= set(form_of(one)["properties"])
    assert one["description"]
    assert one["work_pool"]["name"] == POOL
    assert one["work_pool"]["work_queue_name"] in QUEUES
    assert "schedules" not in one, "Prefect would switch off, at each `up`, what people have switched on"
    if one in OF_ONE_RUN:
        load_config([], experiment=one["parameters"]["experiment"])


def test_every_experiment_and_every_flow_has_a_deployment() -> None:
    names = [name_of(one) for one in ALL]
    assert len({*names}) == len(names)
    deployed = {one["parameters"]["experiment"] for one in ALL if flow_of(one) is pipeline.pipeline}
    assert deployed >= set(group_members("experiment"))
    modules = (pipeline, sweep)
    flows = {found.name for module in modules for found in vars(module).values() if isinstance(found, Flow)}
    assert {flow_of(one).name for one in ALL} == flows


def test_prefect_finds_the_file_at_the_top_of_the_checkout() -> None:
    assert (SOURCE_FOLDER / "prefect.yaml").resolve() == (SOURCE_FOLDER / DEPLOYMENTS).resolve()
    assert Path(SOURCE_FOLDER / "prefect.yaml").is_symlink()


def test_the_form_offers_experiments_and_refuses_wrong_values() -> None:
    form = form_of(ALL[0])
    properties = form["properties"]
    assert without_null_types(form)["properties"]["experiment"]["anyOf"][0]["enum"] == list(group_members("experiment"))
    assert properties["learning_rate"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert properties["total_steps"]["anyOf"][0]["minimum"] == 0
    assert all(one["description"] for one in properties.values()), "each field has a help text"


@pytest.mark.parametrize("one", OF_ONE_RUN, ids=name_of)
def test_an_experiment_is_a_name_or_a_file(one: dict[str, Any]) -> None:
    schema = without_null_types(form_of(one))
    for good in (*group_members("experiment"), "/my files/mine.yaml", "mine.yml"):
        validate({"experiment": good}, schema, raise_on_error=True)
    if "enum" in str(schema["properties"]["experiment"]):  # a sweep's child is started by sweeps alone
        with pytest.raises(ValidationError, match=r"'debg' does not match.*countdown_demo.*debug"):
            validate({"experiment": "debg"}, schema, raise_on_error=True)


# ---------------------------------------------------------------------- in a server


@pytest.fixture
def client(prefect_server: LocalServer) -> Iterator[SyncPrefectClient]:
    server = {PREFECT_API_URL: prefect_server.url, PREFECT_API_AUTH_STRING: prefect_server.login}
    with temporary_settings(server), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def deployment(client: SyncPrefectClient) -> Iterator[UUID]:
    ensure_pool(client)
    made = client.create_deployment(client.create_flow_from_name("pooled"), "pooled", work_pool_name=POOL)
    yield made
    client.delete_deployment(made)


@pytest.mark.prefect
def test_the_work_pool_takes_no_job_variable(deployment: UUID, prefect_server: LocalServer) -> None:
    path, server = f"/api/deployments/{deployment}/create_flow_run", prefect_server.url.removesuffix("/api")
    for name in ("command", "env", "env.PYTHONPATH", "working_dir", "name", "stream_output"):
        asked = {"job_variables": {name: "x"}}
        reported = Attempt("POST", path, asked, login=prefect_server.login, status=422).try_at(server)
        assert f"'{name}' was unexpected" in reported
    assert Attempt("POST", path, {}, login=prefect_server.login, status=201).try_at(server)


@pytest.mark.prefect
def test_limits_stay_as_set_until_the_root_has_slots(client: SyncPrefectClient) -> None:
    ensure_pool(client)
    queue = client.read_work_queue_by_name("training", work_pool_name=POOL)
    for limit, has_slots, then in ((1, False, 1), (3, True, 3), (1, True, None)):
        client.update_work_queue(queue.id, concurrency_limit=limit)
        ensure_pool(client, has_slots=has_slots)
        assert client.read_work_queue(queue.id).concurrency_limit == then


def begun(client: SyncPrefectClient, deployment: UUID, pid: int) -> FlowRun:
    run = client.create_flow_run_from_deployment(deployment)
    client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{pid}")
    now_in(client, run, Running())
    return run


def now_in(client: SyncPrefectClient, run: FlowRun, state: State[object]) -> None:
    client.set_flow_run_state(run.id, state, force=True)


@pytest.mark.prefect
def test_only_runs_without_a_process_are_started_again(client: SyncPrefectClient, deployment: UUID) -> None:
    gone = subprocess.Popen(WAITING, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    gone.wait()
    lost, suspended, reused, again, cancelling, failed = (begun(client, deployment, gone.pid) for _ in range(6))
    now_in(client, suspended, Suspended(timeout_seconds=3600))
    now_in(client, cancelling, Cancelling())
    now_in(client, failed, Crashed(message="Flow run was terminated by signal 9."))
    environment = os.environ | {FLOW_RUN_ID: str(again.id)}
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE, env=environment) as process:
        for run in (reused, again):
            client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{process.pid}")
        now_in(client, again, Scheduled(name="AwaitingRetry"))
        now_in(client, again, Running())  # its second attempt, in that process
        assert sorted(recover_lost_runs(client, workers_are_up=True)) == sorted([lost.name, reused.name])
        process.communicate()
    runs = (lost, reused, suspended, again, cancelling, failed)
    names = ["AwaitingRetry", "AwaitingRetry", "Suspended", "Running", "Cancelled", "Crashed"]
    assert [client.read_flow_run(run.id).state_name for run in runs] == names
    assert recover_lost_runs(client, workers_are_up=True) == [again.name]

    now_in(client, lost, Pending())  # a worker has taken it
    assert recover_lost_runs(client, workers_are_up=True) == []
    assert recover_lost_runs(client, workers_are_up=False) == [lost.name], "that worker is gone"
