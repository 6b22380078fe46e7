"""What a sweep leaves: comparison, best point as an experiment, tables in Prefect, and a run in MLflow.

MLflow may be away: a sweep does not need it.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from prefect.logging import get_run_logger

from flows.artifacts import show
from flows.commands.tracking import reachable
from flows.parameters import MLFLOW_PAGE
from flows.sweep.record import SWEEP_FILE, PointRecord, sweep_directory
from flows.tasks import tell
from rlcore.config import RunConfig
from rlcore.config.documents import experiment_text
from rlcore.config.problems import override_value
from rlcore.config.sweep_load import Sweep
from rlcore.errors import is_stop
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.publish import write_json_atomically, write_text_atomically
from rlcore.tracking.cost import GPU_SECONDS, gpu_seconds
from rlcore.tracking.delivery import read_state
from rlcore.tracking.journal import JOURNAL_FILE, read_journal
from rlcore.tracking.mlflow_store import LOCAL_UI, NOTE_TAG, PARENT_TAG, MlflowStore, compare_url

BEST_FILE = "best.yaml"
FEWEST_TO_COMPARE = 2


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a call has come to. `num_runs` and `num_steps` are what it has worked on; the rest is of the whole sweep.
    `is_alike`: no finished point differs from another in any figure of its training."""

    sweep_id: str
    folder: Path
    num_points: int
    num_finished: int
    num_stopped_early: int
    failed: list[str]
    num_not_begun: int
    ended_by: str
    num_runs: int
    num_steps: int
    best_point: int | None
    best_label: str
    best_score: float | None
    best_experiment: Path | None
    comparison: Path | None
    mlflow_run_id: str | None
    is_alike: bool = False


LEARNED = ("actor/", "critic/", "val-core/", "response_length/")
"""Beginnings of the names of metrics that follow from settings and seed alone: two trainings that are equal in all of
them at every step are the same."""


def are_alike(points: Sequence[PointRecord]) -> bool:
    """Whether two points or more are finished, and their runs of a seed have the same metrics at every step."""
    finished = [point for point in points if point.state == "finished"]
    found = {repr([_learned(member.config) for member in point.members]) for point in finished}
    return len(finished) > 1 and len(found) == 1


def _learned(config: RunConfig) -> list[tuple[int, dict[str, float]]]:
    records = read_journal(RunLayout.of(config).journal)
    return [
        (record.step, {name: value for name, value in sorted(record.metrics.items()) if name.startswith(LEARNED)})
        for record in records
    ]


def write_best(folder: Path, sweep: Sweep, best: PointRecord, *, is_alike: bool) -> Path:
    """The best point with its first seed as an experiment's file. `is_alike`: of points without a difference."""
    file = folder / BEST_FILE
    metric = sweep.metric_of(best.members[0].config)
    experiment, root = (override_value(str(path)) for path in (file, folder.parent.parent))
    words = ["millrace", "run", f"experiment={experiment}", f"paths.root={root}"]
    comment = (
        f"{join(words)}\n"
        f"{'A' if is_alike else 'The best'} point of sweep {sweep.sweep_id}"
        f"{', whose points have all the same metrics' if is_alike else ''}: {best.label}\n"
        f"{metric} {best.score:.4g}, mean over seeds {', '.join(str(one.seed) for one in best.members)}."
    )
    write_text_atomically(file, experiment_text(best.members[0].config, comment))
    return file


def write_comparison(folder: Path, points: Sequence[PointRecord]) -> Path | None:
    """The report that compares all runs that are there and have come to a score; None where fewer than two have."""
    file = folder / "comparison" / "comparison.html"
    scored = [member for point in points for member in point.members if point.scores or member.score is not None]
    run_dirs = [one.run_dir for one in scored if RunLayout.of(one.config).run_json.is_file()]
    if len(run_dirs) < FEWEST_TO_COMPARE:
        return None
    if _is_current(file, run_dirs):
        return file
    from rlcore.report.build import compare_runs

    return compare_runs(run_dirs, target=file.parent).html


def _is_current(file: Path, run_dirs: Sequence[Path]) -> bool:
    """Whether a comparison is of these runs, and none of them has gone on since."""
    try:
        rows = parse_json(read_ordinary(file.with_suffix(".json")))["tables"]["runs"]["rows"]
        newest = max((run_dir / JOURNAL_FILE).stat().st_mtime_ns for run_dir in run_dirs)
        return [row[0] for row in rows] == [one.name for one in run_dirs] and file.stat().st_mtime_ns > newest
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False


