"""Sweeps with a real Prefect server and real trainers of a small model."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from flows.server.api import LocalServer
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import run_id
from tests.flows.conftest import HELD, Api, Finished, Millrace, ended, mlflow_rows, under, wait_until
from tests.helpers.sweeps import UNTRACKED, in_the_way, points_of, score_of, spec_of

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Twice:
    """A grid of two points with two seeds, one of whose runs fails, and a second call after the repair.

    The points of each call are those in `sweep.json` afterwards, by number.
    """

    millrace: Millrace
    api: Api
    first: Finished
    first_points: list[dict[str, Any]]
    again: Finished
    points: list[dict[str, Any]]

    @property
    def folder(self) -> Path:
        (folder,) = self.millrace.root.glob("sweeps/grid-*")
        return folder


@pytest.fixture(scope="module")
def twice(prefect_server: LocalServer, tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Twice:
    root = tmp_path_factory.mktemp("sweeps")
    (root / "mlflow.db").write_bytes(empty_store.read_bytes())
    millrace, spec = under(prefect_server, root), spec_of(root, "grid")

    def call() -> tuple[Finished, list[dict[str, Any]]]:
        return millrace("sweep", str(spec), "reward.num_processes=2"), points_of(root, "grid")

    obstacle = in_the_way(spec, root)
    first = call()
    obstacle.unlink()
    return Twice(millrace, Api(prefect_server.url, prefect_server.login), *first, *call())


def test_failed_run_does_not_end_a_sweep(twice):
    first, points = twice.first, twice.first_points
    assert first.code == 1, first.err
    assert "1 of 2 points finished, 1 failed, 4 runs worked on, 3 steps" in first.out
    assert [point["state"] for point in points] == ["failed", "finished"]
    good, bad = points[0]["runs"]
    assert "validation" in bad["error"]
    assert (good["error"], good["step"]) == ("", 1)


def test_prefect_has_a_named_task_for_each_run_and_a_description(twice):
    named = {"name": {"any_": [twice.folder.name]}}
    first, again = twice.api.filter("flow_runs", flow_runs=named, sort="START_TIME_ASC")
    assert {"grid", "sweep"} <= {*again["tags"]}
    assert again["state"]["message"].startswith("2 of 2 points finished, 1 runs worked on, 1 steps\nbest: point ")
    assert (first["state_type"], again["state_type"]) == ("COMPLETED", "COMPLETED")
    of_first, of_again = (
        {task["name"]: task["state_type"] for task in twice.api.filter("task_runs", flow_runs={"id": {"any_": [one]}})}
        for one in (first["id"], again["id"])
    )
    runs = [f"{lr} seed={seed}" for lr, seed in (("0.0003", 1), ("1.0", 1), ("1.0", 2))]
    assert of_first == dict.fromkeys((f"train debug optim.lr={run} to step 1" for run in runs), "COMPLETED")
    assert of_again == {"train debug optim.lr=0.0003 seed=2 to step 1": "COMPLETED"}
    key = f"{twice.folder.name}-sweep"
    found = [one["data"] for one in twice.api.filter("artifacts", artifacts={"key": {"any_": [key]}})]
    (last,) = [text for text in found if "2 of 2 points finished" in text]
    assert "| 1 | `optim.lr=0.0003` | finished | 1 |" in last


def test_second_call_trains_only_the_failed_run(twice):
    assert twice.again.code == 0, twice.again.err
    assert "2 of 2 points finished, 1 runs worked on, 1 steps" in twice.again.out
    runs = [run for point in twice.points for run in point["runs"]]
    assert [len(list((Path(run["run_dir"]) / "logs").iterdir())) for run in runs] == [1] * 4


def test_scores_are_means_and_match_the_comparison(twice):
    points = twice.points
    for point in points:
        assert point["score"] == pytest.approx(fmean(score_of(run, 1) for run in point["runs"]))
    best = max(points, key=lambda point: (point["score"], -point["point"]))
    assert best["settings"]["optim.lr"] == 3e-4
    assert min(point["score"] for point in points) < best["score"]
    assert f"best: point {best['point']}, optim.lr=0.0003: {best['score']:.4g}" in twice.again.out
    tables = json.loads((twice.folder / "comparison" / "comparison.json").read_text())["tables"]
    assert len(tables["runs"]["rows"]) == 4
    columns = tables["seeds"]["columns"]
    found = [dict(zip(columns, row, strict=True)) for row in tables["seeds"]["rows"]]
    means = [row for row in found if row["Metric"] == "reward/mean_at_2"]
    assert [row["Seeds"] for row in means] == [2] * 2
    message = [row["Mean"]["value"] if isinstance(row["Mean"], dict) else row["Mean"] for row in means]
    assert sorted(message) == pytest.approx(sorted(point["score"] for point in points))


def test_best_file_is_the_experiment_of_the_best_run(twice):
    file, best = twice.folder / "best.yaml", twice.points[0]
    config = load_config([f"experiment={file}"])
    assert run_id(config) == best["runs"][0]["run_id"]
    assert config.optim.lr == best["settings"]["optim.lr"]
    dry = twice.millrace("run", f"experiment={file}", "--dry-run", *UNTRACKED, code=0)
    assert "committed step 1 of 1" in dry.out


def test_runs_are_nested_in_mlflow(twice):
    root = twice.millrace.root
    rows = mlflow_rows(root, "select run_uuid, key, value from tags")
    (parent,) = [run for run, key, _ in rows if key == "millrace.sweep_id"]
    assert dict(mlflow_rows(root, "select run_uuid, status from runs"))[parent] == "FINISHED"
    own = {value: run for run, key, value in rows if key == "millrace.run_id" and "warm-start" not in value}
    assert own.keys() == {run["run_id"] for point in twice.points for run in point["runs"]}
    above = {run: value for run, key, value in rows if key == "mlflow.parentRunId"}
    assert {above[run] for run in own.values()} == {parent}
    warm = {run for run, key, value in rows if key == "millrace.run_id" and "warm-start" in value}
    assert warm
    assert {above.get(run) for run in warm} <= set(own.values()), "a warm start is below the run that trained it"
    sent = {key for run, key in mlflow_rows(root, "select run_uuid, key from metrics") if run == parent}
    assert sent >= {"sweep/reward/mean_at_2", "best/reward/mean_at_2"}


def test_stopped_sweep_saves_and_same_command_resumes(twice):
    """Its second run waits in its first update for the stop."""
    millrace, api, held = twice.millrace, twice.api, twice.millrace.root / "held"
    command = ("sweep", str(spec_of(millrace.root, "stopped")), "tracking.enabled=true")
    hold = {"HOLD_PHASE": "update_actor", "HOLD_AFTER": "2", "HOLD_FILE": str(held), "PYTHONPATH": str(HELD)}
    process = Millrace(millrace.root, {**millrace.environment, **hold}).start(*command)
    wait_until(lambda: held.exists() or process.poll() is not None, "the second run is in its first update")
    assert process.poll() is None, process.communicate()
    named = {"tags": {"all_": ["stopped"]}, "state": {"type": {"any_": ["RUNNING"]}}}
    (run,) = api.filter("flow_runs", flow_runs=named)
    process.send_signal(signal.SIGINT)
    stopped = ended(process, 75)
    assert "Traceback" not in stopped.err
    (run,) = api.filter("flow_runs", flow_runs={"id": {"any_": [run["id"]]}})
    tasks = api.filter("task_runs", flow_runs={"id": {"any_": [run["id"]]}})
    states = sorted(task["state_type"] for task in tasks if task["name"].startswith("train "))
    assert (run["state_type"], states[:2]) == ("CANCELLED", ["CANCELLED", "COMPLETED"])
    of_it = "key = 'millrace.sweep_id' and value like 'stopped%'"
    status = f"select status from runs join tags using (run_uuid) where {of_it}"
    assert mlflow_rows(millrace.root, status) == [("KILLED",)]
    saved = sorted(path.name for path in millrace.root.glob("runs/stopped-*/checkpoints/step-*"))
    assert saved == ["step-000001", "step-000001", "step-000002"]
    again = millrace(*command, code=0)
    assert "2 of 2 points finished, 1 runs worked on, 1 steps" in again.out
    assert [point["state"] for point in points_of(millrace.root, "stopped")] == ["finished", "finished"]
    assert mlflow_rows(millrace.root, status) == [("FINISHED",)]
