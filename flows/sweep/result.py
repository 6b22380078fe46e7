"""The results of a sweep: `sweep.json`, comparison, best experiment, description and MLflow run.

Errors of MLflow are only logged.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from prefect.logging import get_run_logger

from flows.artifacts import log_and_print
from flows.commands.tracking import reachable_urls
from flows.sweep.study import ERROR, RUNS, SETTINGS, members_of
from rlcore.config.documents import experiment_text
from rlcore.config.problems import override_value
from rlcore.config.sweep import Sweep, format_point
from rlcore.errors import is_stop
from rlcore.score import HELD_OUT_REWARD
from rlcore.storage.publish import write_json_atomically, write_text_atomically
from rlcore.tracking.journal import GPU_SECONDS, JOURNAL_FILE, gpu_seconds
from rlcore.tracking.mlflow_store import NOTE_TAG, MlflowStore

FORMAT_VERSION = 2
SWEEP_FILE = "sweep.json"
BEST_FILE = "best.yaml"
PARENT_FILE = "mlflow.json"  # file in the sweep's folder with the id of its MLflow run
MIN_RUNS_TO_COMPARE = 2
MAX_ROWS_SHOWN = 20  # largest number of points, the best ones, in the description of a sweep
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped early", TrialState.FAIL: "failed"}
"""The names of the states of points that have ended. All other points are `to do`."""
Points = Mapping[int, FrozenTrial]  # points of a sweep by number, see `flows.sweep.study.points_of`
Row = dict[str, Any]
"""A point in `sweep.json`: `point` (number), `settings`, `label`, `state`, `score`, `scores`, `error`, `runs`."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep. The best point is the first of `points`.

    `num_runs` and `num_steps` count only the work of this call.
    """

    points: list[Row]
    num_points: int
    ended_by: str
    num_runs: int
    num_steps: int
    best_experiment: Path | None
    comparison: Path | None

    @property
    def best(self) -> Row | None:
        """The finished point with the best score, or None if no point is finished. The lowest number wins a tie."""
        return self.points[0] if self.points and self.points[0]["state"] == "finished" else None

    @property
    def failed(self) -> list[str]:
        """A message for each failed point, with its number, settings and error."""
        return [f"point {one['point']}, {one['label']}: {one['error']}" for one in self.points if one["error"]]


def rows_of(sweep: Sweep, points: Points) -> list[Row]:
    """Return a row for each point, sorted by state (finished first), then by score (best first), then by number."""
    rows = [
        {"point": number, "settings": trial.user_attrs[SETTINGS], "label": format_point(trial.user_attrs[SETTINGS]),
         "state": STATES.get(trial.state, "to do"), "score": trial.value,
         "scores": {str(step): score for step, score in trial.intermediate_values.items()},
         "error": trial.user_attrs.get(ERROR, ""), "runs": trial.user_attrs.get(RUNS, [])}
        for number, trial in points.items()
    ]  # fmt: skip
    sign = -1.0 if sweep.spec.objective.direction == "maximize" else 1.0
    return sorted(rows, key=lambda row: (row["state"] != "finished", row["score"] is None, sign * (row["score"] or 0)))


def write_record(sweep: Sweep, points: Points) -> list[Row]:
    """Replace `sweep.json` atomically, and return its points."""
    rows = rows_of(sweep, points)
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "sweep_id": sweep.sweep_id,
        "metric": sweep.metric_of(sweep.base),
        "points": rows,
        "spec": sweep.spec.model_dump(mode="json", exclude_none=True),
        "overrides": list(sweep.overrides),
    }
    write_json_atomically(sweep.folder / SWEEP_FILE, document)
    return rows


def write_result(sweep: Sweep, points: Points, spending: Mapping[str, Any]) -> SweepResult:
    """Write the results of a sweep to disk and return them. `spending` is what this call has used of the budget."""
    rows = write_record(sweep, points)
    return SweepResult(
        points=rows,
        num_points=max(len(rows), sweep.num_points),
        ended_by=spending["ended_by"],
        num_runs=len(spending["runs"]),
        num_steps=spending["steps"],
        best_experiment=write_best(sweep, rows),
        comparison=write_comparison(sweep, rows),
    )


def write_best(sweep: Sweep, rows: list[Row]) -> Path | None:
    """Write an experiment file with the settings of the best point and its first seed.

    Return the file, or None if no point is finished.
    """
    if not rows or rows[0]["state"] != "finished":
        return None
    best, file = rows[0], sweep.folder / BEST_FILE
    config = members_of(sweep, best["settings"])[0][0].config
    experiment, root = (override_value(str(path)) for path in (file, sweep.folder.parent.parent))
    comment = (
        f"{join(['millrace', 'run', f'experiment={experiment}', f'paths.root={root}'])}\n"
        f"The best point of sweep {sweep.sweep_id}: {best['label']}\n"
        f"{sweep.metric_of(config)} {best['score']:.4g}, mean over seeds {', '.join(map(str, sweep.spec.seeds))}."
    )
    write_text_atomically(file, experiment_text(config, comment))
    return file


def write_comparison(sweep: Sweep, rows: list[Row]) -> Path | None:
    """Compare all runs that have a score and are on disk, and write the comparison to files.

    Return the HTML file, or None if there are fewer than two such runs.
    """
    runs = [Path(run["run_dir"]) for row in rows for run in row["runs"] if run["score"] is not None]
    there = [run_dir for run_dir in dict.fromkeys(runs) if (run_dir / JOURNAL_FILE).is_file()]
    if len(there) < MIN_RUNS_TO_COMPARE:
        return None
    from rlcore.report.build import compare_runs

    return compare_runs(there, target=sweep.folder / "comparison").html


def summary_lines(result: SweepResult) -> list[str]:
    """Return the last lines that `millrace sweep` prints."""
    states = [row["state"] for row in result.points]
    left = result.num_points - sum(state != "to do" for state in states)
    others = {state: states.count(state) for state in ("stopped early", "failed")} | {"not finished": left}
    counts = [
        f"{states.count('finished')} of {result.num_points} points finished",
        *(f"{number} {state}" for state, number in others.items() if number),
        f"{result.num_runs} runs worked on, {result.num_steps} steps",
    ]
    lines = [", ".join(counts), *(f"failed: {text}" for text in result.failed)]
    if result.ended_by:
        lines.append(f"the budget is used up: {result.ended_by}; the same command resumes the sweep")
    if result.best is not None:
        number, label, score = (result.best[key] for key in ("point", "label", "score"))
        finished = [row for row in result.points[1:] if row["state"] == "finished"]
        ties = ", ".join(str(row["point"]) for row in finished if row["score"] == score)
        lines.append(f"best: point {number}, {label}: {score:.4g}{f'; equal to point {ties}' if ties else ''}")
        lines.append(f"best settings: {result.best_experiment}")
    if result.comparison is not None:
        lines.append(f"comparison: {result.comparison}")
    return lines


def describe_sweep(sweep: Sweep, result: SweepResult) -> str:
    """Return a Markdown text with the purpose, outcome and best points of a sweep."""
    spec, rows = sweep.spec, result.points[:MAX_ROWS_SHOWN]
    keys = ", ".join(f"`{key}`" for key in dict.fromkeys(key for row in rows for key in row["settings"]))
    seeds = "".join(f" seed {seed} |" for seed in spec.seeds)
    lines = [
        f"# Sweep {sweep.sweep_id}",
        "",
        f"- Varies {keys or '`seed`'} of {spec.experiment or 'the defaults'} by {', '.join(spec.searches) or 'seed'}",
        f"- {spec.objective.direction.capitalize()}s {sweep.metric_of(sweep.base)}, mean over seeds",
        *(f"- {line}" for line in summary_lines(result)),
        "",
        f"| point | settings | state | step | score |{seeds}",
        f"| --- | --- | --- | --- | --- |{' --- |' * len(spec.seeds)}",
    ]
    for row in rows:
        runs = "".join(f" {'failed' if run['error'] else _format_score(run['score'])} |" for run in row["runs"])
        step = max(map(int, row["scores"]), default=0)
        lines.append(
            f"| {row['point']} | `{row['label']}` | {row['state']} | {step} | {_format_score(row['score'])} |{runs}"
        )
    return "\n".join(lines)


def _format_score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"


@contextmanager
def _log_mlflow_failure(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        get_run_logger().warning("MLflow has not received %s: %s", what, error)


def start_mlflow_run(sweep: Sweep) -> str | None:
    """Create or reopen the sweep's MLflow run and return its id. Return None if tracking is off or MLflow fails."""
    if not sweep.base.tracking.enabled:
        return None
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    run, file, store = None, sweep.folder / PARENT_FILE, _store(sweep)
    with _log_mlflow_failure("the sweep, so its runs will not be grouped there"):
        if not file.is_file():
            tags = {"millrace.sweep_id": sweep.sweep_id, "stage": "sweep", "mlflow.source.name": "millrace"}
            write_json_atomically(file, {"run_id": store.create_run(sweep.sweep_id, tags)})
        recorded = str(json.loads(file.read_text())["run_id"])
        store.client.update_run(recorded, status="RUNNING")
        run = recorded
    return run


