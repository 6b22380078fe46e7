"""The MLflow client of Millrace. Calls wait for MLflow and may raise, so a training step must not make them."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING
from urllib.parse import quote as quote_url

from rlcore.config import TrackingConfig
from rlcore.config.base import leaves
from rlcore.config.problems import mask_secrets
from rlcore.errors import TrackingError
from rlcore.score import HELD_OUT_REWARD, REWARD
from rlcore.storage.documents import SQLITE
from rlcore.tracking.attempts import FinalStatus
from rlcore.tracking.connection import accepted_values, connect, explain_error, mlflow_name, resolve_uri
from rlcore.tracking.lineage import RUN_ID_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

log = logging.getLogger(__name__)
TRAINING_VIEW = "workflowType=machine_learning"  # selects the training view of MLflow 3.17 instead of the GenAI view
LOCAL_UI = "http://127.0.0.1:5000"  # the pages of a sqlite store as long as no server is known
# MLflow's limits for parameters or tags of a request, and for characters of a value.
MAX_BATCH = 100
MAX_PARAM_CHARACTERS = 6_000
MAX_TAG_CHARACTERS = 8_000
MAX_RUNS = 1_000  # limit of a search
EXPERIMENT_KIND_TAG, TRAINING = "mlflow.experimentKind", "custom_model_development"
"""The name and the value of an experiment tag that makes MLflow show runs, charts and models instead of traces."""
PARENT_TAG = "mlflow.parentRunId"  # for nested runs
NOTE_TAG = "mlflow.note.content"  # description of a run
TABLES_TAG = "mlflow.loggedArtifacts"  # tables of a run
VERSIONS_TAG = "mlflow.modelVersions"  # registered versions of a logged model
VIEW = "millrace"  # id of the saved view of the experiment, whose columns and charts begin with the reward
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"  # stores the view for MLflow's pages
COLUMN_WIDTHS = {
    "attributes.`Run Name`": 250,
    f"metrics.`{REWARD}`": 80,
    f"metrics.`{HELD_OUT_REWARD}`": 90,
    "params.`seed`": 60,
    "metrics.`response_length/mean`": 140,
    "params.`optim.lr`": 80,
    "tags.`algorithm`": 100,
    "tags.`task`": 120,
}
"""The columns in which MLflow shows the experiment's runs, and their widths in pixels. The widths leave room for the
rewards and the seed next to the run name."""


class MlflowStore:
    """One experiment in an MLflow store. The connection to the store is opened at the first use."""

    def __init__(self, config: TrackingConfig, root: Path) -> None:
        self.uri = resolve_uri(config, root)
        self._experiment_name = config.experiment
        self._artifact_root = root.absolute() / "mlartifacts"

    @cached_property
    def client(self) -> "MlflowClient":
        """Return the MLflow client that is connected to the store."""
        return connect(self.uri)

    @cached_property
    def experiment_id(self) -> str:
        """Return the id of the experiment, which is created if missing. Raises TrackingError if it was deleted."""
        experiment = self.client.get_experiment_by_name(self._experiment_name) or self._create_experiment()
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"tracking.experiment {self._experiment_name!r}: was deleted in {mask_secrets(self.uri)}. Restore it "
                f"with `mlflow experiments restore --experiment-id {experiment.experiment_id}`, or set another name."
            )
        if VIEW_TAG not in experiment.tags:
            self.client.set_experiment_tag(experiment.experiment_id, VIEW_TAG, _saved_view())
        return str(experiment.experiment_id)

    def _create_experiment(self) -> "Experiment":
        from mlflow.exceptions import MlflowException

        # A server chooses the location of its artifacts; for sqlite, MLflow would use the working directory.
        location = self._artifact_root.as_uri() if self.uri.startswith(SQLITE) else None
        try:
            self.client.create_experiment(self._experiment_name, location, {EXPERIMENT_KIND_TAG: TRAINING})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        created = self.client.get_experiment_by_name(self._experiment_name)
        if created is None:
            raise TrackingError(
                f"tracking.experiment {self._experiment_name!r}: created, but not returned by {mask_secrets(self.uri)}"
            )
        return created

    def find_runs(self, tags: Mapping[str, str]) -> "list[Run]":
        """Return the runs of the experiment that have all of these tags, oldest first."""
        conditions = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        return self.client.search_runs([self.experiment_id], conditions, order_by=["attributes.start_time ASC"])

    def create_run(self, run_name: str, tags: Mapping[str, str], start_time_s: float | None = None) -> str:
        """Create a run and return its MLflow id. `start_time_s`: seconds since the epoch, by default now."""
        start_ms = None if start_time_s is None else milliseconds(start_time_s)
        short = {key: _truncate(value, MAX_TAG_CHARACTERS) for key, value in accepted_values(tags).items()}
        return str(self.client.create_run(self.experiment_id, start_ms, short, run_name).info.run_id)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run, but never change its parent run. Long values are truncated and marked. Tags with invalid
        names are left out."""
        from mlflow.entities import RunTag

        values = {key: value for key, value in accepted_values(tags).items() if key != PARENT_TAG}
        rows = [RunTag(key, _truncate(value, MAX_TAG_CHARACTERS)) for key, value in values.items()]
        for start in range(0, len(rows), MAX_BATCH):
            self.client.log_batch(run_id, tags=rows[start : start + MAX_BATCH])

    def log_params(self, run_id: str, settings: Mapping[str, object]) -> None:
        """Log the settings as parameters, such as `trainer.total_steps`. Parameters are immutable in MLflow, so a value
        that changes on a resume becomes a tag `changed.<key>`."""
        from mlflow.entities import Param

        texts = {
            key: mask_secrets(value if isinstance(value, str) else json.dumps(value, default=os.fspath))
            for key, value in leaves(settings).items()
        }
        params = {key: _truncate(value, MAX_PARAM_CHARACTERS) for key, value in accepted_values(texts).items()}
        known = self.client.get_run(run_id).data.params
        missing = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(missing), MAX_BATCH):
            self.client.log_batch(run_id, params=missing[start : start + MAX_BATCH])
        changed = {f"changed.{key}": value for key, value in params.items() if known.get(key, value) != value}
        self.set_tags(run_id, changed)

    def log_metrics(self, run_id: str, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Log the metrics of one step directly in MLflow, for stages without a journal. `time_s`: seconds since the
        epoch."""
        from mlflow.entities import Metric

        rows = [Metric(mlflow_name(name), value, milliseconds(time_s), step) for name, value in metrics.items()]
        self.client.log_batch(run_id, metrics=rows)

    def log_dataset(
        self,
        run_id: str,
        *,
        name: str,
        fingerprint: str,
        source: str,
        schema: Mapping[str, str],
        counts: Mapping[str, int],
        context: str,
    ) -> None:
        """Log a dataset as an input of a run. A search for `dataset.digest = '<fingerprint>'` finds the run. `schema`:
        the type of each column. `counts`: numbers of rows, for example by split. `context`: "training" or "validation".
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=fingerprint,
            source_type="local",
            source=json.dumps({"uri": source}),
            schema=json.dumps({"mlflow_colspec": [{"name": key, "type": kind} for key, kind in schema.items()]}),
            profile=json.dumps(dict(counts)),
        )
        tags = [InputTag("mlflow.data.context", context), InputTag("fingerprint", fingerprint)]
        self.client.log_inputs(run_id, [DatasetInput(dataset, tags)])

    def log_table(self, run_id: str, file: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Log a table for MLflow's evaluation view. An earlier table in the same file is replaced. MLflow's own
        `log_table` would append the rows instead."""
        self.client.log_dict(run_id, {"columns": columns, "data": rows}, file)
        self.set_tags(run_id, {TABLES_TAG: json.dumps([{"path": file, "type": "table"}])})

    def set_status(self, run_id: str, status: FinalStatus, end_time_s: float | None = None) -> None:
        """End the run in MLflow with this status. `end_time_s`: seconds since the epoch, by default now."""
        self.client.set_terminated(run_id, status, None if end_time_s is None else milliseconds(end_time_s))

    def run_url(self, run_id: str, ui: str = LOCAL_UI) -> str:
        """Return the address of a run's page. `ui`: the address of MLflow's pages, used for a sqlite store."""
        return f"{self.page_root(ui)}/#/experiments/{self.experiment_id}/runs/{run_id}?{TRAINING_VIEW}"

    def runs_url(self, ui: str = LOCAL_UI) -> str:
        """Return the address of MLflow's table of all runs with the columns `COLUMN_WIDTHS`. For `ui`, see
        `run_url`."""
        return f"{self.page_root(ui)}/#/experiments/{self.experiment_id}/runs?{TRAINING_VIEW}&viewStateShareKey={VIEW}"

    def page_root(self, ui: str) -> str:
        """Return the address of MLflow's pages. For a sqlite store, it is `ui`. Otherwise, it is the address of the
        server."""
        return ui if self.uri.startswith(SQLITE) else mask_secrets(self.uri)

    def ui_command(self) -> str | None:
        """Return the command that serves the pages of a sqlite store, or None if the store is a server."""
        return f"mlflow ui --backend-store-uri {quote(self.uri)}" if self.uri.startswith(SQLITE) else None


def search_run_ids(store: MlflowStore, query: str) -> list[str]:
    """Return the MLflow ids of the training runs that match a query in MLflow's language, oldest first. Warm starts are
    excluded. Raises TrackingError if MLflow rejects the query or does not respond."""
    own = f"tags.`{RUN_ID_TAG}` != '' and tags.stage = 'train'"  # excludes warm starts
    try:
        conditions = f"{query} and {own}" if query else own
        order = ["attributes.start_time ASC"]
        runs = store.client.search_runs([store.experiment_id], conditions, max_results=MAX_RUNS, order_by=order)
    except Exception as error:
        raise TrackingError(
            f"search {query!r}: MLflow rejects it: {explain_error(error, store.uri)}. Example: "
            "\"params.`optim.lr` = '0.001' and tags.task = 'countdown'\"."
        ) from error
    if runs.token:
        log.warning("search %r: more than %d runs found; the oldest %d are used", query, MAX_RUNS, MAX_RUNS)
    return list(dict.fromkeys(run.data.tags[RUN_ID_TAG] for run in runs))


def compare_url(store: MlflowStore, mlflow_run_ids: Sequence[str], ui: str = LOCAL_UI) -> str:
    """Return the address of the MLflow page that compares these runs. See `MlflowStore.run_url`."""
    runs = quote_url(json.dumps(list(mlflow_run_ids)))
    experiments = quote_url(json.dumps([store.experiment_id]))
    return f"{store.page_root(ui)}/#/compare-runs?runs={runs}&experiments={experiments}&{TRAINING_VIEW}"


def table_url(page: str) -> str:
    """Return the address of MLflow's table of all runs with the columns `COLUMN_WIDTHS`. `page`: the address of one
    run's page."""
    return f"{re.sub('/runs/[^?]*', '/runs', page)}&viewStateShareKey={VIEW}"


def _saved_view() -> str:
    """Return the columns and charts that MLflow shows for the experiment, as JSON for MLflow's pages."""
    charts = [
        {"type": "LINE", "uuid": key, "metricSectionId": VIEW, "metricKey": key, "displayName": key, "deleted": False,
         "isGenerated": True, "runsCountToCompare": 10, "lineSmoothness": 0, "scaleType": "linear", "range": {},
         "xAxisKey": "step", "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}
        for key in (REWARD, HELD_OUT_REWARD)
    ]  # fmt: skip
    section = {"uuid": VIEW, "name": "Reward", "display": True, "isReordered": True, "columns": 1}
    order = list(COLUMN_WIDTHS)
    state = {"selectedColumns": order[1:], "columnOrder": order, "columnWidths": COLUMN_WIDTHS,
             "compareRunCharts": charts, "compareRunSections": [section], "isAccordionReordered": True}  # fmt: skip
    return json.dumps({"name": "Reward first", "createdAt": 0, "state": json.dumps(state)})


def milliseconds(time_s: float) -> int:
    """Convert seconds since the epoch to a time stamp of MLflow."""
    return round(time_s * 1e3)


def _truncate(value: str, limit: int) -> str:
    """Truncate a long value and mark it as truncated. MLflow itself would truncate it without a mark."""
    mark = f" ... [cut: {len(value)} characters]"
    return value if len(value) <= limit else value[: limit - len(mark)] + mark
