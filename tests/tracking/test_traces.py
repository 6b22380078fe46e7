"""A sample of a run's answers as traces on a real MLflow server: during the run, once each, and never in its way."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Trace

from rlcore.answers.store import LIGHT, TEXTS, AnswerWriter, training_parts
from rlcore.config import AnswersConfig, RunConfig
from rlcore.tracking.delivery import change_state, read_state, sync_run
from rlcore.tracking.traces import parts_to_trace, sample
from rlcore.tracking.tracker import Tracker
from tests.answers.made import Made
from tests.tracking.conftest import Server, held_port, wait_until
from tests.tracking.reading import main_run, points, values
from tests.tracking.test_outage import SlowProxy, config_for, proxy, run_dir

__all__ = ["proxy", "run_dir"]


class Training:
    """A run that keeps the answers of its steps, and a trainer of it."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self.answers = AnswerWriter(run_dir / "answers", AnswersConfig())
        (run_dir / "answers").mkdir(parents=True, exist_ok=True)
        self.tracker = Tracker(run_dir, config, tags={})

    def chunk(self, first: int, last: int) -> int:
        """Steps, their answers, a checkpoint: what it stores of the journal."""
        for step in range(first, last + 1):
            self.tracker.log_step(step, values(step))
            self.answers.add(Made(step).of_step(step))
        self.answers.begin_part()
        self.answers.settle()
        journal_bytes = self.tracker.journal_bytes
        self.tracker.commit(last)
        return journal_bytes


@contextmanager
def training(run_dir: Path, config: RunConfig, step: int = 0, journal_bytes: int = 0) -> Iterator[Training]:
    """A trainer that goes on from a checkpoint; its end is the end of the block."""
    run = Training(run_dir, config)
    run.answers.cut(step)
    run.tracker.resume_at(step, journal_bytes)
    yield run
    run.tracker.finish("FINISHED", timeout_s=90.0)


def traces(server: Server, run_id: str) -> list[Trace]:
    """Those that MLflow shows on the run's page, newest first."""
    client = MlflowClient(server.uri)
    run = main_run(client, run_id)
    return list(client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id, max_results=500))


def steps(found: list[Trace]) -> list[int]:
    return sorted(int(trace.info.tags["step"]) for trace in found)


def test_the_best_and_the_worst_of_each_step_and_those_between() -> None:
    table = Made(1).of_step(1)
    scores = sorted((score for score in table["score"].to_pylist() if score is not None), reverse=True)
    assert [row["score"] for row in sample(table, 1)] == scores[:1]
    assert [row["score"] for row in sample(table, 2)] == [scores[0], None], "one that was not scored is the last"
    assert [row["score"] for row in sample(table, 4)] == [scores[0], scores[2], scores[5], None]
    assert len(sample(table, 99)) == table.num_rows


def test_a_damaged_part_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = AnswerWriter(tmp_path, AnswersConfig())
    for step in (1, 2):
        writer.add(Made(step).of_step(step))
        writer.begin_part()
    writer.settle()
    first, _ = training_parts(tmp_path)
    first.write_bytes(first.read_bytes()[:-8])
    found = dict(parts_to_trace(tmp_path, 0, 2))
    assert found == {1: [], 2: sample(Made(2).of_step(2).select([*LIGHT.names, *TEXTS.names]), 2)}
    assert f"{first}: cannot be read" in caplog.text


@pytest.mark.slow
def test_traces_arrive_during_the_run_and_once(server: Server, config: RunConfig, run_dir: Path) -> None:
    tracked = config_for(config, server.uri, traces_per_step=2)
    with training(run_dir, tracked) as run:
        kept = run.chunk(1, 3)
        wait_until(lambda: read_state(run_dir).traced_step == 3)
        found = traces(server, run_dir.name)
        assert steps(found) == [1, 1, 2, 2, 3, 3], "the trainer goes on"
        rows = {row["score"]: row for row in sample(Made(3).of_step(3), 2)}
        mine = [trace for trace in found if trace.info.tags["step"] == "3"]
        for trace in mine:
            (score,), (span,) = trace.info.assessments, trace.data.spans
            row = rows[score.value]
            assert (span.inputs, span.outputs) == (row["prompt"], row["answer"])
            assert trace.info.response_preview == row["answer"]
            assert span.attributes["parts"] == dict(row["parts"])
            assert span.attributes["advantage"] == pytest.approx(row["advantage"])
            assert (score.error is None) == (row["failure"] is None) == (trace.info.state == "OK")
        assert len(mine) == 2
        run.chunk(4, 5)
    with training(run_dir, tracked, 3, kept) as run:  # the checkpoint of step 5 is lost
        run.chunk(4, 6)
    change_state(run_dir, lambda state: dataclasses.replace(state, traced_step=0))
    sync_run(run_dir)  # sends all of them again
    found = traces(server, run_dir.name)
    assert steps(found) == sorted([1, 2, 3, 4, 5, 6] * 2)
    assert {len(trace.info.assessments) for trace in found} == {len(trace.data.spans) for trace in found} == {1}


@pytest.mark.slow
def test_a_server_that_is_away_costs_nothing_and_gets_them_later(
    server: Server, config: RunConfig, run_dir: Path
) -> None:
    with held_port() as nobody:
        run = Training(run_dir, config_for(config, f"http://127.0.0.1:{nobody.getsockname()[1]}", traces_per_step=1))
        run.tracker.resume_at(0, 0)
        run.chunk(1, 4)
        wait_until(lambda: read_state(run_dir).num_failures > 0)
        assert not run.tracker.finish("FINISHED", timeout_s=0.5)
    sync_run(run_dir, server.uri)
    assert steps(traces(server, run_dir.name)) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_server_that_refuses_them_takes_the_metrics_all_the_same(
    server: Server, proxy: SlowProxy, config: RunConfig, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refused = b"/mlflow/traces"
    tracked = config_for(config, f"http://127.0.0.1:{proxy.port}", traces_per_step=2)
    with training(run_dir, tracked) as run:
        run.chunk(1, 2)
    run_found = main_run(MlflowClient(server.uri), run_dir.name)
    assert run_found.info.status == "FINISHED"
    assert len(points(MlflowClient(server.uri), run_found, "test/m0")) == 2
    assert traces(server, run_dir.name) == []
    assert "MLflow does not take the answers as traces" in caplog.text
    assert "403" in caplog.text or "no traces here" in caplog.text
    sync_run(run_dir, server.uri)
    assert steps(traces(server, run_dir.name)) == [1, 1, 2, 2]


@pytest.mark.slow
def test_none_are_sent_by_default(server: Server, config: RunConfig, run_dir: Path) -> None:
    with training(run_dir, config_for(config, server.uri)) as run:
        run.chunk(1, 2)
    assert traces(server, run_dir.name) == []
