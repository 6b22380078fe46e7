"""The checkpoints and weights of a run as logged models of MLflow."""

import importlib.metadata
import json
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from rlcore.errors import TrackingError
from rlcore.models.shape import is_plain_tokenizer
from rlcore.score import HELD_OUT_REWARD
from rlcore.tracking.connection import mlflow_name
from rlcore.tracking.mlflow_store import NOTE_TAG, VERSIONS_TAG, MlflowStore, milliseconds

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric, Run
    from mlflow.entities.model_registry import ModelVersion

Alias = Literal["best", "last"]
ALIASES: tuple[Alias, ...] = ("best", "last")
Kind = Literal["checkpoint", "transformers"]
"""The model types in MLflow. A checkpoint's files are not copied into MLflow, which cannot load sharded weights."""
KIND_NAMES: dict[Kind, str] = {"checkpoint": "Checkpoint", "transformers": "Weights"}
EXTERNAL = "mlflow.model.isExternal"  # MLflow's tag for a model whose files are stored elsewhere
MODEL_PARAMS = ("algo.advantage", "data.task", "model.path", "optim.lr", "rollout.samples_per_prompt", "seed")
"""The settings of the run that a model's page in MLflow shows as parameters."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin")  # not copied to the tokenizer's folder


def log_model(
    store: MlflowStore,
    run_id: str,
    path: Path,
    *,
    kind: Kind,
    name: str,
    step: int,
    metrics: Mapping[str, float],
    time_s: float,
    tags: Mapping[str, str],
    max_bytes: int | None = None,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Log a checkpoint or a transformers directory as an output of the run at a step, and return the model's id. If the
    run already has a model with this name and step, return the id of that model. A transformers directory is copied
    into MLflow, unless it is larger than `max_bytes`. A checkpoint is not copied. `mlflow.transformers.load_model`
    loads the copy as `models:/<id>`, and `AutoModelForCausalLM` loads the copy's subfolder `model`. `metrics`: the
    metrics of the step. `time_s`: the time of the journal line that has them. `versions`: the versions of the packages
    that wrote the weights. Raises TrackingError if a transformers directory has no config.json."""
    from mlflow.entities import LoggedModelOutput

    tags = {**tags, "path": str(path.absolute()), "step": str(step)}
    if kind == "checkpoint":
        tags[EXTERNAL] = "true"
    elif (path / "config.json").is_file():
        num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        tags["size_bytes"] = str(num_bytes)
    else:
        raise TrackingError(f"{path}: has no config.json, so it is not a transformers model; export the weights first.")
    client, experiment_id = store.client, store.experiment_id
    for model in models_of(client, experiment_id, run_id):
        if (model.name, model.tags.get("step")) == (name, str(step)):
            return str(model.model_id)
    run = client.get_run(run_id)
    tags |= {NOTE_TAG: f"{KIND_NAMES[kind]} of run {run.info.run_name} after step {step}."}
    params = {key: run.data.params[key] for key in MODEL_PARAMS if key in run.data.params}
    made = client.create_logged_model(
        experiment_id, name=name, source_run_id=run_id, tags=tags, params=params, model_type=kind
    )
    model_id = str(made.model_id)
    if kind == "transformers" and (max_bytes is None or num_bytes <= max_bytes):
        _upload(client, model_id, path, num_bytes, versions)
    client.finalize_logged_model(model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
    if metrics:
        links = {"model_id": model_id, **_held_out_dataset(run)}
        rows = [_model_metric(client, run_id, key, value, time_s, step, links) for key, value in metrics.items()]
        client.log_batch(run_id, metrics=rows)
    return model_id


def _held_out_dataset(run: "Run") -> dict[str, str]:
    """Return the fields of an MLflow metric that name the run's held-out dataset, or {} if the run has none."""
    known = () if run.inputs is None else run.inputs.dataset_inputs
    found = [one.dataset for one in known if any(tag.value == "validation" for tag in one.tags)]
    return {"dataset_name": found[0].name, "dataset_digest": found[0].digest} if found else {}


def _model_metric(
    client: "MlflowClient", run_id: str, name: str, value: float, time_s: float, step: int, links: Mapping[str, str]
) -> "Metric":
    from mlflow.entities import Metric

    key = mlflow_name(name)
    there = [point for point in client.get_metric_history(run_id, key) if point.step == step]
    last = max(there, key=lambda point: point.timestamp, default=None)  # a resume sends a step again
    value, time_ms = (value, milliseconds(time_s)) if last is None else (last.value, last.timestamp)
    return Metric(key, value, time_ms, step, **links)


def _upload(client: "MlflowClient", model_id: str, path: Path, num_bytes: int, given: Mapping[str, str]) -> None:
    """Upload weights and tokenizer in the format of `mlflow.transformers.save_model`, but without importing torch.
    `given`: the versions of packages."""
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    packages = ("mlflow", "torch", "transformers")
    versions = {name: given.get(name) or importlib.metadata.version(name) for name in packages}
    requirements = [f"{name}=={version}" for name, version in versions.items()]
    text = Schema([ColSpec("string")])
    plain = is_plain_tokenizer(path / "tokenizer_config.json")
    model = Model(model_id=model_id, signature=ModelSignature(text, text), model_size_bytes=num_bytes)
    model.add_flavor(
        "transformers",
        transformers_version=versions["transformers"],
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        torch_dtype=None,
        pipeline_model_type=json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"][0],
        source_model_name=str(path),
        model_binary="model",
        tokenizer_type="PreTrainedTokenizerFast" if plain else "AutoTokenizer",
        components=["tokenizer"],
    )
    pyfunc.add_to_model(model, "mlflow.transformers", conda_env="conda.yaml", python_env="python_env.yaml")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(path, folder / "components" / "tokenizer", ignore=shutil.ignore_patterns(*WEIGHT_FILES))
        model.save(str(folder / "MLmodel"))
        python = platform.python_version()
        with_pip: list[object] = [f"python={python}", "pip", {"pip": requirements}]
        for file, environment in {
            "conda.yaml": {"name": "mlflow-env", "channels": ["conda-forge"], "dependencies": with_pip},
            "python_env.yaml": {"python": python, "dependencies": ["-r requirements.txt"]},
        }.items():
            (folder / file).write_text(yaml.safe_dump(environment), encoding="utf-8")
        (folder / "requirements.txt").write_text("\n".join(requirements), encoding="utf-8")
        client.log_model_artifacts(model_id, str(path), "model")
        client.log_model_artifacts(model_id, str(folder))


def models_of(client: "MlflowClient", experiment_id: str, run_id: str) -> "list[LoggedModel]":
    """Return the models of a run that are completely logged, oldest first."""
    found, token = list["LoggedModel"](), None
    while token != "":
        page = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", page_token=token)
        found += [model for model in page if str(model.status) == "READY"]
        token = page.token or ""
    return sorted(found, key=lambda model: model.creation_timestamp)


def name_models(store: MlflowStore, run_id: str, by_alias: Mapping[Alias, str], registered: str | None) -> None:
    """Tag the run's `best` and `last` model, whose ids are in `by_alias`. Tags are used because MLflow has
    aliases only in its registry. If `registered` is set, also register both as versions of the model named
    `registered`. Their aliases are then addresses such as `models:/<registered>@best`."""
    for model in models_of(store.client, store.experiment_id, run_id):
        for alias in ALIASES:
            if alias in model.tags and by_alias.get(alias) not in (None, model.model_id):
                store.client.delete_logged_model_tag(str(model.model_id), alias)
    for alias, model_id in by_alias.items():
        store.client.set_logged_model_tags(model_id, {alias: "true"})
    if registered is not None:
        _register(store.client, store.uri, registered, run_id, by_alias)


def model_of(version: "ModelVersion") -> str:
    """Return the id of a registered version's logged model. Versions from a search have the id only in `source`."""
    return str(version.model_id or str(version.source).removeprefix("models:/"))


def _register(client: "MlflowClient", uri: str, name: str, run_id: str, models: Mapping[Alias, str]) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException

    is_set = mlflow.is_tracking_uri_set()  # type: ignore[no-untyped-call]
    before: Any = mlflow.get_tracking_uri() if is_set else None  # otherwise MLflow's default would be stored
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = {model_of(each): str(each.version) for each in client.search_model_versions(f"name = '{name}'")}
    for alias, model_id in models.items():
        model = client.get_logged_model(model_id)
        if model_id not in versions:
            run = client.get_run(run_id)
            tags = {one.key: f"{one.value:.4g}" for one in model.metrics or () if one.key == HELD_OUT_REWARD}
            tags |= {"run": str(run.info.run_name), "step": model.tags["step"]}
            text = ", ".join(f"{key} {value}" for key, value in tags.items())
            mlflow.set_tracking_uri(uri)  # a model registry in a database uses this URI
            try:
                source = f"models:/{model_id}"
                made = client.create_model_version(name, source, run_id, tags, description=text, model_id=model_id)
            finally:
                mlflow.set_tracking_uri(before)
            versions[model_id] = str(made.version)
        client.set_registered_model_alias(name, alias, versions[model_id])
        linked = json.loads(model.tags.get(VERSIONS_TAG, "[]"))
        if (version := {"name": name, "version": int(versions[model_id])}) not in linked:
            client.set_logged_model_tags(model_id, {VERSIONS_TAG: json.dumps([*linked, version])})