def best_first(sweep: Sweep, points: Sequence[PointRecord]) -> list[PointRecord]:
    """Finished points before the others, and by their score."""
    sign = -1.0 if sweep.spec.objective.direction == "maximize" else 1.0
    return sorted(points, key=lambda one: (one.state != "finished", one.score is None, sign * (one.score or 0.0)))


def show_result(sweep: Sweep, points: Sequence[PointRecord], result: SweepResult) -> None:
    """In Prefect: a table with a row a point, best first, and where everything is."""
    metric = sweep.metric_of(sweep.base)
    rows = [
        {"point": point.number}
        | {key: str(value) for key, value in point.settings.items()}
        | {metric: point.score, "state": point.state, "step": max(member.step for member in point.members)}
        | {f"seed {member.seed}": member.score if not member.error else "failed" for member in point.members}
        for point in best_first(sweep, points)
    ]
    show(sweep.sweep_id, "sweep", f"{sweep.sweep_id}: its points by {metric}", lambda: json.dumps(rows), "table")
    lines = [f"# Sweep {result.sweep_id}", "", *(f"- {line}" for line in summary_of(result))]
    show(sweep.sweep_id, "sweep-summary", f"{sweep.sweep_id}: its outcome and files", lambda: "\n".join(lines))


def summary_of(result: SweepResult) -> list[str]:
    """The last lines of `millrace sweep`."""
    counts = [
        f"{result.num_finished} of {result.num_points} points finished",
        f"{result.num_stopped_early} stopped early" if result.num_stopped_early else "",
        f"{len(result.failed)} failed" if result.failed else "",
        f"{result.num_not_begun} not begun" if result.num_not_begun else "",
        f"{result.num_runs} runs worked on, {result.num_steps} steps",
    ]
    lines = [", ".join(text for text in counts if text)]
    lines += [f"failed: {text}" for text in result.failed]
    if result.ended_by:
        lines.append(f"the budget is used up: {result.ended_by}; the same command goes on")
    if result.best_score is not None:
        best = f"best: point {result.best_point}, {result.best_label}: {result.best_score:.4g}"
        if result.is_alike:
            best = f"no difference: all metrics of the {result.num_finished} finished points are equal"
        lines.append(best)
        lines.append(f"{'settings of the first one' if result.is_alike else 'best settings'}: {result.best_experiment}")
    if result.comparison is not None:
        lines.append(f"comparison: {result.comparison}")
    return lines


SWEEP_TAG = "millrace.sweep_id"
MEMBER_TAG = "millrace.sweep"
"""Tag `millrace.sweep.<sweep id>` of each run of a sweep, with its point's number."""
MOST_SHOWN = 20
"""Points in the description of the sweep's run, and runs in its link to MLflow's comparison: the best ones."""
PARENT_FILE = "mlflow.json"
"""In the sweep's folder: the id of its run in MLflow."""


@contextmanager
def _harmless(what: str) -> Iterator[None]:
    """MLflow may be away: an error inside the block is a line in the log."""
    try:
        yield
    except Exception as error:
        get_run_logger().warning("MLflow did not take %s: %s", what, error)


def begin_in_mlflow(sweep: Sweep) -> str | None:
    """The sweep's run, now RUNNING; None where tracking is off or MLflow does not answer."""
    config = sweep.base
    if not config.tracking.enabled:
        return None
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    file, run = sweep_directory(sweep) / PARENT_FILE, None
    with _harmless("the sweep, so its runs will stand there side by side"):
        known = json.loads(file.read_text())["run_id"] if file.is_file() else None
        store = _store(sweep)
        tags = {SWEEP_TAG: sweep.sweep_id, "stage": "sweep", "mlflow.source.name": "millrace"}
        tags[NOTE_TAG] = _purpose(sweep)
        its_run = str(known or store.create_run(sweep.sweep_id, tags))
        store.client.update_run(its_run, status="RUNNING")
        store.set_tags(its_run, tags)
        write_json_atomically(file, {"run_id": its_run})
        run = its_run
        store.log_params(run, {"sweep": sweep.spec.model_dump(mode="json", exclude_none=True, exclude={"budget"})})
    return run


@contextmanager
def ended_in_mlflow(sweep: Sweep, run: str | None) -> Iterator[None]:
    """Where the block is left by an error or a stop, the sweep's run ends with it."""
    try:
        yield
    except BaseException as error:
        if run is not None:
            with _harmless("the end of the sweep"):
                _store(sweep).set_status(run, "KILLED" if is_stop(error) else "FAILED")
        raise


