"""Logged models, and files of deleted runs, in a real sqlite store."""

import json
from collections.abc import Mapping
from pathlib import Path

import mlflow
import pytest

from rlcore.config.model import ScratchModel
from rlcore.errors import TrackingError
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.tracking.models import log_model, model_of, models_of, name_models
from tests.helpers.forked import loaded_by
from tests.helpers.mlflow import points


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    from rlcore.models.load import build_scratch_model

    scratch = ScratchModel(hidden_size=16, num_layers=1, max_integer=20)
    return build_scratch_model(scratch, seed=1, directory=tmp_path / "model")


def log_weights(
    store: MlflowStore, run_id: str, folder: Path, name: str, step: int, metrics: Mapping[str, float] = {}, **more: int
) -> str:
    return log_model(store, run_id, folder, kind="transformers", name=name, step=step, metrics=metrics,
                     time_s=float(step), tags={}, **more)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # deprecations between MLflow and transformers
def test_model_directory_is_logged_once_with_scores(store: MlflowStore, run_id: str, model_directory: Path):
    store.log_metrics(run_id, 20, {"val-core/x/reward/mean_at_4": 0.5}, 20.0)
    num_bytes = sum(file.stat().st_size for file in model_directory.iterdir())
    scores = {"val-core/x/reward/mean_at_4": 0.5}
    model_id, again = (
        log_weights(store, run_id, model_directory, "best", 20, metrics=scores, max_bytes=num_bytes) for _ in range(2)
    )
    assert model_id == again, "a retried stage logs it once"
    model = store.client.get_logged_model(model_id)
    assert (model.name, model.source_run_id, model.tags["step"]) == ("best", run_id, "20")
    assert (model.tags["size_bytes"], "mlflow.model.isExternal" in model.tags) == (str(num_bytes), False)
    assert {file.path for file in store.client.list_logged_model_artifacts(model_id)} >= {"MLmodel", "model"}
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [
        ("val-core/x/reward/mean_at_4", 0.5, 20)
    ]
    run = store.client.get_run(run_id)
    assert points(store.client, run, "val-core/x/reward/mean_at_4") == [(20, 0.5)], "the run's curve has one point"
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model_id, 20)]


