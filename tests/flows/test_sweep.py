"""Sweeps as Prefect runs them: a real server, real trainers, a model of 14 thousand parameters."""

import json
import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from flows.server.api import LocalServer
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import run_id
from rlcore.evaluation.result import ValidationResult, per_problem
from rlcore.evaluation.stats import Interval, paired_difference
from tests.flows.conftest import HELD, Api, Millrace, ended, journal, numbers, under, wait_until
from tests.flows.sweep_specs import SPECS, UNTRACKED
from tests.forked import ForkedCommand

SERIES_WAIT_S = 840.0
"""About thirty runs; a minute and a half on two idle cores."""
TRACKED = "tracking.enabled=true"
pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Series:
    """The calls of `tests.flows.sweep_series`: what each returned, and its `sweep.json` at that moment."""

    root: Path
    server: LocalServer
    calls: dict[str, Any]

    def result(self, call: str) -> dict[str, Any]:
        found: dict[str, Any] = self.calls[call]["result"]
        return found

    def points(self, call: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.calls[call]["sweep"]["points"]
        return found


@pytest.fixture(scope="module")
def series(prefect_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Series:
    root = tmp_path_factory.mktemp("sweeps")
    environment = {**prefect_server.environment, "PREFECT_HOME": str(prefect_server.home)}
    process = ForkedCommand("tests.flows.sweep_series", [str(root)], os.environ | environment)
    try:
        _, errors = process.communicate(timeout=SERIES_WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return Series(root, prefect_server, json.loads((root / "series.json").read_text()))


def score(run: dict[str, Any], step: int, metric: str = "reward/mean@2") -> float:
    """A run's figure at a step, read from its journal by hand."""
    (found,) = [one["metrics"] for one in journal(Path(run["run_dir"])) if one["step"] == step]
    return float(found[f"val-core/countdown/{metric}"])


def mlflow_status_of_the_sweep(root: Path) -> str:
    """What MLflow says of the only sweep's own run."""
    query = "select status from runs join tags using (run_uuid) where key = 'millrace.sweep_id'"
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        ((found,),) = database.execute(query).fetchall()
    return str(found)


def test_one_failed_child_does_not_end_a_sweep(series: Series) -> None:
    result, points = series.result("grid"), series.points("grid")
    assert (result["num_points"], result["num_finished"], result["num_runs"]) == (2, 1, 4)
    assert [point["state"] for point in points] == ["failed", "finished"]
    assert [run["state"] for point in points for run in point["runs"]].count("failed") == 1
    failed = points[0]["runs"][1]
    assert (failed["seed"], failed["state"]) == (2, "failed")
    assert "validation" in failed["error"]
    assert points[0]["runs"][0]["state"] == "done", "the other seed of the point was run"
    assert len(result["failed"]) == 1


def test_stages_of_children_are_tasks_with_their_names(series: Series) -> None:
    api = Api(series.server.url, series.server.login)
    named = {"name": {"any_": ["sweep/grid"]}}
    first, again = api.filter("flow_runs", flow_runs=named, sort="START_TIME_ASC")
    assert (first["state_type"], again["state_type"]) == ("COMPLETED", "COMPLETED")
    chunks = {}
    for run in (first, again):
        tasks = api.filter("task_runs", flow_runs={"id": {"any_": [run["id"]]}})
        chunks[run["id"]] = {task["name"]: task["state_type"] for task in tasks if task["name"].startswith("train/")}
    names = [f"train/debug optim.lr={lr} seed={seed} step 0-1" for lr in ("0.0003", "1.0") for seed in (1, 2)]
    assert chunks[first["id"]].items() <= dict.fromkeys(names, "COMPLETED").items()
    assert len(chunks[first["id"]]) == 3, "one is refused before its first step"
    assert chunks[again["id"]] == {"train/debug optim.lr=0.0003 seed=2 step 0-1": "COMPLETED"}


def test_a_second_call_runs_the_failed_child_alone(series: Series) -> None:
    result, points = series.result("grid again"), series.points("grid again")
    assert (result["num_finished"], result["num_runs"], result["num_steps"]) == (2, 1, 1)
    assert result["failed"] == []
    runs = [run for point in points for run in point["runs"]]
    # The child that failed was refused before its trainer began; no other one was begun twice.
    assert [len(list((Path(run["run_dir"]) / "logs").iterdir())) for run in runs] == [1] * len(runs)


def test_a_points_score_is_the_mean_over_its_seeds_and_the_comparison_says_the_same(series: Series) -> None:
    points = series.points("grid again")
    for point in points:
        assert point["score"] == pytest.approx(fmean(score(run, 1) for run in point["runs"]))
    result = series.result("grid again")
    best = max(points, key=lambda point: (point["score"], -point["point"]))
    assert (result["best_point"], result["best_score"]) == (best["point"], best["score"])
    assert best["settings"]["optim.lr"] == 3e-4
    assert min(point["score"] for point in points) < best["score"], "the scores tell the points apart"
    tables = json.loads(Path(result["comparison"]).with_suffix(".json").read_text())["tables"]
    assert len(tables["runs"]["rows"]) == 4
    columns = tables["seeds"]["columns"]
    found = [dict(zip(columns, row, strict=True)) for row in tables["seeds"]["rows"]]
    means = [row for row in found if row["Figure"] == "reward/mean@2"]
    assert [row["Seeds"] for row in means] == [2] * 2
    told = [row["Mean"]["value"] if isinstance(row["Mean"], dict) else row["Mean"] for row in means]
    assert sorted(told) == pytest.approx(sorted(point["score"] for point in points))


def test_the_best_points_file_is_the_experiment_that_was_run(series: Series) -> None:
    result, points = series.result("grid again"), series.points("grid again")
    file = Path(result["best_experiment"])
    best = points[result["best_point"] - 1]
    config = load_config([f"experiment={file}"])
    assert run_id(config) == best["runs"][0]["run_id"]
    assert config.optim.lr == best["settings"]["optim.lr"]
    dry = Millrace(series.root, {})("run", f"experiment={file}", "--dry-run", *UNTRACKED)
    assert dry.code == 0, dry.err
    assert "committed step 1 of 1" in dry.out


def test_the_table_is_in_prefect(series: Series) -> None:
    api, key = Api(series.server.url, series.server.login), f"{series.result('grid')['sweep_id']}-sweep"
    found = api.filter("artifacts", artifacts={"key": {"any_": [key]}})  # it gives 200
    rows = json.loads(found[-1]["data"])
    assert len(rows) == 2
    assert {"point", "optim.lr", "reward/mean@2", "state", "step", "seed 1", "seed 2"} == set(rows[0])


def test_a_run_that_another_sweep_has_finished_is_not_run_again(series: Series) -> None:
    result, points = series.result("list"), series.points("list")
    assert (result["num_finished"], result["num_runs"]) == (2, 0)
    for point in points:
        assert point["score"] == pytest.approx(fmean(score(run, 1, "reward/greedy") for run in point["runs"]))
    assert result["best_score"] == min(point["score"] for point in points), "the sweep minimizes"


def test_a_budget_ends_a_call_and_the_next_one_goes_on(series: Series) -> None:
    first, then = series.result("random, one run"), series.result("random")
    assert (first["num_runs"], first["num_finished"], first["num_not_begun"]) == (1, 1, 1)
    assert first["ended_by"] == "1 runs"
    assert (then["num_runs"], then["num_finished"], then["ended_by"]) == (1, 2, "")
    assert first["sweep_id"] == then["sweep_id"]
    settings = [point["settings"] for point in series.points("random")]
    assert all(1e-4 <= one["optim.lr"] <= 1e-2 for one in settings)
    assert all(one["rollout.samples_per_prompt"] in (2, 4, 6, 8) for one in settings)
    assert settings[0] != settings[1]


def test_points_that_the_best_one_beats_are_not_trained_further(series: Series) -> None:
    points = series.points("paired")
    assert series.calls["paired"]["sweep"]["rungs"] == [1, 2]
    assert {point["state"] for point in points} == {"finished", "stopped early"}
    live = list(points)
    for step in (1, 2):
        assert {point["scores"][str(step)] for point in live} == {score(point["runs"][0], step) for point in live}
        dropped = [point for point in live if point["runs"][0]["step"] == step and step < 2]
        best = max(live, key=lambda point: (score(point["runs"][0], step), -point["point"]))
        for point in dropped:
            assert point["state"] == "stopped early"
            lead = paired_lead(best["runs"][0], point["runs"][0], step)
            assert lead.low > 0, "the interval of its difference to the best one excludes 0"
        live = [point for point in live if point not in dropped]
    assert series.result("paired")["num_steps"] == sum(point["runs"][0]["step"] for point in points)


def paired_lead(best: dict[str, Any], other: dict[str, Any], step: int) -> Interval:
    """Of two runs' answers to the same problems."""
    name = f"step-{step:06d}.json"
    results = [ValidationResult.read(Path(run["run_dir"]) / "validation" / name) for run in (other, best)]
    values = [per_problem(result.problems)["reward/mean@2"] for result in results]
    return paired_difference(*values, confidence=0.5).difference


def test_optuna_prunes_and_a_second_call_goes_on_with_its_study(series: Series) -> None:
    first, points = series.points("optuna, three runs"), series.points("optuna")
    assert series.result("optuna, three runs")["ended_by"] == "3 runs"
    assert [series.result("optuna, three runs")[name] for name in ("num_points", "num_not_begun")] == [6, 3]
    assert [point["point"] for point in points] == [1, 2, 3, 4, 5, 6]
    begun = [point for point in first if point["state"] != "not begun"]
    assert len(begun) == 3
    assert [point["settings"] for point in points[: len(first)]] == [point["settings"] for point in first]
    assert series.result("optuna")["num_runs"] == 3
    states = [point["state"] for point in points]
    assert set(states) == {"finished", "stopped early"}
    for number, point in enumerate(points):
        run = point["runs"][0]
        pruned = point["state"] == "stopped early"
        assert run["step"] == (1 if pruned else 2)
        assert run["score"] == point["score"] == score(run, run["step"])
        if pruned:
            before = [score(other["runs"][0], 1) for other in points[:number]]
            assert score(run, 1) < median(before)
    assert series.result("optuna")["best_score"] == max(
        point["score"] for point in points if point["state"] == "finished"
    )


def test_a_trainer_that_serves_one_run_after_the_other_gives_the_same_numbers(series: Series) -> None:
    """Point 2's first run began in a new trainer, since the one before had failed; `alone` had one that had served."""
    first = Path(series.points("grid")[1]["runs"][0]["run_dir"])
    again = Path(series.points("alone")[0]["runs"][0]["run_dir"])
    assert first != again
    assert numbers(first) == numbers(again)
    assert len(numbers(first)) == 2


def test_children_are_nested_in_mlflow(series: Series) -> None:
    assert series.result("tracked")["num_runs"] == 2
    with sqlite3.connect(series.root / "mlflow.db") as database:
        rows = database.execute("select run_uuid, key, value from tags").fetchall()
        metrics = database.execute("select run_uuid, key, value from metrics").fetchall()
        status = dict(database.execute("select run_uuid, status from runs").fetchall())
    database.close()
    sweeps = {value.rpartition("-")[0]: run for run, key, value in rows if key == "millrace.sweep_id"}
    assert "best.yaml" in series.calls["spoiled"]
    assert status[sweeps["spoiled"]] == "FAILED", "it could not write its best settings"
    parent = sweeps["tracked"]
    assert (parent, status[parent]) == (series.result("tracked")["mlflow_run_id"], "FINISHED")
    own = {value: run for run, key, value in rows if key == "millrace.run_id" and "warm-start" not in value}
    assert own.keys() == {run["run_id"] for point in series.points("tracked") for run in point["runs"]}
    above = {run: value for run, key, value in rows if key == "mlflow.parentRunId"}
    assert {above[run] for run in own.values()} == {parent}
    assert len([1 for run, key, _ in metrics if run == parent and key == "sweep/reward/mean_at_2"]) == 2


# ---------------------------------------------------------------------- told to stop


def held_sweep(millrace: Millrace, *settings: str) -> "tuple[subprocess.Popen[str], Path]":
    """A sweep of two points whose second run stays in its first update until it is told to stop; and its spec."""
    spec, held = millrace.root / "stopped.yaml", millrace.root / "held"
    spec.write_text(SPECS["stopped"])
    hold = {"HOLD_PHASE": "update_actor", "HOLD_AFTER": "2", "HOLD_FILE": str(held), "PYTHONPATH": str(HELD)}
    process = Millrace(millrace.root, {**millrace.environment, **hold}).start("sweep", str(spec), *settings)
    wait_until(lambda: held.exists() or process.poll() is not None, "the second run is in its first update")
    assert process.poll() is None, process.communicate()
    return process, spec


def sweep_record(root: Path) -> dict[str, Any]:
    """The stopped sweep's `sweep.json`."""
    (file,) = root.glob("sweeps/stopped-*/sweep.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def assert_only_the_second_run_goes_on(millrace: Millrace, spec: Path, *settings: str) -> None:
    """What was saved is step 1 of 2; the same command trains step 2 and nothing else."""
    saved = sorted(path.parts[-3:] for path in millrace.root.glob("runs/stopped-*/checkpoints/step-*"))
    assert sorted(step for *_, step in saved) == ["step-000001", "step-000001", "step-000002"]
    again = millrace("sweep", str(spec), *settings)
    assert again.code == 0, again.err
    assert "2 of 2 points finished, 1 runs worked on, 1 steps" in again.out
    assert [point["state"] for point in sweep_record(millrace.root)["points"]] == ["finished", "finished"]


def test_an_interrupted_sweep_has_saved_its_run_and_the_same_command_goes_on(series: Series) -> None:
    millrace = under(series.server, series.root)  # it has data and start model
    process, spec = held_sweep(millrace, *UNTRACKED)
    process.send_signal(signal.SIGINT)
    stopped = ended(process)
    assert stopped.code == 75, stopped.err
    assert "Traceback" not in stopped.err
    api = Api(series.server.url, series.server.login)
    (run,) = api.filter("flow_runs", flow_runs={"name": {"any_": ["sweep/stopped"]}}, sort="START_TIME_DESC", limit=1)
    tasks = api.filter("task_runs", flow_runs={"id": {"any_": [run["id"]]}})
    assert run["state_type"] == "CANCELLED"
    assert sorted(task["state_type"] for task in tasks if task["name"].startswith("train/"))[:2] == [
        "CANCELLED",
        "COMPLETED",
    ]
    assert_only_the_second_run_goes_on(millrace, spec, *UNTRACKED)


@pytest.mark.lengthy
def test_a_cancellation_reaches_a_sweep_that_no_worker_has_started(
    prefect_server: LocalServer, artifacts_root: Path
) -> None:
    millrace, api = under(prefect_server, artifacts_root), Api(prefect_server.url, prefect_server.login)
    process, spec = held_sweep(millrace, TRACKED)
    named = {"name": {"any_": ["sweep/stopped"]}, "state": {"type": {"any_": ["RUNNING"]}}}
    (run,) = api.filter("flow_runs", flow_runs=named)
    api.post(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    stopped = ended(process)
    assert stopped.code == 75, stopped.err
    (run,) = api.filter("flow_runs", flow_runs={"id": {"any_": [run["id"]]}})
    tasks = api.filter("task_runs", flow_runs={"id": {"any_": [run["id"]]}})
    assert run["state_type"] == "CANCELLED"
    assert sorted(task["state_type"] for task in tasks if task["name"].startswith("train/"))[:2] == [
        "CANCELLED",
        "COMPLETED",
    ]
    assert mlflow_status_of_the_sweep(millrace.root) == "KILLED"
    assert_only_the_second_run_goes_on(millrace, spec, TRACKED)
    assert mlflow_status_of_the_sweep(millrace.root) == "FINISHED"


def test_a_mistake_is_told_before_anything_is_written(bare: Millrace, tmp_path: Path) -> None:
    spec = tmp_path / "wrong.yaml"
    spec.write_text("name: wrong\nexperiment: debug\ngrid: {optim.lrr: [1], paths.root: [a]}\nseeds: [1, 1]\n")
    done = bare("sweep", str(spec), f"paths.root={bare.root}")
    assert done.code == 2
    assert "Did you mean optim.lr?" in done.err
    assert "grid.paths.root: cannot be swept" in done.err
    assert "seeds: must differ" in done.err
    assert list(bare.root.iterdir()) == []


def test_a_dry_run_shows_every_run_and_writes_nothing(bare: Millrace) -> None:
    in_vain = ("reward.deadline_s=3", "algo.kl.coef=0.001")
    done = bare("sweep", "debug_grid", *in_vain, f"paths.root={bare.root}", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert [line.split()[1].partition("=")[0] for line in done.err.splitlines()] == [
        "algo.kl.coef",
        "reward.deadline_s",
    ]
    plan = json.loads(done.out)
    assert len(plan["runs"]) == len({run["run_id"] for run in plan["runs"]}) == 8
    assert list(bare.root.iterdir()) == []
