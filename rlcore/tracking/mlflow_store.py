"""MLflow as the rest of Millrace sees it: runs, parameters, metrics, datasets, artifacts and models of a run.

Every call goes to MLflow at once and may raise; none of them belongs into a training step (that is what the journal
and the delivery are for). Only the client is used, never MLflow's global "active run".
"""

import json
import logging
import os
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
from rlcore.storage.documents import SQLITE
from rlcore.tracking.attempts import FinalStatus
from rlcore.tracking.connection import accepted_values, connect, explain_error, mlflow_name, resolve_uri
from rlcore.tracking.lineage import RUN_ID_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

log = logging.getLogger(__name__)

TRAINING_VIEW = "workflowType=machine_learning"
"""Asks a page of MLflow 3.17 for the tables and curves of training; without it the page shows the GenAI view."""
LOCAL_UI = "http://127.0.0.1:5000"
"""Address of the pages of a store on sqlite while `millrace ui` or `millrace up` serves them."""

# MLflow's limits: of parameters or tags in one request, and of the characters of a value.
MAX_BATCH = 100
MAX_PARAM_CHARACTERS = 6_000
MAX_TAG_CHARACTERS = 8_000

MAX_RUNS = 1_000
"""A search returns at most so many runs."""

EXPERIMENT_KIND_TAG, TRAINING = "mlflow.experimentKind", "custom_model_development"
"""Tag of an experiment: with it MLflow shows runs, charts and models, and not the view for traces of agents."""

PARENT_TAG = "mlflow.parentRunId"
"""MLflow's own tag for nesting."""

NOTE_TAG = "mlflow.note.content"
"""MLflow shows it as the run's description."""


