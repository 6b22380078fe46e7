"""The command `millrace sweep`, and the start of a sweep."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands import options
from flows.commands.options import ConfigDir, DryRun, OptionalRoot, PlanAsJson, Settings, Verbose
from flows.commands.settings import print_warnings, require_dry_run

if TYPE_CHECKING:
    from rlcore.config.sweep import Budget, Sweep


def sweep(
    spec: Annotated[
        str,
        typer.Argument(
            help="A name in conf/sweep, or the path of a file; see docs/sweeps.md.",
            autocompletion=options.members_of("sweep"),
        ),
    ],
    overrides: Settings = None,
    max_runs: Annotated[int | None, typer.Option(min=1, help="Largest number of runs.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Largest number of training steps.")] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0.001, max=100_000, help="Hours after which no run begins.")
    ] = None,
    root: OptionalRoot = None,
    config_dir: ConfigDir = None,
    on_workers: Annotated[bool, typer.Option("--on-workers", help="Send the runs to the work pool.")] = False,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train every point of a sweep with several seeds, and compare the points. Finished runs are skipped.

    Examples:
      millrace sweep debug_grid --dry-run
      millrace sweep my_sweep.yaml trainer.total_steps=40
      millrace sweep countdown_lr --max-hours 8
    """
    from flows.parameters import all_overrides
    from rlcore.config.sweep import Budget

    budget = Budget(runs=max_runs, steps=max_steps, hours=max_hours)
    settings = all_overrides(overrides, root=root)
    start_sweep(spec, settings, budget, on_workers=on_workers, dry_run=dry_run, as_json=as_json, verbose=verbose)


def start_sweep(
    spec: str | Mapping[str, Any],
    overrides: list[str],
    budget: "Budget",
    *,
    dry_run: bool,
    as_json: bool,
    verbose: bool,
    on_workers: bool = False,
) -> None:
    """Run a sweep, or show its plan. If `spec` is a mapping, it is first written to a file in the workspace.

    The exit code is 1 if a point has failed.
    """
    import yaml

    from flows.server.api import command_flow, start_prefect
    from flows.sweep.study import load_checked_sweep
    from rlcore.config.fingerprint import fingerprint
    from rlcore.storage.publish import write_text_atomically

    require_dry_run(as_json=as_json, dry_run=dry_run)
    checked = load_checked_sweep(spec, overrides, budget)
    print_warnings(checked.unused_settings())
    if dry_run:
        _show(checked, as_json=as_json)
        return
    root = Path(checked.base.paths.root)
    if not isinstance(spec, str):
        (root / "multirun").mkdir(parents=True, exist_ok=True)
        file = root / "multirun" / f"{spec['name']}-{fingerprint('multirun', spec)[:8]}.yaml"
        write_text_atomically(file, f"# millrace sweep {file}\n{yaml.safe_dump(spec, sort_keys=False)}")
        spec = str(file)
    server = start_prefect(root, verbose=verbose)
    from flows.sweep.flow import run_checked  # imports Prefect while the server starts

    with command_flow(server, verbose=verbose):
        result = run_checked(checked, spec, overrides, on_workers=on_workers)
    if result.failed:
        sys.exit(1)


def _show(sweep: "Sweep", *, as_json: bool) -> None:
    from flows.sweep.study import members_of
    from rlcore.config.sweep import format_point

    runs = []
    for number, point in enumerate(sweep.points, 1):
        for member in members_of(sweep, point)[0]:
            total = member.config.trainer.total_steps
            done = member.refresh(sweep.metric_of(member.config), total)
            runs.append({"point": number, "settings": format_point(point), "seed": member.seed, "run_id": member.run_id,
                         "step": member.step, "total_steps": total, "done": done})  # fmt: skip
    rungs = sweep.rungs(sweep.base)
    if as_json:
        plan = {"sweep_id": sweep.sweep_id, "folder": str(sweep.folder), "rungs": list(rungs), "runs": runs}
        print(json.dumps(plan, indent=2))
        return
    print(f"sweep {sweep.sweep_id} in {sweep.folder}")
    drawn = "" if sweep.spec.optuna is None else " drawn by Optuna"
    steps = ", ".join(map(str, rungs))
    print(f"{sweep.num_points} points{drawn}, {len(sweep.spec.seeds)} seed(s) each; compared at step {steps}")
    for run in runs:
        state = "done" if run["done"] else f"step {run['step']} of {run['total_steps']}"
        print(f"  {run['point']:>4}  {run['settings']}  seed={run['seed']}  {run['run_id']}  {state}")
