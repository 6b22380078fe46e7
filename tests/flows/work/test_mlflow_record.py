"""The run's MLflow page."""

import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from data.tasks import StageResult
from flows.stack.state import Service, StackState, served_mlflow, write_stack
from flows.stages.dataset import Dataset, Filter
from flows.stages.outputs import ExportedWeights, ReportPage, report_fingerprint
from flows.work import mlflow_record
from flows.work.mlflow_record import MlflowContents, MlflowRecord, log_run_page, models_digest, settings_digest
from flows.work.open_run import OpenRun, open_run
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import ModelError, StopRequestedError
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import Holder, start_time_of
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, End, destination_of
from rlcore.tracking.delivery import delivery_lock, ensure_mlflow_run, is_delivered
from rlcore.tracking.journal import Journal
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.tracking.models import models_of
from rlcore.user_code import code_for_run
from tests.flows.conftest import changed, commit


def test_run_that_ends_before_its_first_step_has_final_status(artifacts_root, monkeypatch):
    monkeypatch.setattr(mlflow_record, "END_WAIT_S", 180.0)  # a busy machine creates tables slowly
    size = ["data.train_size=20", "data.validation_size=5", f"paths.root={artifacts_root}"]
    size.append("tags.from='http://me:SECRET@host'")
    config = load_config(["experiment=debug", *size])
    rows, filtered = Dataset().make(OpenRun(config)), Filter().make(OpenRun(config))
    prefect = {"flow_run_id": "abc", "deployment": ""}
    for error, status in ((ModelError("no such model"), "FAILED"), (StopRequestedError("requested to end"), "KILLED")):
        with suppress(type(error)), open_run(config, ()) as run, MlflowRecord(run, prefect) as record:
            record.start(rows, filtered)
            raise error
        known = MlflowContents.read(run.layout)
        client = MlflowStore(config.tracking, artifacts_root).client
        page = client.get_run(known.mlflow_run_id)
        assert page.info.status == status
        assert page.data.tags["code_fingerprint"] == code_for_run(config).fingerprint
        assert [key for key in page.data.tags if key.startswith("prefect.")] == ["prefect.flow_run_id"]
        kept = client.list_artifacts(known.mlflow_run_id, folder := "lineage/code/millrace-source/data")
        assert f"{folder}/countdown.py" in {file.path for file in kept}
        settings = Path(client.download_artifacts(known.mlflow_run_id, "config/settings.yaml")).read_text()
        assert "SECRET" not in settings
        assert ("http://me:***@host" in settings, "total_steps: 2\n" in settings) == (True, True)
        inputs = [({tag.key: tag.value for tag in one.tags}, one.dataset) for one in page.inputs.dataset_inputs]
        assert {(tags["mlflow.data.context"], data.name, data.digest) for tags, data in inputs} == {
            ("training", "countdown", rows.directory.name),
            ("training", "countdown filtered", filtered.directory.name),
            ("validation", "countdown held-out", filtered.directory.name),
        }
        assert known.url == ""  # no server serves the store
        assert known.ui_command == f"mlflow ui --backend-store-uri sqlite:///{artifacts_root}/mlflow.db"
        assert run.prefect_view.mlflow_page == known.url
    me = Service("mlflow", os.getpid(), start_time_of(psutil.Process()), 1, "http://stack", "", "")
    write_stack(artifacts_root, StackState(services=(me,)))
    page = ensure_mlflow_run(run.layout.run_dir, config, {})
    found = mlflow_record.with_page_address(MlflowContents(settings="s"), page, artifacts_root)
    assert (found.url.partition(f"/runs/{page.id}?")[0], found.ui_command) == ("http://stack/#/experiments/1", "")
    assert served_mlflow(f"sqlite:///{artifacts_root}/other.db", artifacts_root) == ""
    write_stack(artifacts_root, StackState(services=(replace(me, born=1.0),)))  # it has ended
    assert served_mlflow(page.store.uri, artifacts_root) == ""
    assert (found.mlflow_run_id, found.settings) == (known.mlflow_run_id, "s")


HERE = Path("here")
LAST, BEST = ExportedWeights(HERE, 2, cached=True), ExportedWeights(HERE, 1, cached=True)
ROWS = StageResult(HERE, cached=True, counts={})


@pytest.fixture
def away(config: RunConfig) -> RunConfig:
    """Return settings with a store of a kind that is not installed, which fails immediately."""
    return changed(config, "tracking", uri="oddsql://host/runs")


def test_nothing_is_sent_without_tracking_or_change(config, away, artifacts_root, caplog):
    caplog.set_level(logging.INFO, logger="flows.work.mlflow_record")
    silent = changed(config, "tracking", enabled=False)
    with open_run(silent, ()) as run, MlflowRecord(run, {}) as record:
        record.start(ROWS, ROWS)
        assert record.finish(None, LAST, BEST) == MlflowContents()
    with open_run(away, ()) as run:
        digests = (settings_digest(away), report_fingerprint(run.layout), models_digest(away, LAST, BEST))
        known = MlflowContents("1", "http://page", "", *digests).write(run.layout)
        with MlflowRecord(run, {}) as record:
            assert run.prefect_view.mlflow_page == "http://page"
            record.start(ROWS, ROWS)
            assert record.finish(None, LAST, BEST) == known
    with suppress(ModelError), open_run(silent, ()) as run, MlflowRecord(run, {}):
        raise ModelError("no such model")
    elsewhere = changed(away, "tracking", uri="oddsql://me:SECRET@other/runs")
    assert settings_digest(elsewhere) != settings_digest(away)
    assert settings_digest(changed(away, "tracking", experiment="other")) != digests[0]
    assert "SECRET" not in settings_digest(elsewhere)
    assert list(artifacts_root.glob("*.db")) == []
    assert [one for one in caplog.messages if "MLflow" in one] == []