@pytest.mark.filterwarnings("ignore")  # deprecations between MLflow and transformers
def test_weights_are_copied_without_torch_and_load(
    store: MlflowStore, root: Path, run_id: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    code = (
        "from pathlib import Path; from rlcore.config import TrackingConfig\n"
        "from rlcore.tracking.mlflow_store import MlflowStore; from rlcore.tracking.models import log_model\n"
        f"store, folder = MlflowStore(TrackingConfig(), Path({str(root)!r})), Path({str(model_directory)!r})\n"
        f"log_model(store, {run_id!r}, folder, kind='transformers', name='last', step=20, metrics={{}}, time_s=1.0, "
        "tags={})"
    )
    assert "torch" not in loaded_by(code)
    (logged,) = models_of(store.client, store.experiment_id, run_id)
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", store.uri)
    address = f"models:/{logged.model_id}"
    components = mlflow.transformers.load_model(address, return_type="components")
    folder = mlflow.artifacts.download_artifacts(address)
    plain = PreTrainedTokenizerFast.from_pretrained(model_directory)
    for text in ("1", "1 + 1"):
        assert components["tokenizer"](text)["input_ids"] == plain(text)["input_ids"], "different tokenizer"
    wanted = load_file(model_directory / "model.safetensors")
    for model in (components["model"], AutoModelForCausalLM.from_pretrained(f"{folder}/model")):
        state = model.state_dict()
        assert wanted
        assert all(torch.equal(state[name].float(), value) for name, value in wanted.items())


def test_large_model_is_not_copied(store: MlflowStore, run_id: str, tmp_path: Path):
    (big := tmp_path / "big").mkdir()
    with pytest.raises(TrackingError, match=r"has no config\.json"):
        log_weights(store, run_id, big, "last", 3)
    (big / "config.json").write_text("{}")
    (big / "model.safetensors").write_bytes(b"0" * 1000)
    model = store.client.get_logged_model(log_weights(store, run_id, big, "last", 3, max_bytes=999))
    assert (model.tags["path"], model.tags["size_bytes"]) == (str(big), "1002")
    assert store.client.list_logged_model_artifacts(model.model_id) == []


def test_models_have_scores_and_aliases(store: MlflowStore, run_id: str, model_directory: Path, tmp_path: Path):
    score = "val/reward"
    store.log_params(run_id, {"optim": {"lr": 0.001, "beta1": 0.9}, "seed": 1})
    store.log_dataset(
        run_id, name="x held-out", fingerprint="f" * 16, source="s", schema={}, counts={}, context="validation"
    )
    for step, value in ((20, 0.5), (40, 0.25)):
        store.log_metrics(run_id, step, {score: value}, float(step))
        for _ in range(2):  # a retried stage
            log_model(store, run_id, tmp_path / f"step-0000{step}", kind="checkpoint", name=f"step-0000{step}",
                      step=step, metrics={score: value}, time_s=step + 0.5, tags={"size_bytes": "9"})  # fmt: skip
    weights = {
        step: log_weights(store, run_id, model_directory, f"weights-{step}", step, metrics={score: value}, max_bytes=1)
        for step, value in ((20, 0.5), (40, 0.25))
    }
    by_name = {model.name: model for model in store.client.search_logged_models([store.experiment_id])}
    assert sorted(by_name) == ["step-000020", "step-000040", "weights-20", "weights-40"]
    checkpoint = by_name["step-000020"]
    assert checkpoint.params == {"optim.lr": "0.001", "seed": "1"}
    assert checkpoint.tags["mlflow.note.content"].startswith("Checkpoint of run ")
    assert (checkpoint.model_type, checkpoint.tags["path"]) == ("checkpoint", str(tmp_path / "step-000020"))
    assert (checkpoint.tags["mlflow.model.isExternal"], checkpoint.tags["size_bytes"]) == ("true", "9")
    (metric,) = checkpoint.metrics
    assert (metric.value, metric.step) == (0.5, 20)
    assert (metric.dataset_name, metric.dataset_digest) == ("x held-out", "f" * 16)
    assert points(store.client, store.client.get_run(run_id), score) == [(20, 0.5), (40, 0.25)]
    before = mlflow.get_tracking_uri(), mlflow.is_tracking_uri_set()
    name_models(store, run_id, {"best": weights[20], "last": weights[20]}, "mine")
    for _ in range(2):
        name_models(store, run_id, {"best": weights[20], "last": weights[40]}, "mine")
    models = models_of(store.client, store.experiment_id, run_id)
    by_alias = {alias: [model.model_id for model in models if alias in model.tags] for alias in ("best", "last")}
    assert by_alias == {"best": [weights[20]], "last": [weights[40]]}
    assert (mlflow.get_tracking_uri(), mlflow.is_tracking_uri_set()) == before
    versions = {alias: store.client.get_model_version_by_alias("mine", alias) for alias in ("best", "last")}
    assert {alias: version.version for alias, version in versions.items()} == {"best": 1, "last": 2}
    assert (model_of(versions["best"]), versions["best"].run_id) == (weights[20], run_id)
    last, named = versions["last"], store.client.get_run(run_id).info.run_name
    assert last.tags == {"run": named, "step": "40", score: "0.25"}
    assert last.description == f"val/reward 0.25, run {named}, step 40"
    assert len(store.client.search_model_versions("name = 'mine'")) == 2, "one version per model"
    registered = {str(model.model_id): json.loads(model.tags.get("mlflow.modelVersions", "[]")) for model in models}
    assert {model_id: named for model_id, named in registered.items() if named} == {
        weights[20]: [{"name": "mine", "version": 1}],
        weights[40]: [{"name": "mine", "version": 2}],
    }
