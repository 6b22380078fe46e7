"""Results of a sweep: best settings, comparison, MLflow run."""

import json
from pathlib import Path

import pytest
from optuna.trial import TrialState
from prefect.logging import disable_run_logger

from flows.progress import display_for_console, use_display
from flows.sweep import result
from flows.sweep.study import ERROR, POINT, RUNS, SETTINGS, BudgetTracker, SweepStudy, members_of
from rlcore.config.sweep import Sweep, load_sweep
from rlcore.tracking.mlflow_store import NOTE_TAG, MlflowStore
from tests.helpers.mlflow import server as server
from tests.helpers.reports import write_run

pytestmark = [pytest.mark.slow]
RATES = "grid: {optim.lr: [1e-4, 2e-4, 3e-4]}\n"


def load(root: Path, *overrides: str, text: str = RATES) -> Sweep:
    (root / "rates.yaml").write_text(f"name: rates\nexperiment: debug\n{text}")
    return load_sweep(str(root / "rates.yaml"), [f"paths.root={root}", *overrides])


def with_scores(sweep: Sweep, *scores: float | None) -> SweepStudy:
    """Return the sweep's study with a point for each score; None is a failed one."""
    study = SweepStudy(sweep)
    for score in scores:
        trial = study.ask()
        members, _ = members_of(sweep, trial.user_attrs[SETTINGS])
        for member in members:
            member.step, member.score = 2, score
        trial.set_user_attr(RUNS, [member.to_json() for member in members])
        if score is None:
            trial.set_user_attr(ERROR, f"point {trial.user_attrs[POINT]} is broken")
            study.optuna.tell(trial, state=TrialState.FAIL)
        else:
            trial.report(score, 2)
            study.optuna.tell(trial, score)
    return study


def written(sweep: Sweep, study: SweepStudy) -> result.SweepResult:
    return result.write_result(sweep, study.points(), BudgetTracker(study, "call").read())


def test_summary_counts_points_and_names_the_best(tmp_path):
    sweep = load(tmp_path, text="grid: {optim.lr: [1e-4, 2e-4, 3e-4, 4e-4]}\n")
    done = written(sweep, with_scores(sweep, 0.1, 0.3, 0.3))
    assert result.summary_lines(done) == [
        "3 of 4 points finished, 1 not finished, 0 runs worked on, 0 steps",
        "best: point 2, optim.lr=0.0002: 0.3; equal to point 3",
        f"best settings: {sweep.folder / 'best.yaml'}",
    ]
    assert done.comparison is None


@pytest.mark.parametrize(("direction", "order"), [("maximize", [2, 1, 4, 3]), ("minimize", [1, 4, 2, 3])])
def test_best_point_is_first(tmp_path, direction, order):
    text = f"objective: {{direction: {direction}}}\ngrid: {{optim.lr: [1e-4, 2e-4, 3e-4, 4e-4]}}\n"
    sweep = load(tmp_path, text=text)
    rows = result.rows_of(sweep, with_scores(sweep, 0.1, 0.3, None, 0.1).points())
    assert [row["point"] for row in rows] == order
    assert [row["error"] for row in rows] == ["", "", "", "point 3 is broken"]


def test_comparison_has_existing_runs(tmp_path):
    sweep = load(tmp_path)
    rows = result.rows_of(sweep, with_scores(sweep, 0.1, 0.2, 0.3).points())
    one, two, three = (Path(row["runs"][0]["run_dir"]) for row in rows)
    write_run(one, num_steps=2)
    assert result.write_comparison(sweep, rows) is None
    write_run(three, num_steps=2, seed=2)
    page = result.write_comparison(sweep, rows)
    compared = json.loads(page.with_suffix(".json").read_text())["tables"]["runs"]["rows"]
    assert [row[0] for row in compared] == [one.name, three.name]
    assert not two.exists()


def test_mlflow_run_has_scores_files_and_description(server, tmp_path, capsys):
    sweep = load(tmp_path, f"tracking.uri={server.uri!r}")
    store = MlflowStore(sweep.base.tracking, tmp_path)
    study = with_scores(sweep, 0.1, 0.2, 0.3)
    with disable_run_logger(), use_display(display_for_console()):
        own = result.start_mlflow_run(sweep)
        done = written(sweep, study)
        result.finish_mlflow_run(sweep, own, done, result.describe_sweep(sweep, done))
    run = store.client.get_run(own)
    assert run.info.status == "FINISHED"
    assert f"in MLflow: {server.uri}/#/" in capsys.readouterr().out
    text = run.data.tags[NOTE_TAG]
    for words in ("Varies `optim.lr` of debug by grid", "Maximizes reward/mean_at_2", "3 of 3 points finished"):
        assert words in text
    rows = [line for line in text.splitlines() if "| finished |" in line]
    assert [row.split("|")[1].strip() for row in rows] == ["3", "2", "1"]
    assert {file.path for file in store.client.list_artifacts(own, "sweep")} == {"sweep/sweep.json", "sweep/best.yaml"}
    history = store.client.get_metric_history(own, "sweep/reward/mean_at_2")
    assert {one.step: one.value for one in history} == {1: 0.1, 2: 0.2, 3: 0.3}
    with disable_run_logger():
        assert result.start_mlflow_run(sweep) == own
        assert store.client.get_run(own).info.status == "RUNNING"
        with pytest.raises(OSError, match="full"), result.end_mlflow_run_on_error(sweep, own):
            raise OSError("full")
    assert store.client.get_run(own).info.status == "FAILED"
