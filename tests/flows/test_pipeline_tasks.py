"""Stages as Prefect tasks: a retried flow run repeats them, and finished work is found on disk."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, Scheduled, Suspended

from flows import pipeline
from flows.chain import PipelineResult, StageRunner
from flows.parameters import compose_settings
from flows.pipeline import run_as_one_task, run_task
from flows.server import watch
from flows.server.watch import STOP_REQUESTED, FlowCancelledError, watch_flow_run
from flows.stages.stage import Stage, StageStatus
from flows.work.mlflow_record import MlflowContents, MlflowRecord
from flows.work.open_run import OpenRun
from rlcore.config.fingerprint import run_id
from rlcore.errors import ConfigError
from tests.flows.conftest import wait_until

pytestmark = pytest.mark.prefect


@dataclass(frozen=True)
class Made:
    """The result of a stage. Prefect would read a stored result back as a dict."""

    data: int


on_disk: list[int] = []


def work() -> Made:
    on_disk.append(len(on_disk))
    return Made(on_disk[-1])


def tasks_of(client: SyncPrefectClient, run: FlowRun) -> list[TaskRun]:
    return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))


@flow
def chain() -> int:
    return run_task("stage", "stage {of} a run", work, lambda made: f"made {made.data}").data


@pytest.mark.parametrize("end", [Completed, Failed, Cancelled])
def test_retried_flow_run_repeats_its_stages(client, end):
    on_disk.clear()
    run = client.create_flow_run(chain)
    assert run_flow(chain, client.read_flow_run(run.id)) == 0
    client.set_flow_run_state(run.id, end(), force=True)
    client.set_flow_run_state(run.id, Scheduled(), force=True)
    assert run_flow(chain, client.read_flow_run(run.id)) == 1
    assert on_disk == [0, 1]
    # the server gets the name of a task run by a later event
    named = ["stage {of} a run"] * 2
    wait_until(lambda: [task.name for task in tasks_of(client, run)] == named, "two task runs under the stage's name")


@flow
def mistaken(ours: bool) -> None:
    def fail() -> None:
        raise ConfigError("optim.lr: must be greater than 0; got -1") if ours else ValueError("unforeseen")

    run_task("stage", "stage", fail, str)


@pytest.mark.parametrize("ours", [True, False])
def test_mistake_is_a_message_and_bug_a_traceback(client, caplog, ours):
    run = client.create_flow_run(mistaken, parameters={"ours": ours})
    with pytest.raises(ValueError, match="optim.lr" if ours else "unforeseen"):
        run_flow(mistaken, client.read_flow_run(run.id), parameters={"ours": ours})
    message = "optim.lr: must be greater than 0; got -1" if ours else "unforeseen"
    assert client.read_flow_run(run.id).state.message.endswith(message)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    reported = [record for record in errors if not record.getMessage().startswith("Finished in state")]
    assert [record.name for record in reported] == ["prefect.task_runs", "prefect.flow_runs"]
    for record in reported:
        assert (record.getMessage() == message, record.exc_info is None) == (ours, ours)


@flow
def stopped() -> None:
    def end() -> None:
        raise FlowCancelledError(STOP_REQUESTED)

    with watch_flow_run():
        run_task("stage", "stage", end, str)


def test_stopped_run_logs_no_error(client, caplog):
    caplog.set_level(logging.INFO)
    run = client.create_flow_run(stopped)
    with pytest.raises(FlowCancelledError):
        run_flow(stopped, client.read_flow_run(run.id))
    assert client.read_flow_run(run.id).state.is_cancelled()
    assert [record.levelname for record in caplog.records if STOP_REQUESTED in record.getMessage()] == ["INFO"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@dataclass(frozen=True)
class Counted(Stage[Made]):
    """A stage after which the flow run is suspended, as by the page's button."""

    suspends: bool
    name = "counted"

    def status(self, run: OpenRun) -> StageStatus:
        return StageStatus(self.name, None, None, False, "")

    def make(self, run: OpenRun) -> Made:
        on_disk.append(len(on_disk))
        if self.suspends:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(str(flow_run.id)), Suspended(timeout_seconds=600), force=True)
            wait_until(watch.is_suspended, "the suspension is noticed")
        return Made(on_disk[-1])

    def describe(self, result: Made) -> str:
        return f"made {result.data}"


def test_names_that_prefect_generates_are_known():
    generated = ("impressive-vulture", "xi4-setlik", "phi70-barad-dur", "alpha-canis-majoris")
    names = (*generated, "lr-high-2", "grpo2-long", "my-first-run", "baseline")
    assert tuple(filter(pipeline.GENERATED_NAME.fullmatch, names)) == generated


@flow
def one_task(root: str, suspends: bool) -> None:
    run = OpenRun(compose_settings(["experiment=debug", f"paths.root={root}"]).config)
    with watch.watch_flow_run(), MlflowRecord(run, {}) as record:
        run_as_one_task([Counted(suspends), Counted(False)], run, "both stages", record)


@pytest.mark.parametrize("suspends", [False, True])
def test_stages_in_one_task_end_after_a_suspension(client, artifacts_root, suspends):
    on_disk.clear()
    parameters = {"root": str(artifacts_root), "suspends": suspends}
    run = client.create_flow_run(one_task, parameters=parameters)
    with pytest.raises(Pause) if suspends else nullcontext():
        run_flow(one_task, client.read_flow_run(run.id), parameters=parameters)
    assert on_disk == ([0] if suspends else [0, 1])

    def messages() -> list[tuple[str, str | None]]:
        return [(task.name, task.state and task.state.message) for task in tasks_of(client, run)]

    wait_until(lambda: messages() == [("both stages", f"made {on_disk[-1]}")], "one task run with the last result")
    assert client.read_flow_run(run.id).state.is_paused() == suspends


@pytest.mark.parametrize("until", ["report", "export", "warm-start", "pass-rates"])
def test_flow_is_checked_before_anything_is_made(client, artifacts_root, until):
    words = ["experiment=debug", "data.scorer=nowhere:score", "pass_rates.samples=2", f"paths.root={artifacts_root}"]
    with pytest.raises(ConfigError, match=r"data\.scorer: must name a function"):
        pipeline.pipeline(overrides=words, until=until)
    assert list(artifacts_root.iterdir()) == []


def test_flow_uses_settings_of_its_command(client, artifacts_root, monkeypatch):
    words = ["experiment=debug", "seed=3", "tracking.enabled=false", f"paths.root={artifacts_root}"]
    settings = compose_settings(words)
    for name in ("compose_settings", "check_run"):
        monkeypatch.setattr(pipeline, name, lambda *_, **__: pytest.fail("done again"))

    def run_chain(run: OpenRun, do: StageRunner, record: MlflowRecord, *, with_report: bool) -> PipelineResult:
        assert run.config is settings.config
        return PipelineResult(run.run_id, run.layout.run_dir, 1, [], None, artifacts_root, MlflowContents())

    monkeypatch.setattr(pipeline.chain, "run_chain", run_chain)
    assert pipeline.run_checked(settings).run_id == run_id(settings.config)
    named = FlowRunFilter(name=FlowRunFilterName(any_=[run_id(settings.config)]))
    (run,) = client.read_flow_runs(flow_run_filter=named)
    assert (run.parameters["experiment"], run.parameters["overrides"]) == ("debug", words[1:])
