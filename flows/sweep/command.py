"""The command `millrace sweep`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import ConfigDir, DryRun, OptionalRoot, PlanAsJson, Settings, Verbose, members_of
from flows.commands.settings import print_warnings, require_dry_run

if TYPE_CHECKING:
    from rlcore.config.sweep import Sweep


def sweep(
    spec: Annotated[
        str,
        typer.Argument(
            help="A name in conf/sweep, or the path of a file; see docs/sweeps.md.", autocompletion=members_of("sweep")
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
    from flows.sweep.points import load_checked_sweep
    from rlcore.config.sweep import Budget

    require_dry_run(as_json=as_json, dry_run=dry_run)
    settings = all_overrides(overrides, root=root)
    checked = load_checked_sweep(spec, settings, Budget(runs=max_runs, steps=max_steps, hours=max_hours))
    print_warnings(checked.unused_settings())
    if dry_run:
        show(checked, as_json=as_json)
        return
    _run(checked, spec, settings, on_workers=on_workers, verbose=verbose)


def _run(checked: "Sweep", spec: str, settings: list[str], *, on_workers: bool, verbose: bool) -> None:
    from flows.server.api import command_flow, start_prefect

    api = start_prefect(Path(checked.base.paths.root), verbose=verbose)
    from flows.sweep.flow import run_checked  # imports Prefect while the server starts

    with command_flow(api, verbose=verbose):
        result = run_checked(checked, spec, settings, on_workers=on_workers)
    if result.failed:
        sys.exit(1)


def run_multirun(settings: Sequence[str], root: Path | None, *, dry_run: bool, as_json: bool, verbose: bool) -> None:
    """Write settings with several values as a sweep's file below the root, and run it. A dry run keeps no file."""
    import yaml

    from flows.parameters import all_overrides
    from flows.sweep.points import load_checked_sweep
    from rlcore.config.fingerprint import fingerprint
    from rlcore.config.sweep import Budget, multirun_content
    from rlcore.storage.publish import write_text_atomically

    require_dry_run(as_json=as_json, dry_run=dry_run)
    content = multirun_content(all_overrides(settings, root=root))
    checked = load_checked_sweep(content, [], Budget())
    print_warnings(checked.unused_settings())
    if dry_run:
        show(checked, as_json=as_json)
        return
    folder = Path(checked.base.paths.root) / "multirun"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{content['name']}-{fingerprint('multirun', content)[:8]}.yaml"
    write_text_atomically(file, f"# millrace sweep {file}\n{yaml.safe_dump(content, sort_keys=False)}")
    _run(checked, str(file), [], on_workers=False, verbose=verbose)


def show(sweep: "Sweep", *, as_json: bool) -> None:
    """Print the runs of a sweep and their progress, as text or as JSON."""
    from flows.sweep.points import members_of
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
