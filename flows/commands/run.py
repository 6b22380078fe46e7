"""`millrace run`: the pipeline as Prefect flows, in this process."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.fork import Fork
from flows.plan.checks import check_before_plan, check_before_start
from flows.plan.plan import RunPlan, make_plan
from flows.plan.table import show_memory, show_plan
from flows.plan.tried import try_parts
from flows.server.api import PrefectApi, start_prefect, wait_for_prefect
from flows.server.untold import not_kept_by
from flows.shown.progress import display_for_console, shown_on
from flows.shown.summary import summary_lines
from flows.shown.warn import warn
from flows.work.stack_store import in_stack
from rlcore.config import RunConfig
from rlcore.config.compose import idle_settings
from rlcore.errors import StopRequestedError

if TYPE_CHECKING:
    from flows.work.finished import PipelineResult

EXPERIMENT = "experiment="


def run(fork: Fork, *, dry_run: bool, as_json: bool, verbose: bool) -> None:
    """Check, plan, then run the pipeline and say where to look."""
    settings = fork.settings
    config, seen = fork.plan()
    warn(idle_settings(config, settings))
    check_before_plan(config)
    plan = make_plan(config, seen=seen)
    try_parts(seen or config, plan)
    if dry_run:
        show_plan(plan, as_json=as_json)
        return
    if plan.is_done and _tell_what_is_there(config, plan):
        return
    check_before_start(config, plan)
    if plan.memory is not None and plan.memory.usable_bytes is not None and not plan.is_done:
        show_memory(plan.memory)
    api = start_prefect(Path(config.paths.root), verbose=verbose)
    print(f"run {plan.run_id} in {plan.run_dir}", flush=True)
    result = _run_pipeline(settings, api, verbose=verbose)
    print("\n".join(summary_lines(config, result, api)), flush=True)


def _tell_what_is_there(config: RunConfig, plan: RunPlan) -> bool:
    """Whether there is nothing to do; then it is said, with where to look. No server is started for that."""
    from flows.work.finished import finished

    known = finished(in_stack(config), plan)
    if known is None:
        return False
    print(f"run {plan.run_id} in {plan.run_dir}: finished, there is nothing to do")
    print("\n".join(summary_lines(config, known, None)), flush=True)
    return True


def _run_pipeline(settings: list[str], api: PrefectApi, *, verbose: bool) -> "PipelineResult":
    from flows.pipeline import pipeline  # imports Prefect, while the server comes up

    wait_for_prefect(api)
    from flows.server.watch import FlowCancelledError

    if not verbose:
        keep_runs_off_the_console()
    experiment, overrides = split_experiment(settings)
    screen = display_for_console()
    try:
        with shown_on(screen), not_kept_by(api.url, screen.close):
            return pipeline(experiment, overrides)
    except FlowCancelledError as ended:
        raise StopRequestedError(str(ended)) from ended


def split_experiment(settings: list[str]) -> tuple[str | None, list[str]]:
    """The experiment's name apart from the other overrides, so that it is a parameter of its own in Prefect.

    >>> split_experiment(["experiment='/my files/debug.yaml'", "seed=2"])
    ('/my files/debug.yaml', ['seed=2'])
    """
    names = [text.removeprefix(EXPERIMENT).strip("'\"") for text in settings if text.startswith(EXPERIMENT)]
    rest = [text for text in settings if not text.startswith(EXPERIMENT)]
    return (names[0] if names else None), rest


def keep_runs_off_the_console() -> None:
    """The log lines of flow and task runs are Prefect's; the console has our own, and errors end in one message."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))

    for handler in logging.getLogger().handlers:
        if hasattr(handler, "console"):
            handler.addFilter(keep)