def finish_in_mlflow(sweep: Sweep, run: str | None, points: Sequence[PointRecord], result: SweepResult) -> None:
    """Scores by point, the files, the runs of the sweep that were there before, a description, and the end."""
    if run is None:
        return
    with _harmless("all of the sweep"):
        store = _store(sweep)
        metric = sweep.metric_of(sweep.base)
        for point in points:
            if point.score is not None:
                store.log_metrics(run, point.number, {f"sweep/{metric}": point.score}, time.time())
        if result.best_score is not None:
            store.log_metrics(run, 0, {f"best/{metric}": result.best_score}, time.time())
        runs = {member.run_dir for point in points for member in point.members}
        if costs := [cost for run_dir in runs if (cost := gpu_seconds(run_dir / JOURNAL_FILE)) is not None]:
            store.log_metrics(run, 0, {GPU_SECONDS: sum(costs)}, time.time())
        for file in (result.folder / SWEEP_FILE, result.best_experiment, result.comparison):
            if file is not None:
                store.client.log_artifact(run, str(file), "sweep")
        members = _gather(store, run, sweep, points)
        store.set_tags(run, {NOTE_TAG: _description(store, sweep, points, result, members)})
        store.set_status(run, "FAILED" if result.failed else "FINISHED")
        tell(f"in MLflow: {reachable(store.run_url(run, _pages()), result.folder.parent.parent)}")


def _gather(store: MlflowStore, run: str, sweep: Sweep, points: Sequence[PointRecord]) -> dict[int, list[str]]:
    """Tag the sweep's runs, and make them its children unless they are another sweep's; their ids by point."""
    found: dict[int, list[str]] = {}
    for point in points:
        for member in point.members:
            state = read_state(member.run_dir)
            if state.mlflow_run_id is None or state.uri != store.uri:
                continue
            tags = {f"{MEMBER_TAG}.{sweep.sweep_id}": str(point.number)}
            if PARENT_TAG not in store.client.get_run(state.mlflow_run_id).data.tags:
                tags[PARENT_TAG] = run
            store.set_tags(state.mlflow_run_id, tags)
            found.setdefault(point.number, []).append(state.mlflow_run_id)
    return found


def _purpose(sweep: Sweep) -> str:
    """What the sweep is for, as Markdown."""
    spec = sweep.spec
    varied = dict.fromkeys([*(key for point in sweep.points for key in point), *spec.space])
    seeds, keys = ", ".join(map(str, spec.seeds)), ", ".join(f"`{key}`" for key in varied)
    return "\n".join([
        f"# Sweep {sweep.sweep_id}",
        "",
        f"- Varies {keys} of {spec.experiment or 'the defaults'} by {spec.searches[0]}",
        f"- {spec.objective.direction.capitalize()}s {sweep.metric_of(sweep.base)}, mean over seeds {seeds}",
        f"- Compared at step {', '.join(map(str, sweep.rungs))}",
    ])  # fmt: skip


def _description(
    store: MlflowStore,
    sweep: Sweep,
    points: Sequence[PointRecord],
    result: SweepResult,
    members: Mapping[int, Sequence[str]],
) -> str:
    """Purpose, outcome, the best points, and MLflow's comparison of their runs, as Markdown."""
    best = best_first(sweep, points)[:MOST_SHOWN]
    lines = [_purpose(sweep), *(f"- {line}" for line in summary_of(result))]
    runs = [run for point in best for run in members.get(point.number, ())][:MOST_SHOWN]
    if len(runs) >= FEWEST_TO_COMPARE:
        lines.append(f"- [The {len(runs)} best runs side by side]({compare_url(store, runs, _pages())})")
    lines += ["", "| point | settings | score | state |", "| --- | --- | --- | --- |"]
    for point in best:
        score = "" if point.score is None else f"{point.score:.4g}"
        lines.append(f"| {point.number} | `{point.label}` | {score} | {point.state} |")
    return "\n".join(lines)


def _pages() -> str:
    """Where MLflow's pages of a sqlite store are: those of the stack, else what `millrace ui` serves."""
    return os.environ.get(MLFLOW_PAGE) or LOCAL_UI


def _store(sweep: Sweep) -> MlflowStore:
    return MlflowStore(sweep.base.tracking, sweep_directory(sweep).parent.parent)
