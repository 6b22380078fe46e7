"""MlflowStore with a real sqlite store."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.config import TrackingConfig
from rlcore.errors import TrackingError
from rlcore.tracking import mlflow_store
from rlcore.tracking.connection import has_store, resolve_uri
from rlcore.tracking.mlflow_store import PARENT_TAG, VIEW_TAG, MlflowStore, compare_url, search_run_ids, table_url
from tests.helpers.mlflow import Server, server

__all__ = ["server"]


def test_root_with_any_name_has_store(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "#1 why?a=b&c#d 50%41"
    root.mkdir()
    shutil.copy(empty_store, root / "mlflow.db")
    store = MlflowStore(TrackingConfig(), root)
    assert resolve_uri(TrackingConfig(uri=store.uri), tmp_path) == store.uri
    assert has_store(store.uri)
    store.client.log_text(store.create_run("r", {"millrace.run_id": "r"}), "text", "a.txt")
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)
    assert [file.read_text() for file in (root / "mlartifacts").glob("*/artifacts/a.txt")] == ["text"]
    assert [file.name for file in tmp_path.iterdir()] == [root.name]


def test_sweep_run_has_parent(store: MlflowStore, run_id: str):
    child = store.create_run("child", {"millrace.run_id": "child", PARENT_TAG: run_id}, start_time_s=12.5)
    run = store.client.get_run(child)
    assert run.data.tags["mlflow.parentRunId"] == run_id
    assert run.info.start_time == 12_500


def test_settings_become_truncated_parameters(store: MlflowStore, run_id: str):
    settings = {f"key{i}": i for i in range(250)} | {"nested": {"deep": [1, 2], "none": None, "yes": True}}
    store.log_params(run_id, settings | {"long": "x" * 20_000, "uri": "http://me:SECRET@host"})
    params, tags = store.client.get_run(run_id).data.params, store.client.get_run(run_id).data.tags
    assert not [key for key in tags if key.startswith("changed.")]
    assert len(params) == 255
    assert params["uri"] == "http://me:***@host"
    assert (params["nested.deep"], params["nested.none"], params["nested.yes"]) == ("[1, 2]", "null", "true")
    assert len(params["long"]) == 6_000
    assert params["long"].endswith("... [cut: 20000 characters]")
    store.log_params(run_id, {"key1": 200, "key2": 2, "new": "x"})
    run = store.client.get_run(run_id)
    changed = {key: value for key, value in run.data.tags.items() if key.startswith("changed.")}
    assert changed == {"changed.key1": "200"}
    assert run.data.params == params | {"new": "x"}


def test_invalid_tag_is_omitted_and_reported(store: MlflowStore, caplog: pytest.LogCaptureFixture):
    tags = {"a//b": "1", "größe": "2", "owner": "me"}
    run = store.create_run("run", tags)
    store.set_tags(run, tags)
    store.log_params(run, {"seed": 1, "tags": tags})
    data = store.client.get_run(run).data
    assert {key: value for key, value in data.tags.items() if not key.startswith("mlflow.")} == {"owner": "me"}
    assert data.params == {"seed": "1", "tags.owner": "me"}
    assert any("'a//b'" in line for line in caplog.messages)


def test_long_tag_is_truncated_with_mark(store: MlflowStore, run_id: str):
    longest = "z" * 8_000
    store.set_tags(run_id, {"mlflow.note.content": "y" * 9_000, "long": longest} | {f"tag{i}": "1" for i in range(150)})
    tags = store.client.get_run(run_id).data.tags
    assert len(tags["mlflow.note.content"]) == 8_000
    assert tags["mlflow.note.content"].endswith("... [cut: 9000 characters]")
    assert tags["long"] == longest, "a value of the maximum length is complete"
    assert tags["tag149"] == "1"


def test_dataset_is_found_by_fingerprint(store: MlflowStore, run_id: str):
    fingerprint = "0123456789abcdef"
    for _ in range(2):  # a retried stage
        store.log_dataset(
            run_id,
            name="countdown",
            fingerprint=fingerprint,
            source="/data/train.parquet",
            schema={"prompt": "list<struct>", "ability": "string"},
            counts={"train": 100, "validation": 10},
            context="training",
        )
    (found,) = store.client.search_runs([store.experiment_id], f"dataset.digest = '{fingerprint}'")
    (given,) = found.inputs.dataset_inputs
    assert given.dataset.name == "countdown"
    assert json.loads(given.dataset.profile) == {"train": 100, "validation": 10}
    assert json.loads(given.dataset.schema)["mlflow_colspec"][1] == {"name": "ability", "type": "string"}
    tags = {tag.key: tag.value for tag in given.tags}
    assert tags == {"mlflow.data.context": "training", "fingerprint": fingerprint}


def test_table_and_view_are_as_mlflow_pages_read_them(root: Path, server: Server):
    store = MlflowStore(TrackingConfig(uri=server.uri), root)
    run_id = store.create_run("r", {})
    for rows in ([["a", 1.0]], [["b", 0.5], ["c", None]]):
        store.log_table(run_id, "responses.json", ("prompt", "reward"), rows)
    found = json.loads(Path(store.client.download_artifacts(run_id, "responses.json")).read_text())
    assert found == {"columns": ["prompt", "reward"], "data": rows}, "the first one is replaced"
    logged = json.loads(store.client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert logged == [{"path": "responses.json", "type": "table"}]
    tags = store.client.get_experiment(store.experiment_id).tags
    view = json.loads(tags[VIEW_TAG])
    assert (view["name"], view["createdAt"]) == ("Reward first", 0)
    state = json.loads(view["state"])
    assert state["selectedColumns"][:3] == ["metrics.`reward`", "metrics.`val/reward`", "params.`seed`"]
    assert state["columnOrder"] == list(state["columnWidths"]) == ["attributes.`Run Name`", *state["selectedColumns"]]
    assert [chart["metricKey"] for chart in state["compareRunCharts"]] == ["reward", "val/reward"]
    store.client.set_experiment_tag(store.experiment_id, VIEW_TAG, "a user's")
    again = MlflowStore(TrackingConfig(uri=server.uri), root)
    assert store.client.get_experiment(again.experiment_id).tags[VIEW_TAG] == "a user's"


def test_page_addresses(store: MlflowStore, run_id: str, root: Path):
    experiment = store.experiment_id
    page, view = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs", "workflowType=machine_learning"
    assert store.run_url(run_id) == f"{page}/{run_id}?{view}"
    assert store.runs_url() == table_url(store.run_url(run_id)) == f"{page}?{view}&viewStateShareKey=millrace"
    assert store.ui_command() == f"mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db"
    compared = f"#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D&experiments=%5B%22{experiment}%22%5D&{view}"
    assert compare_url(store, ["a", "b"]) == f"http://127.0.0.1:5000/{compared}"
    assert compare_url(store, ["a", "b"], "http://me:7000") == f"http://me:7000/{compared}"
    served = MlflowStore(TrackingConfig(uri="http://me:SECRET@127.0.0.1:1"), root)
    assert served.ui_command() is None
    assert served.page_root("http://127.0.0.1:5000") == "http://me:***@127.0.0.1:1"


def test_concurrently_created_experiment_is_used(store: MlflowStore, root: Path):
    made = store.experiment_id
    # as for two processes that both found no experiment
    assert store._create_experiment().experiment_id == made
    with pytest.raises(Exception, match="maximum length"):
        assert MlflowStore(TrackingConfig(experiment="x" * 501), root).experiment_id


def test_truncated_search_warns(store: MlflowStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in ("one", "two"):
        store.create_run(name, {"millrace.run_id": name, "stage": "train"})
    assert search_run_ids(store, "") == ["one", "two"]
    monkeypatch.setattr(mlflow_store, "MAX_RUNS", 1)
    assert search_run_ids(store, "") == ["one"]
    assert "more than 1 runs found" in caplog.text


def test_deleted_experiment_is_reported(store: MlflowStore, root: Path):
    experiment = store.experiment_id
    store.client.delete_experiment(experiment)
    with pytest.raises(TrackingError, match=r"tracking\.experiment 'millrace': was deleted .*`mlflow experiments rest"):
        assert MlflowStore(TrackingConfig(), root).experiment_id
