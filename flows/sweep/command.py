"""`millrace sweep`."""

import json
import sys
from pathlib import Path

from flows.commands.run import keep_runs_off_the_console
from flows.plan.checks import check_before_plan
from flows.server.api import start_prefect, wait_for_prefect
from flows.server.untold import not_kept_by
from flows.shown.progress import display_for_console, shown_on
from flows.shown.warn import warn
from rlcore.config.sweep import Budget, shown_point
from rlcore.config.sweep_load import Sweep, load_sweep
from rlcore.errors import StopRequestedError


def sweep(
    spec: str,
    settings: list[str],
    *,
    budget: Budget,
    on_workers: bool,
    dry_run: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Check, show or run, and say where to look. Exit code 1 if a point has failed."""
    checked = load_sweep(spec, settings, budget=budget)
    warn(checked.idle_settings())
    check_before_plan(checked.base)
    if dry_run:
        show(checked, as_json=as_json)
        return
    api = start_prefect(Path(checked.base.paths.root), verbose=verbose)
    from flows.sweep.flow import sweep as sweep_flow  # imports Prefect, while the server comes up

    wait_for_prefect(api)
    from prefect.exceptions import TerminationSignal

    from flows.server.watch import FlowCancelledError

    if not verbose:
        keep_runs_off_the_console()
    screen = display_for_console()
    try:
        with shown_on(screen), not_kept_by(api.url, screen.close):
            result = sweep_flow(
                spec,
                settings,
                max_runs=budget.runs,
                max_steps=budget.steps,
                max_hours=budget.hours,
                on_workers=on_workers,
            )
    except (TerminationSignal, FlowCancelledError) as ended:
        raise StopRequestedError("told to end; the same command goes on from the last checkpoints") from ended
    if result.failed:
        sys.exit(1)


def show(sweep: Sweep, *, as_json: bool) -> None:
    """What would be run, and how far each run is."""
    from flows.sweep.record import members_of, sweep_directory

    runs = []
    for number, point in enumerate(sweep.points, 1):
        for member in members_of(sweep, point)[0]:
            total = member.config.trainer.total_steps
            done = member.look(sweep.metric_of(member.config), total)
            runs.append({"point": number, "settings": shown_point(point), "seed": member.seed, "run_id": member.run_id,
                         "step": member.step, "total_steps": total, "done": done})  # fmt: skip
    folder = sweep_directory(sweep)
    if as_json:
        plan = {"sweep_id": sweep.sweep_id, "folder": str(folder), "rungs": list(sweep.rungs), "runs": runs}
        print(json.dumps(plan, indent=2))
        return
    print(f"sweep {sweep.sweep_id} in {folder}")
    rungs = ", ".join(map(str, sweep.rungs))
    each = f"{len(sweep.spec.seeds)} seed(s) each; compared at step {rungs}"
    if sweep.spec.optuna is not None:
        print(f"{sweep.spec.optuna.num_points} points chosen by Optuna as it goes, {each}")
        return
    print(f"{len(sweep.points)} points, {each}")
    for run in runs:
        state = "done" if run["done"] else f"step {run['step']} of {run['total_steps']}"
        print(f"  {run['point']:>4}  {run['settings']}  seed={run['seed']}  {run['run_id']}  {state}")
