"""Datasets, tables and models in MLflow."""

import importlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import TrackingError
from rlcore.tracking.models import finish_model, known_model

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_DIGEST_CHARACTERS = 36
"""MLflow's limit for the digest of a dataset; the fingerprint's first characters are as unique."""

MAX_INPUT_TAG_CHARACTERS = 500
"""MLflow's limit for the value of a tag on a dataset."""


def log_dataset(
    client: "MlflowClient",
    run_id: str,
    *,
    name: str,
    fingerprint: str,
    source: str,
    schema: Mapping[str, str],
    counts: Mapping[str, int],
    context: str,
) -> None:
    """Link a dataset to a run as an input, found again by `dataset.digest = '<fingerprint>'`.

    Args:
        client: MLflow's client.
        run_id: the MLflow run.
        name: shown in MLflow ("countdown", "countdown filtered").
        fingerprint: ours; MLflow's own digest would be of a sample of rows.
        source: path or hub id of the files.
        schema: type by column.
        counts: rows by split, dropped rows and the like.
        context: what the run did with it ("training", "validation").
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=name,
        digest=fingerprint[:MAX_DIGEST_CHARACTERS],
        source_type="local",
        source=json.dumps({"uri": source}),
        schema=json.dumps({"mlflow_colspec": [{"name": key, "type": kind} for key, kind in schema.items()]}),
        profile=json.dumps(dict(counts)),
    )
    tags = [InputTag("mlflow.data.context", context), InputTag("fingerprint", fingerprint[:MAX_INPUT_TAG_CHARACTERS])]
    client.log_inputs(run_id, [DatasetInput(dataset, tags)])


def log_table(client: "MlflowClient", run_id: str, rows: Sequence[Mapping[str, object]], artifact: str) -> None:
    """Write rows as an artifact and announce it as a table, so that MLflow's page shows it as one.

    MLflow's own `log_table` appends to what is there: a stage that is run twice would double its rows.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
    client.log_text(run_id, json.dumps(table, ensure_ascii=False), artifact)
    announced = json.loads(client.get_run(run_id).data.tags.get("mlflow.loggedArtifacts", "[]"))
    entry = {"path": artifact, "type": "table"}
    if entry not in announced:
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([*announced, entry]))


def log_model(
    client: "MlflowClient",
    experiment_id: str,
    run_id: str,
    path: Path,
    *,
    name: str,
    step: int,
    metrics: Mapping[str, float],
    time_ms: int,
    tags: Mapping[str, str],
    max_bytes: int | None,
) -> str:
    """Keep a transformers directory as a logged model, an output of the run at a step.

    The weights are copied as they are, never loaded, and can be read by `mlflow.transformers.load_model` and (the
    folder `model` in it) by `AutoModelForCausalLM`. Over `max_bytes` only the place is recorded. A model of the same
    name and step that is complete is not written again.

    `metrics` are shown with the model. MLflow draws them on the run's curves too, so `time_ms` must be the time of the
    journal's record they come from: then they are the points that are there already, and not second ones.

    Returns:
        The model's id: its address is `models:/<id>`.

    Raises:
        TrackingError: `path` is not a transformers directory.
    """
    if not (path / "config.json").is_file():
        raise TrackingError(f"{path}: holds no config.json, so it is no transformers model; export the weights first.")
    known = known_model(client, experiment_id, run_id, name, step)
    if known is not None:
        return known
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    uploaded = max_bytes is None or num_bytes <= max_bytes
    all_tags = {**tags, "step": str(step), "path": str(path.absolute()), "size_bytes": str(num_bytes)}
    model = client.create_logged_model(
        experiment_id, name=name, source_run_id=run_id, tags=all_tags, model_type="transformers"
    )
    if uploaded:
        _upload_model(client, model.model_id, path)
    return finish_model(client, run_id, str(model.model_id), step=step, metrics=metrics, time_ms=time_ms)


def load_ahead() -> None:
    """Import what `log_model` takes seconds to import, while there is time."""
    for module in ("mlflow.transformers", "transformers.pipelines"):
        importlib.import_module(module)


def _upload_model(client: "MlflowClient", model_id: str, path: Path) -> None:
    import mlflow.transformers
    from mlflow.models import Model

    requirements = [f"{name}=={importlib.metadata.version(name)}" for name in ("mlflow", "torch", "transformers")]
    with tempfile.TemporaryDirectory() as folder:
        packaged = Path(folder) / "model"
        mlflow.transformers.save_model(
            str(path),
            str(packaged),
            task="text-generation",
            mlflow_model=Model(model_id=model_id),
            pip_requirements=requirements,
        )
        client.log_model_artifacts(model_id, str(packaged))
