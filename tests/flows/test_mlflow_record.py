"""The run's page in MLflow, written by the stages around the training."""

from contextlib import suppress
from pathlib import Path

import pytest

from flows.work import mlflow_record, stages
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import open_run
from flows.work.results import Recorded
from rlcore.config.compose import load_config
from rlcore.errors import ModelError, StopRequestedError
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.user_code import code_of


def test_a_run_that_ends_before_its_first_step_is_not_running_for_ever(
    artifacts_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_record, "END_WAIT_S", 180.0)  # a busy machine takes long over a store's tables
    size = ["data.train_size=20", "data.validation_size=5", f"paths.root={artifacts_root}"]
    size.append("tags.from='http://me:SECRET@host'")
    config = load_config(["experiment=debug", *size])
    rows, filtered = stages.make_dataset(config), stages.filter_rows(config)
    for error, status in ((ModelError("no such model"), "FAILED"), (StopRequestedError("told to end"), "KILLED")):
        with suppress(type(error)), open_run(config, ()) as run, MlflowRecord(run, {}) as record:
            record.start(rows, filtered)
            raise error
        known = Recorded.read(run.layout)
        client = MlflowStore(config.tracking, artifacts_root).client
        page = client.get_run(known.mlflow_run_id)
        assert page.info.status == status
        assert page.data.tags["code_fingerprint"] == code_of(config).fingerprint
        kept = client.list_artifacts(known.mlflow_run_id, "lineage/code/data")
        assert "lineage/code/data/countdown.py" in {file.path for file in kept}
        settings = Path(client.download_artifacts(known.mlflow_run_id, "config/settings.yaml")).read_text()
        assert "http://me:***@host" in settings
        assert "SECRET" not in settings
        assert "total_steps: 2\n" in settings
        inputs = [({tag.key: tag.value for tag in one.tags}, one.dataset) for one in page.inputs.dataset_inputs]
        assert {(tags["mlflow.data.context"], data.name, data.digest) for tags, data in inputs} == {
            ("training", "countdown", rows.fingerprint),
            ("training", "countdown filtered", filtered.fingerprint),
            ("validation", "countdown held-out", filtered.fingerprint),
        }
