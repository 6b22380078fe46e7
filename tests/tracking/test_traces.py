"""A sample of a run's answers as traces on a real MLflow server: during the run, once each, and never in its way."""

import base64
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Trace

from rlcore.answers.store import LIGHT, TEXTS, AnswerWriter, training_parts
from rlcore.config import AnswersConfig, RunConfig
from rlcore.tracking.delivery import change_state, read_state, sync_run
from rlcore.tracking.journal import read_journal
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.tracking.traces import parts_to_trace, sample, send
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


def test_of_a_part_only_the_steps_after_the_last_one_sent_are_taken(tmp_path: Path) -> None:
    writer = AnswerWriter(tmp_path, AnswersConfig())
    for step in (1, 2, 3):
        writer.add(Made(step).of_step(step))
    writer.begin_part()
    writer.settle()
    ((last, rows),) = parts_to_trace(tmp_path, 1, 1)
    assert (last, [row["step"] for row in rows]) == (3, [2, 3])
    assert [last for last, _ in parts_to_trace(tmp_path, 3, 1)] == []


def test_an_answer_is_a_trace_with_its_score(config: RunConfig, root: Path) -> None:
    store = MlflowStore(config.tracking, root)
    run_id = store.start_or_resume_run("run-1", None, {})
    scored, failed = (
        {"step": 7, "prompt_id": 3, "sample_index": index, "prompt": "p" + "q" * 1_000, "answer": "r" * 1_000 + "s",
         "score": score, "failure": failure, "data_source": source, "parts": [("format", 0.5)], "length": 1_001}
        for index, score, failure, source in ((0, 0.75, None, "countdown"), (1, 0.0, "scorer raised\0", None))
    )  # fmt: skip
    failed |= {"prompt": "a\0", "answer": "\0b", "length": None}
    send(store.uri, store.experiment_id, run_id, [scored, failed], {7: 1763.2506})
    found = store.client.search_traces(locations=[store.experiment_id], run_id=run_id)
    by_state = {str(trace.info.state.value): trace for trace in found}
    assert sorted(by_state) == ["ERROR", "OK"]
    digest = sha256(f"{run_id} 7 3 0".encode()).digest()
    good, (span,), (score,) = (
        by_state["OK"].info,
        by_state["OK"].data.spans,
        by_state["OK"].info.assessments,
    )
    assert (good.trace_id, score.assessment_id) == (f"tr-{digest[:16].hex()}", f"a-{digest[:16].hex()}")
    assert (good.request_time, good.execution_duration) == (1_763_251, 0)
    assert (good.request_preview, good.response_preview) == ("q" * 1_000, "r" * 1_000)
    assert {key: good.tags[key] for key in ("mlflow.traceName", "step", "data_source")} == {
        "mlflow.traceName": "step 7", "step": "7", "data_source": "countdown"}  # fmt: skip
    assert (span.name, span.span_type, span.parent_id, span.status.status_code.value) == ("answer", "LLM", None, "OK")
    assert (span.start_time_ns, span.end_time_ns) == (1_763_251_000_000, 1_763_251_000_000)
    assert (span.inputs, span.outputs) == ("p" + "q" * 1_000, "r" * 1_000 + "s")
    assert (span.attributes["parts"], span.attributes["length"]) == ({"format": 0.5}, 1_001)
    assert span.span_id == digest[16:24].hex()
    assert base64.b64decode(span.to_dict()["trace_id"]) == digest[:16]
    assert (score.name, score.value, score.error) == ("score", 0.75, None)
    assert score.create_time_ms == 1_763_251
    bad, (span,), (score,) = (
        by_state["ERROR"].info,
        by_state["ERROR"].data.spans,
        by_state["ERROR"].info.assessments,
    )
    assert (bad.request_preview, bad.response_preview, bad.tags["data_source"]) == ("a\ufffd", "\ufffdb", "")
    assert (span.status.status_code.value, "length" in span.attributes) == ("ERROR", False)
    assert score.error is not None


def test_a_step_whose_time_is_not_known_was_at_the_beginning_of_time(config: RunConfig, root: Path) -> None:
    store = MlflowStore(config.tracking, root)
    run_id = store.start_or_resume_run("run-1", None, {})
    (row,) = sample(Made(1).of_step(1).select([*LIGHT.names, *TEXTS.names]), 1)
    send(store.uri, store.experiment_id, run_id, [row], {2: 9.0})
    send(store.uri, store.experiment_id, run_id, [], {})
    (trace,) = store.client.search_traces(locations=[store.experiment_id], run_id=run_id)
    assert trace.info.request_time == 0


def test_each_step_is_sent_once_with_the_journals_time(config: RunConfig, root: Path, run_dir: Path) -> None:
    tracked = RunConfig(
        paths=config.paths, tracking=config.tracking.model_copy(update={"enabled": False, "traces_per_step": 2})
    )
    run = Training(run_dir, tracked)
    run.tracker.resume_at(0, 0)
    run.chunk(1, 2)
    sync_run(run_dir)
    assert read_state(run_dir).traced_step == 2
    run.chunk(3, 3)
    sync_run(run_dir)
    store = MlflowStore(config.tracking, root)
    (mlflow_run,) = store.find_runs({})
    found = store.client.search_traces(locations=[store.experiment_id], run_id=mlflow_run.info.run_id)
    assert steps(found) == [1, 1, 2, 2, 3, 3]
    times = {record.step: round(record.time * 1e3) for record in read_journal(run_dir / "metrics.jsonl")}
    assert {int(trace.info.tags["step"]): trace.info.request_time for trace in found} == times


def test_without_a_wish_for_traces_no_answer_is_read(config: RunConfig, root: Path, run_dir: Path) -> None:
    run = Training(
        run_dir, RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"enabled": False}))
    )
    run.tracker.resume_at(0, 0)
    run.chunk(1, 2)
    sync_run(run_dir)
    assert read_state(run_dir).traced_step == 0
    store = MlflowStore(config.tracking, root)
    assert list(store.client.search_traces(locations=[store.experiment_id])) == []


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


@pytest.mark.lengthy  # as test_outage has it; what is sent later is test_each_step_is_sent_once_with_the_journals_time
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


@pytest.mark.lengthy  # a second way to test_without_a_wish_for_traces_no_answer_is_read
@pytest.mark.slow
def test_none_are_sent_by_default(server: Server, config: RunConfig, run_dir: Path) -> None:
    with training(run_dir, config_for(config, server.uri)) as run:
        run.chunk(1, 2)
    assert traces(server, run_dir.name) == []
