"""The Prefect flows over several runs or models: comparison, evaluation on suites, and maintenance of a root folder."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shlex import join, quote

from prefect import flow

from flows import evaluation
from flows.artifacts import show_artifact
from flows.parameters import NO_STRINGS, Root, flow_root
from flows.server.watch import watch_flow_run
from flows.stack.state import with_stack_store
from flows.tasks import log_and_print, log_command, run_as_task, run_task
from flows.work import runs as several
from flows.work.runs import Comparison, Outcome, all_runs
from rlcore.config import PathsConfig, TrackingConfig
from rlcore.errors import TrackingError


@flow(name="maintain", flow_run_name="maintain")
def maintain(root: Root = None, dry_run: bool = False) -> list[Outcome]:
    """Prune checkpoints, deliver journals, and remove the artifacts of deleted runs. Running runs are skipped.

    Args:
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's root.
        dry_run: Report what would be deleted, and delete nothing.
    """
    at = Path(flow_root(root) or PathsConfig().root).resolve()
    where = quote(str(at))
    log_command(f"millrace sync --root {where}; millrace gc --root {where}{' --dry-run' if dry_run else ''}")
    folders, tracking = all_runs(at), with_stack_store(TrackingConfig(), at)
    work: dict[str, Callable[[], list[Outcome]]] = {
        "prune": lambda: [several.prune(one, dry_run=dry_run) for one in folders],
        "sync": lambda: [] if dry_run else [several.sync(one, None) for one in folders],
        "gc": lambda: several.collect_garbage(at, tracking, dry_run=dry_run),
    }
    outcomes: list[Outcome] = []
    for name, do in work.items():
        outcomes += run_task(name, name, do, partial(_lines, name))
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    if failed:
        raise TrackingError("maintenance failed in part:\n" + "\n".join(failed))
    return outcomes


def _lines(name: str, outcomes: Sequence[Outcome]) -> str:
    return "\n".join(f"{name}: {outcome}" for outcome in outcomes)


@flow(name="compare", flow_run_name="compare")
def compare(runs: list[str] = NO_STRINGS, search: str = "", root: Root = None) -> Comparison:
    """Write a comparison of runs: changed settings, overlaid curves, metrics with confidence intervals, and costs.

    Args:
        runs: Ids or folders of runs. The first run is compared with each of the others.
        search: An MLflow search, such as tags.task = 'countdown'. The runs that match it are compared too.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's root.
    """
    at = Path(flow_root(root) or PathsConfig().root).resolve()
    log_command(join(["millrace", "compare", *runs, *(["--search", search] if search else []), "--root", str(at)]))
    folders = several.find_runs(runs, search, at, with_stack_store(TrackingConfig(), at))
    work = partial(several.compare, folders, at)
    made = run_task("compare", "compare", work, lambda one: f"comparison: {one.html}")
    name = f"comparison-{made.html.parent.name}"
    of = ", ".join(folder.name for folder in folders)
    show_artifact(name, "report", f"{of}: compared", lambda: f"{made.summary}\n\nFull comparison: `{made.html}`\n")
    if made.mlflow_page:
        show_artifact(name, "mlflow", f"{of}: in MLflow", lambda: made.mlflow_page, "link")
    return made


@flow(name="eval", flow_run_name="eval")
def evaluate(
    models: list[str] = NO_STRINGS, suites: list[str] = NO_STRINGS, overrides: list[str] = NO_STRINGS, root: Root = None
) -> list[str]:
    """Evaluate models or checkpoints on suites. Metrics have confidence intervals, and models are compared in pairs.

    Args:
        models: Model directories, or folders or ids of runs. A run may end with @best, @start or @N (default: @last).
        suites: Names in conf/suite, or paths of files on the worker's machine.
        overrides: Settings for all models, such as rollout.engine=vllm.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's root.
    """
    given = flow_root(root)
    at = None if given is None else Path(given)
    command = evaluation.eval_command([*models, *overrides], suites, at)
    log_command(join(command))
    with watch_flow_run():
        found = evaluation.evaluate_all(models, suites, overrides, at, command, run_as_task)
    lines = evaluation.table_lines(found)
    log_and_print("\n".join(lines))
    of = f"{', '.join(models)} on {', '.join(suites)}"
    show_artifact(found[0].folder.name, "evaluation", of, lambda: "\n".join(["```", *lines, "```"]))
    return [str(one.folder) for one in found]
