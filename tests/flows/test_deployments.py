"""`conf/prefect.yaml` names flows and experiments that exist, and its forms refuse what the settings would refuse."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from flows import SOURCE_FOLDER, maintain, pipeline
from flows.stack.deploy import DEPLOYMENTS, POOL, QUEUES, eased_schema
from flows.sweep import flow as sweep
from rlcore.config.compose import experiment_names, load_config

ALL = yaml.safe_load((SOURCE_FOLDER / DEPLOYMENTS).read_text())["deployments"]


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    file, _, name = deployment["entrypoint"].partition(":")
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    return found


def name_of(deployment: dict[str, Any]) -> str:
    return f"{flow_of(deployment).name}/{deployment['name']}"


def form_of(deployment: dict[str, Any]) -> dict[str, Any]:
    """The form of its flow as Prefect writes it."""
    return parameter_schema(flow_of(deployment)).model_dump_for_openapi()


@pytest.mark.parametrize("one", ALL, ids=name_of)
def test_a_deployment_is_a_flow_with_known_parameters_and_a_queue_of_the_pool(one: dict[str, Any]) -> None:
    assert {*one.get("parameters", {}), "root"} <= set(form_of(one)["properties"])
    assert one["description"]
    assert one["work_pool"]["name"] == POOL
    assert one["work_pool"]["work_queue_name"] in QUEUES
    assert "schedules" not in one, "Prefect would switch off, at each `up`, what people have switched on"


OF_ONE_RUN = [one for one in ALL if "experiment" in one.get("parameters", {})]


@pytest.mark.parametrize("one", OF_ONE_RUN, ids=name_of)
def test_a_deployment_names_an_experiment_that_composes(one: dict[str, Any]) -> None:
    load_config([], experiment=one["parameters"]["experiment"])


def test_every_experiment_and_every_flow_has_one_and_its_name_is_its_own() -> None:
    names = [name_of(one) for one in ALL]
    assert len({*names}) == len(names)
    deployed = {one["parameters"]["experiment"] for one in ALL if flow_of(one) is pipeline.pipeline}
    assert deployed >= set(experiment_names())
    flows = {found.name for module in (pipeline, sweep, maintain) for found in vars(module).values() if is_flow(found)}
    assert {flow_of(one).name for one in ALL} == flows


def is_flow(found: object) -> bool:
    return isinstance(found, Flow)


def test_prefect_finds_the_file_at_the_top_of_the_checkout() -> None:
    assert (SOURCE_FOLDER / "prefect.yaml").resolve() == (SOURCE_FOLDER / DEPLOYMENTS).resolve()
    assert Path(SOURCE_FOLDER / "prefect.yaml").is_symlink()


def test_the_form_offers_experiments_and_refuses_a_negative_learning_rate() -> None:
    properties = form_of(ALL[0])["properties"]
    assert eased_schema({"properties": properties})["properties"]["experiment"]["anyOf"][0]["enum"] == list(
        experiment_names()
    )
    assert properties["learning_rate"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert properties["total_steps"]["anyOf"][0]["minimum"] == 1
    assert all(one["description"] for one in properties.values()), "each field has a help text"


@pytest.mark.parametrize("one", OF_ONE_RUN, ids=name_of)
def test_an_experiment_is_a_name_or_a_file_and_anything_else_is_refused_with_the_names(one: dict[str, Any]) -> None:
    schema = eased_schema(form_of(one))
    for good in (*experiment_names(), "/my files/mine.yaml", "mine.yml"):
        validate({"experiment": good}, schema, raise_on_error=True)
    if "enum" in str(schema["properties"]["experiment"]):  # a sweep's child is started by sweeps alone
        with pytest.raises(ValidationError, match=r"'debg' does not match.*countdown_demo.*debug"):
            validate({"experiment": "debg"}, schema, raise_on_error=True)