@contextmanager
def end_mlflow_run_on_error(sweep: Sweep, run: str | None) -> Iterator[None]:
    """End the sweep's MLflow run as killed or failed if the `with` block raises an error."""
    try:
        yield
    except BaseException as error:
        if run is not None:
            with _log_mlflow_failure("the end of the sweep"):
                _store(sweep).set_status(run, "KILLED" if is_stop(error) else "FAILED")
        raise


def finish_mlflow_run(sweep: Sweep, run: str | None, result: SweepResult, about: str) -> None:
    """Log a sweep's parameters, scores, files and description (`about`) to its MLflow run. Then end this MLflow run."""
    if run is None:
        return
    with _log_mlflow_failure("the results of the sweep"):
        store, metric = _store(sweep), sweep.metric_of(sweep.base)
        store.log_params(run, {"sweep": sweep.spec.model_dump(mode="json", exclude_none=True, exclude={"budget"})})
        for row in result.points:
            if row["score"] is not None:
                store.log_metrics(run, row["point"], {f"sweep/{metric}": row["score"]}, time.time())
        if result.best is not None:
            best = {f"best/{metric}": result.best["score"]}
            # the column of the saved view
            shown = {HELD_OUT_REWARD: result.best["score"]} if metric.startswith("reward/mean") else {}
            store.log_metrics(run, 0, best | shown, time.time())
        runs = {Path(one["run_dir"]) for row in result.points for one in row["runs"]}
        if costs := [cost for run_dir in runs if (cost := gpu_seconds(run_dir / JOURNAL_FILE)) is not None]:
            store.log_metrics(run, 0, {GPU_SECONDS: sum(costs)}, time.time())
        for file in (sweep.folder / SWEEP_FILE, result.best_experiment, result.comparison):
            if file is not None:
                store.client.log_artifact(run, str(file), "sweep")
        store.set_tags(run, {NOTE_TAG: about})
        store.set_status(run, "FAILED" if result.failed else "FINISHED")
        log_and_print(f"in MLflow: {reachable_urls(sweep.folder.parent.parent, store.run_url(run))[0]}")


def _store(sweep: Sweep) -> MlflowStore:
    return MlflowStore(sweep.base.tracking, sweep.folder.parent.parent)
