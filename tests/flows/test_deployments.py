"""`deployments.yaml` names flows and experiments that exist, and its forms refuse what the settings would refuse."""

from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from flows.stack import deploy
from flows.stack.deploy import FLOWS, eased_schema, read_deployments, schedule_of
from rlcore.config.compose import experiment_names, load_config
from rlcore.errors import MillraceError

DEPLOYMENTS = read_deployments()


def form_of(deployment: str) -> dict[str, Any]:
    """The form of its flow as Prefect writes it."""
    return parameter_schema(FLOWS[deployment.partition("/")[0]][1]).model_dump_for_openapi()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_is_a_flow_with_known_parameters_and_its_schedules_are_off(name: str) -> None:
    one = DEPLOYMENTS[name]
    assert {*one.parameters, "root"} <= set(form_of(name)["properties"])
    assert one.about
    schedules = [schedule_of(schedule) for schedule in one.schedules]
    assert not any(schedule.active for schedule in schedules)
    assert len({schedule.slug for schedule in schedules} - {None}) == len(schedules)


OF_ONE_RUN = [name for name, one in DEPLOYMENTS.items() if "experiment" in one.parameters]


@pytest.mark.parametrize("name", OF_ONE_RUN)
def test_a_deployment_names_an_experiment_that_composes(name: str) -> None:
    load_config([], experiment=DEPLOYMENTS[name].parameters["experiment"])


def test_every_experiment_and_every_flow_has_one() -> None:
    deployed = {one.parameters["experiment"] for name, one in DEPLOYMENTS.items() if name.startswith("pipeline/")}
    assert deployed >= set(experiment_names())
    assert {name.partition("/")[0] for name in DEPLOYMENTS} == set(FLOWS)


def test_the_form_offers_experiments_and_refuses_a_negative_learning_rate() -> None:
    properties = form_of("pipeline/debug")["properties"]
    assert eased_schema({"properties": properties})["properties"]["experiment"]["anyOf"][0]["enum"] == list(
        experiment_names()
    )
    assert properties["learning_rate"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert properties["total_steps"]["anyOf"][0]["minimum"] == 1
    assert all(one["description"] for one in properties.values()), "each field has a help text"


@pytest.mark.parametrize("name", OF_ONE_RUN)
def test_an_experiment_is_a_name_or_a_file_and_anything_else_is_refused_with_the_names(name: str) -> None:
    schema = eased_schema(form_of(name))
    for good in (*experiment_names(), "/my files/mine.yaml", "mine.yml"):
        validate({"experiment": good}, schema, raise_on_error=True)
    if "enum" in str(schema["properties"]["experiment"]):  # a sweep's child is started by sweeps alone
        with pytest.raises(ValidationError, match=r"'debg' does not match.*countdown_demo.*debug"):
            validate({"experiment": "debg"}, schema, raise_on_error=True)


@pytest.mark.parametrize(
    ("there", "written", "told"),
    [
        ("experiment: countdown_ppo_demo", "experiment: gone",
         r"countdown-ppo-demo: experiment=gone is no file in conf/experiment; there is .*Take the"),
        ("queue: control", "queu: control", r"(?s)queu\b.*Extra inputs.*its head says"),
        ('cron: "0 22 * * *"', 'cron: "0 22 * *"', r"(?s)cron.*its head says"),
        ("eval/local", "evil/local", r"evil/local: there is no flow evil; there is pipeline, "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, written: str, told: str
) -> None:
    changed = tmp_path / "deployments.yaml"
    changed.write_text(deploy.DEPLOYMENTS.read_text().replace(there, written, 1))
    monkeypatch.setattr(deploy, "DEPLOYMENTS", changed)
    with pytest.raises(MillraceError, match=told):
        read_deployments()
