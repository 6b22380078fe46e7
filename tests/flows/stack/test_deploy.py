"""Millrace's objects in a Prefect server: the file of deployments, their forms, the work pool, lost runs, and the
deployments of users.
"""

import importlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelling, Crashed, Pending, Running, Scheduled, Suspended
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from data import sort_digits
from flows import SOURCE_FOLDER, pipeline
from flows.server.api import LocalServer
from flows.stack.deploy import DEPLOYMENTS, QUEUES, ensure_pool, name_limit, recover_lost_runs, without_null_types
from flows.stack.services import POOL
from flows.stack.state import FLOW_RUN_ID, Service, StackState, write_stack
from flows.sweep import flow as sweep
from rlcore.config.base import group_members
from rlcore.config.compose import load_config
from rlcore.storage.locks import start_time_of
from tests.flows.conftest import REPOSITORY, Finished, Millrace, ended, forked, start, under
from tests.helpers.attempts import Attempt

ALL = yaml.safe_load((SOURCE_FOLDER / DEPLOYMENTS).read_text())["deployments"]
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
def test_a_deployment_has_known_parameters_and_our_pool(one):
    assert {*one.get("parameters", {}), "root"} <= set(form_of(one)["properties"])
    assert one["description"]
    assert one["work_pool"]["name"] == POOL
    assert one["work_pool"]["work_queue_name"] in QUEUES
    assert "schedules" not in one, "Prefect would switch off, at each `up`, what people have switched on"
    if "experiment" in one.get("parameters", {}):
        load_config([], experiment=one["parameters"]["experiment"])
        schema = without_null_types(form_of(one))
        for good in (*group_members("experiment"), "/my files/mine.yaml", "mine.yml"):
            validate({"experiment": good}, schema, raise_on_error=True)
        if "enum" in str(schema["properties"]["experiment"]):  # a sweep's child is started by sweeps alone
            with pytest.raises(ValidationError, match=r"'debg' does not match.*countdown_demo.*debug"):
                validate({"experiment": "debg"}, schema, raise_on_error=True)


def test_every_experiment_and_every_flow_has_a_deployment():
    names = [name_of(one) for one in ALL]
    assert len({*names}) == len(names)
    deployed = {one["parameters"]["experiment"] for one in ALL if flow_of(one) is pipeline.pipeline}
    assert deployed >= set(group_members("experiment"))
    modules = (pipeline, sweep)
    flows = {found.name for module in modules for found in vars(module).values() if isinstance(found, Flow)}
    assert {flow_of(one).name for one in ALL} == flows
    at_the_top = SOURCE_FOLDER / "prefect.yaml"
    assert (at_the_top.is_symlink(), at_the_top.resolve()) == (True, (SOURCE_FOLDER / DEPLOYMENTS).resolve())


