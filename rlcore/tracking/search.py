"""Which runs a search in MLflow finds, as people write it on MLflow's own page; and the page that compares runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlcore.errors import TrackingError
from rlcore.tracking.failures import explain
from rlcore.tracking.lineage import RUN_ID_TAG
from rlcore.tracking.state import read_state
from rlcore.tracking.store import LOCAL_UI, TRAINING_VIEW, MlflowStore

MOST_RUNS = 1_000


def search_run_ids(store: MlflowStore, query: str) -> list[str]:
    """The run ids (names of folders) of the experiment's own runs that a query finds, oldest first.

    Args:
        store: where to search.
        query: in MLflow's language, such as ``params.`optim.lr` = '0.001' and tags.task = 'countdown'``.

    Raises:
        TrackingError: MLflow does not take the query, or does not answer.
    """
    own = f"tags.`{RUN_ID_TAG}` != ''"
    try:
        runs = store.client.search_runs(
            [store.ensure_experiment()],
            f"{query} and {own}" if query else own,
            max_results=MOST_RUNS,
            order_by=["attributes.start_time ASC"],
        )
    except Exception as error:
        raise TrackingError(
            f"search {query!r}: MLflow does not take it: {explain(error, store.uri)}. A query reads like "
            "\"params.`optim.lr` = '0.001' and tags.task = 'countdown'\"."
        ) from error
    return list(dict.fromkeys(run.data.tags[RUN_ID_TAG] for run in runs))


def compare_url(store: MlflowStore, mlflow_run_ids: Sequence[str], ui: str = LOCAL_UI) -> str:
    """MLflow's page that compares runs. On sqlite it is the page under `ui`, where `millrace ui` serves it."""
    runs = quote(json.dumps(list(mlflow_run_ids)))
    experiments = quote(json.dumps([store.ensure_experiment()]))
    return f"{store.page_root(ui)}/#/compare-runs?runs={runs}&experiments={experiments}&{TRAINING_VIEW}"


def known_mlflow_run(run_dir: Path) -> str | None:
    """The MLflow id of a run by its folder; None where nothing was delivered yet. Does not ask MLflow."""
    return read_state(run_dir).mlflow_run_id
