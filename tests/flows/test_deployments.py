"""`prefect.yaml` names flows and experiments that exist, and its forms refuse what the settings would refuse."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from flows.stack import deploy
from flows.stack.deploy import eased_schema
from rlcore.config.compose import experiment_names, load_config
from rlcore.errors import MillraceError

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(deploy.DEPLOYMENTS.read_text())["deployments"]
IDS = [f"{one['entrypoint'].partition(':')[2]}/{one['name']}" for one in DEPLOYMENTS]


def flow_of(deployment: dict[str, Any]) -> Flow[Any, Any]:
    file, _, name = deployment["entrypoint"].partition(":")
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    return found


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=IDS)
def test_a_deployment_is_a_flow_with_known_parameters(deployment: dict[str, Any]) -> None:
    schema = parameter_schema(flow_of(deployment).fn)
    assert set(deployment["parameters"]) <= set(schema.properties)
    assert deployment["description"]
    assert deployment["work_pool"]["name"] == "millrace"
    assert all(schedule["active"] is False for schedule in deployment.get("schedules", []))


OF_ONE_RUN = [one for one in DEPLOYMENTS if "experiment" in one["parameters"]]


@pytest.mark.parametrize("deployment", OF_ONE_RUN)
def test_a_deployment_names_an_experiment_that_composes(deployment: dict[str, Any]) -> None:
    load_config([], experiment=deployment["parameters"]["experiment"])


def test_names_are_unique_and_every_experiment_has_one() -> None:
    assert len(set(IDS)) == len(IDS)
    deployed = {one["parameters"]["experiment"] for one in DEPLOYMENTS if one["entrypoint"].endswith(":pipeline")}
    assert deployed >= set(experiment_names())


def test_the_form_offers_experiments_and_refuses_a_negative_learning_rate() -> None:
    properties = parameter_schema(flow_of(DEPLOYMENTS[0]).fn).properties
    assert eased_schema({"properties": properties})["properties"]["experiment"]["anyOf"][0]["enum"] == list(
        experiment_names()
    )
    assert properties["learning_rate"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert properties["total_steps"]["anyOf"][0]["minimum"] == 1
    assert all(one["description"] for one in properties.values()), "each field has a help text"


@pytest.mark.parametrize("deployment", OF_ONE_RUN)
def test_an_experiment_is_a_name_or_a_file_and_anything_else_is_refused_with_the_names(
    deployment: dict[str, Any],
) -> None:
    schema = eased_schema(parameter_schema(flow_of(deployment).fn).model_dump_for_openapi())
    for good in (*experiment_names(), "/my files/mine.yaml", "mine.yml"):
        validate({"experiment": good}, schema, raise_on_error=True)
    if "enum" in str(schema["properties"]["experiment"]):  # a sweep's child is started by sweeps alone
        with pytest.raises(ValidationError, match=r"'debg' does not match.*countdown_demo.*debug"):
            validate({"experiment": "debg"}, schema, raise_on_error=True)


def test_a_deployment_of_a_deleted_experiment_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(deploy._deployments()) == len(DEPLOYMENTS)
    changed = tmp_path / "prefect.yaml"
    changed.write_text(deploy.DEPLOYMENTS.read_text().replace("experiment: countdown_ppo_demo", "experiment: gone"))
    monkeypatch.setattr(deploy, "DEPLOYMENTS", changed)
    told = r"deployment 'countdown-ppo-demo' .*experiment=gone is no file in conf/experiment; there is .*Take the"
    with pytest.raises(MillraceError, match=told):
        deploy._deployments()