def test_the_form_offers_experiments_and_refuses_wrong_values():
    form = form_of(ALL[0])
    properties = form["properties"]
    assert without_null_types(form)["properties"]["experiment"]["anyOf"][0]["enum"] == list(group_members("experiment"))
    assert properties["learning_rate"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert properties["total_steps"]["anyOf"][0]["minimum"] == 0
    assert all(one["description"] for one in properties.values()), "each field has a help text"


@pytest.fixture
def deployment(client: SyncPrefectClient) -> Iterator[UUID]:
    ensure_pool(client)
    made = client.create_deployment(client.create_flow_from_name("pooled"), "pooled", work_pool_name=POOL)
    yield made
    client.delete_deployment(made)


@pytest.mark.prefect
def test_the_work_pool_takes_no_job_variable(deployment, prefect_server):
    path, server = f"/api/deployments/{deployment}/create_flow_run", prefect_server.url.removesuffix("/api")
    for name in ("command", "env", "env.PYTHONPATH", "working_dir", "name", "stream_output"):
        asked = {"job_variables": {name: "x"}}
        reported = Attempt("POST", path, asked, login=prefect_server.login, status=422).try_at(server)
        assert f"'{name}' was unexpected" in reported
    assert Attempt("POST", path, {}, login=prefect_server.login, status=201).try_at(server)


@pytest.mark.prefect
def test_limits_stay_as_set_until_the_root_has_slots(client):
    ensure_pool(client)
    queue = client.read_work_queue_by_name("training", work_pool_name=POOL)
    for limit, has_slots, then in ((1, False, 1), (3, True, 3), (1, True, None)):
        client.update_work_queue(queue.id, concurrency_limit=limit)
        ensure_pool(client, has_slots=has_slots)
        assert client.read_work_queue(queue.id).concurrency_limit == then


@pytest.mark.prefect
def test_limit_of_a_deployment_has_its_name(client, deployment):
    for limit in (1, 2):
        client.update_deployment(deployment, DeploymentUpdate(concurrency_limit=limit))
        name_limit(client, client.read_deployment(deployment))
        found = client.read_deployment(deployment).global_concurrency_limit
        assert (found.name, found.limit) == ("deployment pooled pooled", limit)
    chosen = GlobalConcurrencyLimitUpdate(name="mine")
    client.update_global_concurrency_limit(found.name, chosen)
    name_limit(client, client.read_deployment(deployment))
    assert client.read_deployment(deployment).global_concurrency_limit.name == "mine"


@pytest.mark.prefect
def test_only_runs_without_a_process_are_started_again(client, deployment):
    def now_in(run: FlowRun, state: State[object], pid: int | None = None) -> None:
        if pid is not None:
            client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{pid}")
        client.set_flow_run_state(run.id, state, force=True)

    gone = subprocess.Popen(WAITING, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    gone.wait()
    runs = lost, reused, suspended, again, cancelling, failed = [
        client.create_flow_run_from_deployment(deployment) for _ in range(6)
    ]
    for run in runs:
        now_in(run, Running(), gone.pid)
    now_in(suspended, Suspended(timeout_seconds=3600))
    now_in(cancelling, Cancelling())
    now_in(failed, Crashed(message="Flow run was terminated by signal 9."))
    environment = os.environ | {FLOW_RUN_ID: str(again.id)}
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE, env=environment) as process:
        client.update_flow_run(reused.id, infrastructure_pid=f"{socket.gethostname()}:{process.pid}")
        now_in(again, Scheduled(name="AwaitingRetry"), process.pid)
        now_in(again, Running())  # its second attempt, in that process
        assert sorted(recover_lost_runs(client, workers_are_up=True)) == sorted([lost.name, reused.name])
        process.communicate()
    names = ["AwaitingRetry", "AwaitingRetry", "Suspended", "Running", "Cancelled", "Crashed"]
    assert [client.read_flow_run(run.id).state_name for run in runs] == names
    assert recover_lost_runs(client, workers_are_up=True) == [again.name]
    now_in(lost, Pending())  # a worker has taken it
    assert recover_lost_runs(client, workers_are_up=True) == []
    assert recover_lost_runs(client, workers_are_up=False) == [lost.name], "that worker is gone"


OWN = """
defaults: [debug, {override /data: custom}, _self_]
name: own
data: {build: "my_task:build", scorer: "my_task:score", train_size: 20, validation_size: 5}
"""


@pytest.fixture(scope="module")
def deployed(prefect_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Millrace:
    command = under(prefect_server, tmp_path_factory.mktemp("deployed"))
    url = prefect_server.url.removesuffix("/api")
    service = Service("prefect", os.getpid(), start_time_of(psutil.Process()), 1, url, "", "")
    write_stack(command.root, StackState(services=(service,)))
    return command


@pytest.fixture
def own(tmp_path: Path) -> Path:
    shutil.copy(sort_digits.__file__, tmp_path / "my_task.py")
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path / "own.yaml"


def deploy(deployed: Millrace, file: Path, *words: str) -> Finished:
    words = ("deploy", file.name, *words, "--root", str(deployed.root))
    return ended(forked("flows.cli", words, os.environ | deployed.environment, file.parent))


@pytest.mark.prefect
def test_it_is_made_and_updated_and_keeps_schedules(deployed, own, api):
    def find_own() -> tuple[dict[str, Any], list[tuple[str, str, bool]]]:
        named = {"deployments": {"name": {"any_": ["own"]}}, "flows": {"name": {"any_": ["pipeline"]}}}
        (one,) = api.filter("deployments", **named)
        schedules = [(each["schedule"], each["active"]) for each in one["schedules"]]
        return one, sorted((schedule["cron"], schedule["timezone"], active) for schedule, active in schedules)

    done = deploy(deployed, own, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin")
    assert (done.code, done.err) == (0, "")
    assert f"deployment pipeline/own, 0 3 * * * (Europe/Berlin), workspace {deployed.root}: http://" in done.out
    made, crons = find_own()
    assert made["parameters"] == {"experiment": str(own), "overrides": []}
    assert crons == [("0 3 * * *", "Europe/Berlin", True)]
    assert made["entrypoint"] == "flows/pipeline.py:pipeline"
    (pull,) = made["pull_steps"]
    assert pull == {"prefect.deployments.steps.set_working_directory": {"directory": str(SOURCE_FOLDER)}}
    assert (made["work_pool_name"], made["work_queue_name"]) == ("millrace", "training")
    assert made["enforce_parameter_schema"]
    assert made["parameter_openapi_schema"]["properties"]["total_steps"]["type"] == "integer", "it may be left empty"
    by_hand = {"active": False, "schedule": {"cron": "0 5 * * *", "timezone": "UTC"}}
    api.ask(f"deployments/{made['id']}/schedules", [by_hand])
    for words, cron in ((("seed=2", "--name", "own"), "0 3 * * *"), (("seed=2", "--cron", "0 4 * * *"), "0 4 * * *")):
        done = deploy(deployed, own, *words)
        again, crons = find_own()
        assert (again["id"], done.code) == (made["id"], 0), done.err
        assert again["parameters"]["overrides"] == ["seed=2"]
        assert [(one, is_on) for one, _, is_on in crons] == [(cron, True), ("0 5 * * *", False)]


@pytest.mark.prefect
def test_the_server_of_another_root_is_refused_by_name(deployed, own, api, tmp_path):
    done = deploy(replace(deployed, root=tmp_path / "other"), own, "seed=3", "--name", "theirs")
    assert done.code == 1
    assert f"PREFECT_API_URL: {api.url} is not the server of the stack under {tmp_path / 'other'}" in done.err


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (["--cron", "0 3 * *"], 2, ["--cron: must be five fields of cron", "got '0 3 * *' in UTC", "'0 3 * * *'"]),
        (["data.scorer=my_tusk:score"], 2, ["my_tusk:score"]),
        (["--name", "listed"], 1, ["pipeline/listed: is a deployment of Millrace's own", "--name"]),
    ],
)
def test_a_mistake_makes_no_deployment(deployed, own, api, words, code, reported):
    api.ask("deployments/", {"name": "listed", "flow_id": api.ask("flows/", {"name": "pipeline"})["id"]})
    before = api.filter("deployments")
    done = deploy(deployed, own, *words)
    assert (done.code, [part for part in reported if part not in done.err]) == (code, []), done.err
    assert "Traceback" not in done.err
    assert api.filter("deployments") == before


@pytest.mark.prefect
def test_without_a_stack_it_names_the_root_of_the_folder(own, bare):
    environment = os.environ | bare.environment | {"PYTHONPATH": str(REPOSITORY)}
    done = ended(start((sys.executable, "-m", "flows.cli", "deploy", own.name), environment, own.parent))
    assert done.code == 1
    assert f"no Prefect server is up under {own.parent / 'artifacts'}" in done.err
    assert "millrace up --root" in done.err
