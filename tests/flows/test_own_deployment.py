"""`millrace deploy`: a deployment of one's own experiment, beside Millrace's own in one Prefect server."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data import multiplication
from flows.server.api import LocalServer
from flows.stack.state import STACK, StackState, write_stack
from tests.flows.conftest import REPOSITORY, Api, Finished, Millrace, ended, forked, start, under

pytestmark = pytest.mark.prefect

OWN = """
defaults: [debug, {override /data: custom}, _self_]
name: own
data: {build: "my_task:build", scorer: "my_task:score", train_size: 20, validation_size: 5}
"""


def brought_up_to_date(command: Millrace, root: Path) -> Finished:
    """What `millrace up` runs for its deployments."""
    environment = os.environ | command.environment | {STACK: str(root)}
    return ended(forked("flows.stack.deploy", [], environment))


@pytest.fixture(scope="module")
def deployed(prefect_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Millrace:
    """The command line with a server that has Millrace's deployments."""
    command = under(prefect_server, tmp_path_factory.mktemp("deployed"))
    write_stack(command.root, StackState(prefect_api_url=prefect_server.url))
    told = brought_up_to_date(command, command.root)
    assert told.code == 0, told.err
    return command


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An experiment, and beside it the task that it names."""
    shutil.copy(multiplication.__file__, tmp_path / "my_task.py")
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path / "own.yaml"


def deploy(deployed: Millrace, file: Path, *words: str) -> Finished:
    """The command, in the folder of the file."""
    words = ("deploy", file.name, *words, "--root", str(deployed.root))
    return ended(forked("flows.cli", words, os.environ | deployed.environment, file.parent))


def found(api: Api, name: str) -> dict[str, Any]:
    (one,) = api.filter("deployments", deployments={"name": {"any_": [name]}}, flows={"name": {"any_": ["pipeline"]}})
    return one


def crons(deployment: dict[str, Any]) -> list[tuple[str, str, bool]]:
    schedules = [(one["schedule"], one["active"]) for one in deployment["schedules"]]
    return [(schedule["cron"], schedule["timezone"], active) for schedule, active in schedules]


def test_it_is_made_and_brought_up_to_date_and_keeps_its_schedule(deployed: Millrace, own: Path, api: Api) -> None:
    done = deploy(deployed, own, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin")
    assert (done.code, done.err) == (0, "")
    assert f"deployment pipeline/own, 0 3 * * * (Europe/Berlin), root {deployed.root}: http://" in done.out
    made, model = found(api, "own"), found(api, "debug")
    assert made["parameters"] == {"experiment": str(own), "overrides": []}
    assert crons(made) == [("0 3 * * *", "Europe/Berlin", True)]
    like = (
        "flow_id",
        "entrypoint",
        "path",
        "pull_steps",
        "work_pool_name",
        "work_queue_name",
        "enforce_parameter_schema",
    )
    assert [made[key] for key in like] == [model[key] for key in like]
    assert made["parameter_openapi_schema"] == model["parameter_openapi_schema"]

    done = deploy(deployed, own, "seed=2", "--name", "own")
    again = found(api, "own")
    assert (again["id"], done.code) == (made["id"], 0)
    assert again["parameters"]["overrides"] == ["seed=2"]
    assert crons(again) == crons(made)

    # The next `millrace up` keeps it, and says nothing of it.
    told = brought_up_to_date(deployed, deployed.root)
    assert told.code == 0, told.err
    assert "pipeline/own" not in told.out
    assert found(api, "own")["parameters"] == again["parameters"]
    assert crons(found(api, "own")) == crons(made)


def test_the_server_of_another_root_is_refused_by_name(deployed: Millrace, own: Path, api: Api, tmp_path: Path) -> None:
    before = api.filter("deployments")
    done = deploy(replace(deployed, root=tmp_path / "other"), own, "seed=3", "--name", "theirs")
    assert done.code == 1
    assert f"PREFECT_API_URL: {api.url} is not the server of the stack under {tmp_path / 'other'}" in done.err
    assert api.filter("deployments") == before


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--cron", "0 3 * *"], 2, ["--cron: must be five fields of cron", "got '0 3 * *' in UTC", "'0 3 * * *'"]),
        (["data.scorer=my_tusk:score"], 2, ["my_tusk:score", "beside the experiment's file"]),
        (["--name", "debug"], 1, ["pipeline/debug: is a deployment of Millrace's own", "--name"]),
    ],
)
def test_a_mistake_makes_no_deployment(
    deployed: Millrace, own: Path, api: Api, words: list[str], code: int, told: list[str]
) -> None:
    before = api.filter("deployments")
    done = deploy(deployed, own, *words)
    assert done.code == code, done.err
    assert all(part in done.err for part in told), done.err
    assert "Traceback" not in done.err
    assert api.filter("deployments") == before


def test_without_a_stack_it_says_how_one_is_started(own: Path, bare: Millrace) -> None:
    done = deploy(bare, own)
    assert done.code == 1
    assert f"no Prefect server is up under {bare.root}" in done.err
    assert "millrace up --root" in done.err


def test_the_root_is_that_of_the_folder_that_the_command_is_started_in(own: Path, bare: Millrace) -> None:
    environment = os.environ | bare.environment | {"PYTHONPATH": str(REPOSITORY)}
    done = ended(start((sys.executable, "-m", "flows.cli", "deploy", own.name), environment, own.parent))
    assert f"no Prefect server is up under {own.parent / 'artifacts'}" in done.err