def test_rest_of_the_journal_is_sent_at_the_end(config, artifacts_root, empty_store, monkeypatch):
    """On a busy machine a trainer ends before MLflow has its metrics. The flow sends them, and a repetition too."""
    monkeypatch.setattr(mlflow_record, "FINISH_WAIT_S", 240.0)
    monkeypatch.setattr(mlflow_record, "MAX_UPLOAD_BYTES", 0)
    shutil.copy(empty_store, artifacts_root / "mlflow.db")
    config = config.model_copy(update={"run_id": "lr-0.5"})
    run_dir = RunLayout.of(config).run_dir
    with open_run(config, ()) as run:
        commit(config, 2)
        (weights := run_dir / "weights").mkdir()
        (weights / "config.json").write_text("{}")
        last = ExportedWeights(weights, 2, cached=False)
        with Journal(run.layout.journal) as journal, AttemptLog(run_dir / ATTEMPTS_FILE) as attempts:
            attempts.add(Attempt(0, 0, time.time(), Holder.me(), destination_of(run_dir, config, {})))
            journal.append_step(1, {"critic/score/mean": 0.25})
            journal.append_step(2, {"critic/score/mean": 0.5})
            attempts.add(End("FINISHED", time.time()))
        known = log_run_page(run, {})
        with delivery_lock(run_dir):  # of the trainer's delivery process
            log_run_page(run, {}, None, (None, last, last))
        assert not is_delivered(run_dir)
        digests = (settings_digest(config), report_fingerprint(run.layout), models_digest(config, last, last))
        MlflowContents(known.mlflow_run_id, "", "", *digests).write(run.layout)
    with open_run(config, ()) as run, MlflowRecord(run, {}) as record:
        record.finish(None, last, last)
    assert is_delivered(run_dir)
    store = MlflowStore(config.tracking, artifacts_root)
    client, models = store.client, models_of(store.client, store.experiment_id, known.mlflow_run_id)
    assert {model.name for model in models} == {"step-2-lr-0_5", "weights-2-lr-0_5"}, "the name of their run"
    found = client.get_run(known.mlflow_run_id)
    assert (found.info.status, found.data.metrics["critic/score/mean"]) == ("FINISHED", 0.5)
    assert [point.step for point in client.get_metric_history(known.mlflow_run_id, "critic/score/mean")] == [1, 2]
    with open_run(config, ()) as run:
        with suppress(StopRequestedError), MlflowRecord(run, {}):
            raise StopRequestedError("requested to end after the last step")
        assert client.get_run(known.mlflow_run_id).info.status == "KILLED"
        with MlflowRecord(run, {}) as record:
            record.finish(None, last, last)
    assert client.get_run(known.mlflow_run_id).info.status == "FINISHED"


def test_unreachable_store_is_logged_once_per_part(away, caplog):
    rest = "The training is not affected; repeat the command to send the rest"
    with open_run(away, ()) as run, MlflowRecord(run, {}) as record:
        known = MlflowContents("", "", "", "other settings", "other report", "").write(run.layout)
        record._known = known
        record.start(ROWS, ROWS)
        assert record.finish(None, LAST, BEST) == known
    message = [one for one in caplog.messages if one.startswith("MLflow has not received")]
    parts = [f"MLflow has not received the {part} of the run" for part in ("settings and datasets", "results")]
    assert [one.partition(": ")[0] for one in message] == parts
    assert all("oddsql://host/runs" in one and one.endswith(rest) for one in message)
    assert MlflowContents.read(run.layout) == known


@pytest.mark.parametrize(
    ("report", "models", "given", "is_sent"),
    [
        ("{}", "same", None, False),
        ("{} without the report", "same", None, False),  # as after `millrace train`
        ("{} without the report", "same", ReportPage(HERE / "report.html", cached=True), True),
        ("other", "same", None, True),
        ("{}", "other", None, True),
    ],
)
def test_end_of_run_is_sent_where_a_part_is_missing(away, report, models, given, is_sent, caplog):
    with open_run(away, ()) as run:
        has = report.format(report_fingerprint(run.layout))
        weights = models_digest(away, LAST, BEST) if models == "same" else models
        MlflowContents("1", "u", "", settings_digest(away), has, weights).write(run.layout)
        with MlflowRecord(run, {}) as record:
            record.start(ROWS, ROWS)
            record.finish(given, LAST, BEST)
    assert any("MLflow has not received the results of the run" in one for one in caplog.messages) == is_sent


def test_run_unknown_to_mlflow_ends_without_request(away, caplog):
    caplog.set_level(logging.INFO)
    for known, number in ((MlflowContents(), 0), (MlflowContents("1"), 1)):
        with suppress(ModelError), open_run(away, ()) as run:
            known.write(run.layout)
            with MlflowRecord(run, {}):
                raise ModelError("no such model")
        message = [one for one in caplog.messages if one.startswith("MLflow was not notified of the end of the run: ")]
        assert len(message) == number
