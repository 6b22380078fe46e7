"""What a test reads from MLflow, and the delivery to it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from rlcore.tracking.delivery import Delivery, delivery_lock
from rlcore.tracking.journal import read_journal


@contextmanager
def delivery_of(run_dir: Path) -> Iterator[Delivery]:
    """The delivery of a run."""
    with delivery_lock(run_dir):
        yield Delivery(run_dir)


def client_of(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root}/mlflow.db")


def all_runs(client: MlflowClient, experiment: str = "millrace") -> list[Run]:
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id], order_by=["start_time ASC"]))


def main_runs(client: MlflowClient, run_id: str = "run-1") -> list[Run]:
    return [run for run in all_runs(client) if run.data.tags.get("millrace.run_id") == run_id]


def main_run(client: MlflowClient, run_id: str = "run-1") -> Run:
    (run,) = main_runs(client, run_id)
    return run


def points(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    """Every (step, value) that the store holds of a metric, doubles included, by step."""
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))


def shown(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    """The last value of each step: what MLflow shows of a metric."""
    history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda metric: metric.timestamp)
    return sorted({metric.step: metric.value for metric in history}.items())


def journal_points(path: Path, name: str) -> list[tuple[int, float]]:
    return [(record.step, record.metrics[name]) for record in read_journal(path) if name in record.metrics]


def values(step: int, num_metrics: int = 5) -> Mapping[str, float]:
    """Numbers that a float64 must carry exactly to come back equal."""
    return {f"test/m{i}": step + (i + 1) / 7 for i in range(num_metrics)}
