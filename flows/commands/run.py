"""`millrace run`, `train`, `validate`, `report`, `data make`, `data pass-rates` and `data inspect`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from flows import chain
from flows.commands.settings import beside_python
from flows.parameters import RunSettings
from flows.plan.checks import check_before_plan, check_before_start, check_dry_run, check_rows, check_run, plan_run
from flows.plan.table import show_memory, show_plan
from flows.progress import display, display_for_console, shown_on
from flows.server.api import PrefectApi, start_prefect, wait_for_prefect
from flows.server.database import address_in
from flows.stages.pass_rates import PassRates
from flows.stages.report import write_report
from flows.stages.validate import Validate
from flows.work.checkpoints import checkpoint_name, checkpoint_store
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import OpenRun
from flows.work.runs import named_run
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, StopRequestedError
from rlcore.run.pass_rates import WITHOUT_PASS_RATES


def run(settings: RunSettings, *, dry_run: bool, as_json: bool, verbose: bool) -> None:
    """Check, plan, then run the pipeline as a flow in this process, and print where to look."""
    config = settings.config
    plan = plan_run(settings)
    if dry_run:
        show_plan(plan, as_json=as_json)
        check_dry_run(config, plan)
        return
    if plan.is_done and (known := chain.finished(OpenRun(config))) is not None:  # no server is started for that
        print(f"run {plan.run_id} in {plan.run_dir}: finished, there is nothing to do")
        print("\n".join(summary_lines(config, known, None)), flush=True)
        return
    check_before_start(config, plan)
    if plan.memory is not None and plan.memory.usable_bytes is not None and not plan.is_done:
        show_memory(plan.memory)
    api = start_prefect(Path(config.paths.root), verbose=verbose)
    print(f"run {plan.run_id} in {plan.run_dir}", flush=True)
    from flows.pipeline import run_checked  # imports Prefect, while the server comes up

    with flow_of_a_command(api, verbose=verbose):
        result = run_checked(settings)
    print("\n".join(summary_lines(config, result, api)), flush=True)


def train(settings: RunSettings, *, dry_run: bool, as_json: bool, verbose: bool) -> None:
    """Data, warm start, chunks, weights, validation, without Prefect."""
    plan = plan_run(settings)
    if dry_run:
        show_plan(plan, as_json=as_json)
        check_dry_run(settings.config, plan)
        return
    check_before_start(settings.config, plan)
    with chain.opened_here(settings, "train", verbose=verbose) as run, MlflowRecord(run, {}) as record:
        display().line(f"run {run.run_id} in {run.layout.run_dir}")
        chain.run_chain(run, chain.run_here, record, with_report=False)


def validate(settings: RunSettings, *, checkpoint: str, verbose: bool) -> None:
    """Validate one checkpoint."""
    check_before_plan(settings.config)
    checkpoint = checkpoint_name(checkpoint)
    checkpoint_store(settings.config).step_of(checkpoint, verify=False)  # raises where there is none
    with chain.opened_here(settings, "validate", verbose=verbose) as run:
        chain.make_rows(run, chain.run_quietly)
        judgement = chain.run_here(Validate(checkpoint), run)
        display().line(f"answers: {judgement.file}")


def report(run: list[str], root: Path | None) -> None:
    """Write the report of a run."""
    _, layout = named_run(run, root)
    print(f"report: {write_report(layout)}")


def make_data(settings: RunSettings) -> None:
    """Make and filter the dataset."""
    check_before_plan(settings.config)
    check_rows(settings.config)
    with shown_on(display_for_console()):
        chain.make_rows(OpenRun(settings.config), chain.run_here)


def pass_rates(settings: RunSettings, *, verbose: bool) -> None:
    """Measure the pass rates of the training rows."""
    if not settings.config.pass_rates.is_wanted:
        raise ConfigError(WITHOUT_PASS_RATES)
    check_run(settings)
    with chain.opened_here(settings, "data pass-rates", verbose=verbose) as run:
        chain.run_stages(run, chain.run_here, PassRates.name)


def inspect(path: Path, *, num_rows: int, seed: int, as_json: bool) -> None:
    """Print the contents of a dataset's file or folder as tables, or as JSON."""
    from data.inspect import as_rich, inspect_dataset

    report = inspect_dataset(path, num_rows=num_rows, seed=seed)
    if as_json:
        print(report.as_json())
    else:
        from rich.console import Console

        Console().print(as_rich(report))


@contextmanager
def flow_of_a_command(api: PrefectApi, *, verbose: bool) -> Iterator[None]:
    """Inside the block a flow runs in this process, for a command: progress on the console, errors as one message.

    Raises:
        StopRequestedError: the flow run was cancelled or told to end.
    """
    wait_for_prefect(api)
    from prefect.exceptions import TerminationSignal

    from flows.server.watch import FlowCancelledError

    if not verbose:
        _keep_runs_off_the_console()
    try:
        with shown_on(display_for_console()):
            yield
    except FlowCancelledError as ended:
        raise StopRequestedError(str(ended)) from ended
    except TerminationSignal as ended:
        raise StopRequestedError("told to end; the same command goes on from the last checkpoints") from ended


def _keep_runs_off_the_console() -> None:
    """The log lines of flow and task runs are Prefect's; the console has our own, and errors end in one message."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))

    for handler in logging.getLogger().handlers:
        if hasattr(handler, "console"):
            handler.addFilter(keep)
    for name in ("prefect._internal.concurrency", "prefect.events.clients", "EventsWorker", "APILogWorker"):
        logging.getLogger(name).disabled = True  # a line for each event that a server does not take; they heed no level
    logging.raiseExceptions = False  # and one for each batch of log lines


def summary_lines(config: RunConfig, result: chain.PipelineResult, api: PrefectApi | None) -> list[str]:
    """The last lines of `millrace run`; `api` None where there was nothing to do."""
    root = result.run_dir.parents[1]
    lines = ["", f"{result.run_id}: {config.trainer.total_steps} steps"]
    lines += [f"  {one.figures()}" for one in result.judgements]
    lines += [f"  report   {result.report}", f"  weights  {result.weights}"]
    if result.mlflow.ui_command:
        lines.append(f"  MLflow   {beside_python(f'millrace ui --root {quote(str(root))}')}")
    elif result.mlflow.url:
        lines.append(f"  MLflow   {result.mlflow.url}")
    if api is not None:
        lines.append(f"  Prefect  {_prefect_hint(api, root)}")
    return lines


def _prefect_hint(api: PrefectApi, root: Path) -> str:
    """Address of Prefect's pages, or the command that starts them."""
    if api.home is None:
        return api.url.removesuffix("/api")
    if api.home == root / "prefect":
        return beside_python(f"millrace up --root {quote(str(root))} --workers 0")
    where = {"PREFECT_HOME": str(api.home), **address_in(api.home)}
    told = " ".join(f"{name}={quote(value)}" for name, value in where.items())
    return f"{told} {beside_python('prefect server start')}"