class MlflowStore:
    """One experiment in one MLflow store. Connects at the first use."""

    def __init__(self, config: TrackingConfig, root: Path) -> None:
        self.uri = resolve_uri(config, root)
        self._experiment_name = config.experiment
        self._artifact_root = root.absolute() / "mlartifacts"

    @cached_property
    def client(self) -> "MlflowClient":
        """MLflow's own client, for what this class does not offer."""
        return connect(self.uri)

    @cached_property
    def experiment_id(self) -> str:
        """The id of the experiment, which is made if it is missing.

        Raises:
            TrackingError: the experiment was deleted.
        """
        experiment = self.client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            experiment = self._create_experiment()
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"tracking.experiment {self._experiment_name!r}: was deleted in {mask_secrets(self.uri)}. Restore it with "
                f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`, or set another name."
            )
        return str(experiment.experiment_id)

    def _create_experiment(self) -> "Experiment":
        from mlflow.exceptions import MlflowException

        # A server chooses the place of its artifacts itself; on sqlite MLflow would take the working directory.
        location = self._artifact_root.as_uri() if self.uri.startswith(SQLITE) else None
        try:
            self.client.create_experiment(self._experiment_name, location, {EXPERIMENT_KIND_TAG: TRAINING})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        created = self.client.get_experiment_by_name(self._experiment_name)
        if created is None:
            raise TrackingError(
                f"tracking.experiment {self._experiment_name!r}: {mask_secrets(self.uri)} made it but does not show it"
            )
        return created

    def find_runs(self, tags: Mapping[str, str]) -> "list[Run]":
        """The runs of the experiment that have all these tags, oldest first."""
        conditions = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        return self.client.search_runs([self.experiment_id], conditions, order_by=["attributes.start_time ASC"])

    def create_run(self, run_name: str, tags: Mapping[str, str], start_time_s: float | None = None) -> str:
        """The MLflow id of a new run. `start_time_s`: seconds since the epoch or now."""
        start_ms = None if start_time_s is None else milliseconds(start_time_s)
        short = {key: _truncate(value, MAX_TAG_CHARACTERS) for key, value in accepted_values(tags).items()}
        return str(self.client.create_run(self.experiment_id, start_ms, short, run_name).info.run_id)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags; a value over MLflow's limit is cut and says so, and a name that MLflow refuses is left out."""
        from mlflow.entities import RunTag

        rows = [RunTag(key, _truncate(value, MAX_TAG_CHARACTERS)) for key, value in accepted_values(tags).items()]
        for start in range(0, len(rows), MAX_BATCH):
            self.client.log_batch(run_id, tags=rows[start : start + MAX_BATCH])

    def log_params(self, run_id: str, settings: Mapping[str, object]) -> None:
        """Write the settings as parameters, `trainer.total_steps` and so on.

        MLflow keeps the first value of a parameter for ever. Where a resumed run has another one (more steps, say),
        the new value becomes a tag `changed.<key>`.
        """
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
        """Write values of one step, for stages without a journal (a validation on its own, a sweep's summary)."""
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
        """Link a dataset to a run as an input, found again by `dataset.digest = '<fingerprint>'`: MLflow's own digest
        would be of a sample of rows. `source`: path or hub id of the files; `schema`: type by column; `counts`: rows by
        split, dropped rows and the like; `context`: what the run did with it ("training", "validation").
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

    def set_status(self, run_id: str, status: FinalStatus, end_time_s: float | None = None) -> None:
        """End the run with this status; the end is now unless told in seconds since the epoch."""
        self.client.set_terminated(run_id, status, None if end_time_s is None else milliseconds(end_time_s))

    def run_url(self, run_id: str, ui: str = LOCAL_UI) -> str:
        """The page of a run. On sqlite it is the page under `ui`, where `ui_command` serves it."""
        return f"{self.page_root(ui)}/#/experiments/{self.experiment_id}/runs/{run_id}?{TRAINING_VIEW}"

    def runs_url(self, ui: str = LOCAL_UI) -> str:
        """The page with the table of all runs."""
        return f"{self.page_root(ui)}/#/experiments/{self.experiment_id}/runs?{TRAINING_VIEW}"

    def page_root(self, ui: str) -> str:
        """Where MLflow's pages are: `ui` on sqlite, else the server."""
        return ui if self.uri.startswith(SQLITE) else mask_secrets(self.uri)

    def ui_command(self) -> str | None:
        """The command that shows a sqlite store in a browser; None where a server does already."""
        return f"mlflow ui --backend-store-uri {quote(self.uri)}" if self.uri.startswith(SQLITE) else None


def search_run_ids(store: MlflowStore, query: str) -> list[str]:
    """The run ids (names of folders) of the experiment's trainings that a query finds, oldest first.

    The query is in MLflow's language, such as ``params.`optim.lr` = '0.001' and tags.task = 'countdown'``.

    Raises:
        TrackingError: MLflow does not take the query, or does not answer.
    """
    own = f"tags.`{RUN_ID_TAG}` != '' and tags.stage = 'train'"  # a warm start has settings too
    try:
        runs = store.client.search_runs(
            [store.experiment_id],
            f"{query} and {own}" if query else own,
            max_results=MAX_RUNS,
            order_by=["attributes.start_time ASC"],
        )
    except Exception as error:
        raise TrackingError(
            f"search {query!r}: MLflow does not take it: {explain_error(error, store.uri)}. A query reads like "
            "\"params.`optim.lr` = '0.001' and tags.task = 'countdown'\"."
        ) from error
    if runs.token:
        log.warning("search %r: more than %d runs are found; the oldest %d are taken", query, MAX_RUNS, MAX_RUNS)
    return list(dict.fromkeys(run.data.tags[RUN_ID_TAG] for run in runs))


def compare_url(store: MlflowStore, mlflow_run_ids: Sequence[str], ui: str = LOCAL_UI) -> str:
    """MLflow's page that compares runs. On sqlite it is the page under `ui`, where `millrace ui` serves it."""
    runs = quote_url(json.dumps(list(mlflow_run_ids)))
    experiments = quote_url(json.dumps([store.experiment_id]))
    return f"{store.page_root(ui)}/#/compare-runs?runs={runs}&experiments={experiments}&{TRAINING_VIEW}"


def milliseconds(time_s: float) -> int:
    """MLflow's time stamp of a time in seconds since the epoch."""
    return round(time_s * 1e3)


def _truncate(value: str, limit: int) -> str:
    """The value, or its beginning and a mark that says how long it was. MLflow itself would cut without a word."""
    if len(value) <= limit:
        return value
    mark = f" ... [cut: {len(value)} characters]"
    return value[: limit - len(mark)] + mark
