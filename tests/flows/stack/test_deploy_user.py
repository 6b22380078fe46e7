"""`millrace deploy`: a deployment of a user's experiment in a Prefect server with Millrace's work pool."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from data import multiplication
from flows import SOURCE_FOLDER
from flows.server.api import LocalServer
from flows.stack.state import Service, StackState, write_stack
from rlcore.storage.locks import start_time_of
from tests.flows.conftest import REPOSITORY, Api, Finished, Millrace, ended, forked, start, under

pytestmark = pytest.mark.prefect

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
    shutil.copy(multiplication.__file__, tmp_path / "my_task.py")
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path / "own.yaml"


def deploy(deployed: Millrace, file: Path, *words: str) -> Finished:
    words = ("deploy", file.name, *words, "--root", str(deployed.root))
    return ended(forked("flows.cli", words, os.environ | deployed.environment, file.parent))


def find_deployment(api: Api, name: str) -> dict[str, Any]:
    (one,) = api.filter("deployments", deployments={"name": {"any_": [name]}}, flows={"name": {"any_": ["pipeline"]}})
    return one


def crons(deployment: dict[str, Any]) -> list[tuple[str, str, bool]]:
    schedules = [(one["schedule"], one["active"]) for one in deployment["schedules"]]
    return sorted((schedule["cron"], schedule["timezone"], active) for schedule, active in schedules)


def test_it_is_made_and_updated_and_keeps_schedules(deployed: Millrace, own: Path, api: Api) -> None:
    done = deploy(deployed, own, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin")
    assert (done.code, done.err) == (0, "")
    assert f"deployment pipeline/own, 0 3 * * * (Europe/Berlin), root {deployed.root}: http://" in done.out
    made = find_deployment(api, "own")
    assert made["parameters"] == {"experiment": str(own), "overrides": []}
    assert crons(made) == [("0 3 * * *", "Europe/Berlin", True)]
    assert made["entrypoint"] == "flows/pipeline.py:pipeline"
    assert made["pull_steps"] == [
        {"prefect.deployments.steps.set_working_directory": {"directory": str(SOURCE_FOLDER)}}
    ]
    assert (made["work_pool_name"], made["work_queue_name"]) == ("millrace", "training")
    assert made["enforce_parameter_schema"]
    assert made["parameter_openapi_schema"]["properties"]["total_steps"]["type"] == "integer", "it may be left empty"

    by_hand = {"active": False, "schedule": {"cron": "0 5 * * *", "timezone": "UTC"}}
    api.post(f"deployments/{made['id']}/schedules", [by_hand])
    for words, cron in ((("seed=2", "--name", "own"), "0 3 * * *"), (("seed=2", "--cron", "0 4 * * *"), "0 4 * * *")):
        done = deploy(deployed, own, *words)
        again = find_deployment(api, "own")
        assert (again["id"], done.code) == (made["id"], 0), done.err
        assert again["parameters"]["overrides"] == ["seed=2"]
        assert [(one, is_on) for one, _, is_on in crons(again)] == [(cron, True), ("0 5 * * *", False)]


def test_the_server_of_another_root_is_refused_by_name(deployed: Millrace, own: Path, api: Api, tmp_path: Path) -> None:
    done = deploy(replace(deployed, root=tmp_path / "other"), own, "seed=3", "--name", "theirs")
    assert done.code == 1
    assert f"PREFECT_API_URL: {api.url} is not the server of the stack under {tmp_path / 'other'}" in done.err


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (["--cron", "0 3 * *"], 2, ["--cron: must be five fields of cron", "got '0 3 * *' in UTC", "'0 3 * * *'"]),
        (["data.scorer=my_tusk:score"], 2, ["my_tusk:score"]),
        (["--name", "listed"], 1, ["pipeline/listed: is a deployment of Millrace's own", "--name"]),
    ],
)
def test_a_mistake_makes_no_deployment(
    deployed: Millrace, own: Path, api: Api, words: list[str], code: int, reported: list[str]
) -> None:
    api.post("deployments/", {"name": "listed", "flow_id": api.post("flows/", {"name": "pipeline"})["id"]})
    before = api.filter("deployments")
    done = deploy(deployed, own, *words)
    assert done.code == code, done.err
    assert all(part in done.err for part in reported), done.err
    assert "Traceback" not in done.err
    assert api.filter("deployments") == before


def test_without_a_stack_it_names_the_root_of_the_folder(own: Path, bare: Millrace) -> None:
    environment = os.environ | bare.environment | {"PYTHONPATH": str(REPOSITORY)}
    done = ended(start((sys.executable, "-m", "flows.cli", "deploy", own.name), environment, own.parent))
    assert done.code == 1
    assert f"no Prefect server is up under {own.parent / 'artifacts'}" in done.err
    assert "millrace up --root" in done.err
