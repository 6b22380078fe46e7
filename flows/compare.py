"""Compare runs."""

from pathlib import Path
from shlex import join

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.parameters import Root
from flows.shown.artifacts import show_comparison
from flows.shown.tell import tell, tell_command
from flows.work import comparison
from flows.work.stack_store import tracking_in_stack
from rlcore.config import PathsConfig, TrackingConfig

NO_RUNS: list[str] = []
"""The default; the flow does not change it."""


@task(task_run_name="compare", cache_policy=NO_CACHE)
def write_comparison(folders: list[Path], root: Path) -> comparison.Comparison:
    """Write the comparison, and keep it with the runs in MLflow."""
    made = comparison.compare(folders, root)
    tell(f"comparison: {made.html}")
    return made


@flow(name="compare", flow_run_name="compare")
def compare(runs: list[str] = NO_RUNS, search: str = "", root: Root = None) -> comparison.Comparison:
    """Write the comparison of runs: settings that differ, curves over one another, figures with intervals, costs.

    Args:
        runs: Run ids or folders; the first one is what the others are compared with.
        search: Also the runs that this finds in MLflow, such as tags.task = 'countdown'.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    at = Path(root or PathsConfig().root).resolve()
    tell_command(join(["millrace", "compare", *runs, *(["--search", search] if search else []), "--root", str(at)]))
    made = write_comparison(comparison.find_runs(runs, search, at, tracking_in_stack(TrackingConfig(), at)), at)
    show_comparison(made)
    return made
