"""The list of stages: their order, their lines, and the loss of a trainer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flows import chain
from flows.chain import run_on_console
from flows.progress import PlainDisplay, ValidationSummary, use_display
from flows.stages.dataset import Filter
from flows.stages.outputs import ExportedWeights, ReportPage, Validate
from flows.stages.stage import Stage, StageStatus
from flows.stages.train import Chunk
from flows.work.mlflow_record import MlflowContents
from flows.work.open_run import OpenRun, open_run
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.compose import load_config
from rlcore.errors import ModelError, WorkerLostError
from rlcore.run.initial_policy import InitialPolicy
from tests.flows.conftest import changed

R = TypeVar("R")

HERE = Path("here")
MADE: dict[str, Any] = {
    "warm-start": InitialPolicy(HERE, cached=False, steps=30, figures={"reward": 0.4}),
    "train": Chunk(0, 1, cached=False, metrics={"critic/score/mean": 0.25}),
    "export": ExportedWeights(HERE, 2, cached=True),
    "validate": ValidationSummary("after", 2, HERE, cached=False, summary={"val-core/countdown/reward/greedy": 0.5}),
    "export-best": ExportedWeights(HERE, 1, cached=False, is_best=True),
    "report": ReportPage(HERE, cached=True),
}


class Record:
    """Stand-in for the run's MLflow page."""

    def start(self, *rows: object) -> None:
        self.rows = rows

    def finish(self, report: ReportPage | None, last: ExportedWeights, best: ExportedWeights) -> MlflowContents:
        self.end = (report, last, best)
        return MlflowContents()


@pytest.fixture
def config(artifacts_root: Path) -> RunConfig:
    size = ("data.train_size=20", "data.validation_size=5")
    return load_config(["experiment=debug", *size, f"paths.root={artifacts_root}"])


@pytest.mark.parametrize("with_report", [False, True])
def test_stages_run_in_order(config, with_report):
    lines = []

    def do(stage: Stage[R], run: OpenRun) -> R:
        result = stage.find_or_make(run) if stage.name in ("dataset", "filter") else MADE[stage.name]
        lines.append((stage.title(run), stage.describe(result).partition(" (")[0], stage.in_trainer))
        return result

    record = Record()
    with open_run(config, ("millrace", "train")) as run:
        done = chain.run_chain(run, do, record, with_report=with_report)  # type: ignore[arg-type]
    after = "validation: after"
    assert lines == [
        ("dataset countdown", "dataset: 20 train, 5 validation rows", False),
        ("filter to 32 tokens", "filter: 20 train, 5 validation rows", False),
        ("warm-start debug", "warm start: reward 0.400 after 30 steps", True),
        ("train debug step 0-1", "train: step 0-1, reward at step 1: 0.250", True),
        ("train debug step 1-2", "train: step 0-1, reward at step 1: 0.250", True),
        ("export debug", "weights: step 2, skipped: done before", True),
        ("validate debug before", after, True),
        ("validate debug after", after, True),
        ("export debug best", "best weights: step 1", True),
        *([("report debug", "report: here, skipped: it is current", False)] if with_report else []),
    ]
    assert len(record.rows) == 2
    assert record.end == (MADE["report"] if with_report else None, MADE["export"], MADE["export-best"])
    assert done.report == (HERE if with_report else None)


def test_filter_warns_of_fewer_rows_than_a_batch(config):
    lines = []
    for size in (20, 21):
        run = OpenRun(changed(config, "trainer", batch_size=size, mini_batch_size=size))
        _, made = chain.run_stages(run, chain.run_quietly, "filter")
        lines.append(Filter().describe(made).split("\n"))
    assert len(lines[0]) == 1
    line, warning = lines[1]
    assert line.startswith("filter: 20 train")
    assert warning.startswith("warning: trainer.batch_size=21 is more than the 20 training rows after the filter, so a")


@pytest.mark.parametrize(
    ("of_run", "of_suite", "name"), [(0, 0, "step-000002"), (2, 0, "all-step-000002"), (0, 2, "all-step-000002")]
)
def test_requested_validation_has_all_problems_and_a_separate_name(config, of_run, of_suite, name):
    suites = (SuiteConfig(name="sums", data=config.data, max_problems=of_suite),)
    config = changed(config, "validation", suites=suites, max_problems=of_run)
    titles = [Validate(checkpoint).title(OpenRun(config)) for checkpoint in ("start", "last", "best", "step-000002")]
    assert [title.removeprefix("validate debug ") for title in titles] == ["before", "after", "best", name]


@dataclass(frozen=True)
class Failing(Stage[str]):
    """A stage that raises these errors in sequence, and then succeeds."""

    name = "stage"
    in_trainer = True
    errors: tuple[Exception, ...]
    calls: list[int] = field(default_factory=list)

    def status(self, run: OpenRun) -> StageStatus:
        return StageStatus(self.name, None, None, False, "")

    def make(self, run: OpenRun) -> str:
        self.calls.append(len(self.calls))
        if len(self.calls) <= len(self.errors):
            raise self.errors[len(self.calls) - 1]
        return "done"

    def describe(self, result: str) -> str:
        return result


def test_only_a_lost_trainer_is_retried_up_to_the_limit(config, capsys):
    run = OpenRun(changed(config, "runtime", max_chunk_retries=2))
    lost = WorkerLostError("it is gone")
    with use_display(PlainDisplay()):
        assert run_on_console(Failing((lost, lost)), run) == "done"
        retries = [("it is gone", f"trying again from the last checkpoint ({number} of 2)") for number in (1, 2)]
        assert capsys.readouterr().out.splitlines() == [*retries[0], *retries[1], "done"]
        for errors, calls in (((lost, lost, lost), 3), ((ModelError("wrong"),), 1)):
            failing = Failing(errors)
            with pytest.raises(type(errors[0])):
                run_on_console(failing, run)
            assert len(failing.calls) == calls
