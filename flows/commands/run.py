"""The commands that run stages: `millrace run`, `sft`, `train`, `validate`, `data make`, `data pass-rates`."""

import os
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import (
    Cfg,
    ConfigDir,
    DryRun,
    Fork,
    Info,
    Multirun,
    OptionalRoot,
    Package,
    PlanAsJson,
    Run,
    Settings,
    Verbose,
)
from flows.commands.settings import (
    print_warnings,
    require_dry_run,
    root_in_overrides,
    show_settings,
    show_wrong_settings,
    with_program_path,
)
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from flows.chain import PipelineResult
    from flows.parameters import RunSettings
    from flows.server.api import LocalServer
    from flows.work.plan import RunPlan
    from rlcore.config import RunConfig


def run(
    settings: Settings = None,
    root: OptionalRoot = None,
    config_dir: ConfigDir = None,
    fork: Fork = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
    cfg: Cfg = None,
    package: Package = None,
    info: Info = None,
    multirun: Multirun = False,
    verbose: Verbose = False,
) -> None:
    """Run an experiment from its dataset to its report, as Prefect flows. Finished stages are skipped.

    Examples:
      millrace run experiment=countdown_demo
      millrace run experiment=countdown_demo seed=2 trainer.total_steps=40
      millrace run experiment=debug --dry-run
      millrace run -m experiment=debug seed=1,2,3 optim.lr=3e-4,1e-3
    """
    if multirun:
        from flows.parameters import all_overrides
        from flows.sweep.command import start_sweep
        from rlcore.config.sweep import Budget, multirun_content

        for option, value in {"--fork": fork, "--cfg": cfg, "--info": info}.items():
            if value is not None:
                raise ConfigError(f"{option}: is for one run, not for several. Leave out {option} or -m")
        content = multirun_content(all_overrides(settings, root=root))
        start_sweep(content, [], Budget(), dry_run=dry_run, as_json=as_json, verbose=verbose)
        return
    planned = _compose_and_plan(
        settings, root, fork, dry_run=dry_run, as_json=as_json, cfg=cfg, package=package, info=info
    )
    if planned is None:
        return
    from flows import chain
    from flows.server.api import command_flow, start_prefect
    from flows.work.checks import check_before_start
    from flows.work.open_run import OpenRun
    from flows.work.plan import show_memory

    composed, plan = planned
    config = composed.config
    if plan.is_done and (known := chain.finished_result(OpenRun(config))) is not None:  # no server
        print(f"run {plan.run_id} in {plan.run_dir}: finished, there is nothing to do")
        print("\n".join(summary_lines(config, known)), flush=True)
        return
    check_before_start(config, plan)
    if plan.memory is not None and plan.memory.usable_bytes is not None and not plan.is_done:
        show_memory(plan.memory)
    server = start_prefect(Path(config.paths.root), verbose=verbose)
    print(f"run {plan.run_id} in {plan.run_dir}", flush=True)
    from flows.pipeline import run_checked  # imports Prefect while the server starts

    with command_flow(server, verbose=verbose):
        result = run_checked(composed)
    print("\n".join(summary_lines(config, result, os.environ["PREFECT_API_URL"].rstrip("/"), server)), flush=True)


@wraps(run, assigned=("__module__", "__annotations__"))
def sft(settings: Settings = None, **options: Any) -> None:
    """Fine-tune a model on demonstrations and write the report. The run has no reinforcement learning.

    Examples:
      millrace sft experiment=smollm2_countdown
      millrace sft experiment=smollm2_countdown warm_start.demonstrations=talks.jsonl warm_start.epochs=3
    """
    run([*(settings or ()), "trainer.total_steps=0", "warm_start.enabled=true"], **options)


def train(
    settings: Settings = None,
    root: OptionalRoot = None,
    config_dir: ConfigDir = None,
    fork: Fork = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
    cfg: Cfg = None,
    package: Package = None,
    info: Info = None,
    verbose: Verbose = False,
) -> None:
    """Run the stages of `millrace run` without Prefect and without the report.

    Examples:
      millrace train experiment=countdown_demo trainer.total_steps=40
    """
    planned = _compose_and_plan(
        settings, root, fork, dry_run=dry_run, as_json=as_json, cfg=cfg, package=package, info=info
    )
    if planned is None:
        return
    from flows import chain
    from flows.progress import display
    from flows.work.checks import check_before_start
    from flows.work.mlflow_record import MlflowRecord

    composed, plan = planned
    check_before_start(composed.config, plan)
    with chain.open_on_console(composed, "train", verbose=verbose) as run, MlflowRecord(run, {}) as record:
        display().line(f"run {run.run_id} in {run.layout.run_dir}")
        chain.run_chain(run, chain.run_on_console, record, with_report=False)


def _compose_and_plan(
    settings: Settings,
    root: Path | None,
    fork: str | None,
    *,
    dry_run: bool,
    as_json: bool,
    cfg: str | None,
    package: str | None,
    info: str | None,
) -> "tuple[RunSettings, RunPlan] | None":
    """Compose, check and plan a run. With `--cfg`, `--info` or `--dry-run`, print the result and return None."""
    require_dry_run(as_json=as_json, dry_run=dry_run)
    if package is not None and cfg is None:
        raise ConfigError(f"--package: goes with --cfg job alone; got {package}. Add --cfg job")
    try:
        composed = compose_arguments(settings, root, fork=fork, dry_run=dry_run or (cfg, info) != (None, None))
    except ConfigError:
        if (cfg, info) != (None, None):
            show_wrong_settings(settings, root, cfg, package, info)
        raise
    if (cfg, info) != (None, None):
        show_settings(composed, cfg, package, info)
        return None
    from flows.work.checks import check_dry_run, plan_run
    from flows.work.plan import show_plan

    plan = plan_run(composed)
    if not dry_run:
        return composed, plan
    show_plan(plan, as_json=as_json)
    check_dry_run(composed.config, plan)
    return None


def compose_arguments(
    settings: Sequence[str] | None, root: Path | None, *, fork: str | None = None, dry_run: bool = False
) -> "RunSettings":
    """Compose the settings of a command. Warn of each setting that has no effect.

    If `fork` is set to `RUN[@CHECKPOINT]`, the new run starts from the weights of this checkpoint. With `dry_run`, the
    weights are not exported. If settings are wrong, one ConfigError lists all mistakes.
    """
    from flows.parameters import all_overrides, compose_settings

    given = all_overrides(settings, root=root)
    if fork is None:
        composed = compose_settings(given)
    else:
        from flows.work.weights import compose_fork

        composed = compose_fork(given, fork, root_in_overrides(given), dry_run=dry_run)
    print_warnings(composed.unused_settings())
    return composed


def _settings_of_run(run: Sequence[str], root: Path | None) -> "RunSettings":
    """Return the settings of a run that is named by its folder or id, or compose them from KEY=VALUE.

    In the result, `paths.root` is the workspace in which the run was found, because the workspace may have been moved.
    """
    from flows.work.runs import find_run, is_named

    if not is_named(run):
        return compose_arguments(run, root)
    from flows.parameters import RunSettings
    from flows.stack.state import with_stack_tracking
    from rlcore.run.layout import RunLayout

    config, layout = find_run(run, root)
    paths = config.paths.model_copy(update={"root": str(layout.run_dir.parent.parent)})
    config = config.model_copy(update={"paths": paths})
    if (place := RunLayout.of(config).run_dir) != layout.run_dir:
        raise ConfigError(f"RUN: must be at WORKSPACE/runs/{place.name}; got {layout.run_dir}. Move it there")
    return RunSettings(with_stack_tracking(config), tuple(run))


def validate(
    run: Run,
    root: OptionalRoot = None,
    config_dir: ConfigDir = None,
    checkpoint: Annotated[str, typer.Option(help="One of start, last, best, or a step.")] = "last",
    verbose: Verbose = False,
) -> None:
    """Evaluate a checkpoint of a run on the held-out problems.

    Examples:
      millrace validate experiment=countdown_demo --checkpoint best
      millrace validate countdown_demo-s1 --checkpoint 40
    """
    if len(run) > 1 and (step := run[-1]).isdecimal():
        raise ConfigError(f"RUN: takes no step; got {' '.join(run)}. Write validate {run[0]} --checkpoint {step}")
    composed = _settings_of_run(run, root)
    from flows import chain
    from flows.progress import display
    from flows.stages.outputs import Validate
    from flows.work.checks import check_before_plan, require_machine
    from flows.work.open_run import checkpoint_name, checkpoint_store

    check_before_plan(composed.config)
    require_machine(composed.config)
    checkpoint = checkpoint_name(checkpoint)
    if not composed.config.is_supervised:
        checkpoint_store(composed.config).step_of(checkpoint, verify=False)  # raises if it does not exist
    with chain.open_on_console(composed, "validate", verbose=verbose) as opened:
        chain.make_rows(opened, chain.run_quietly)
        validation = chain.run_on_console(Validate(checkpoint), opened)
        display().line(f"responses: {validation.file}")


def make(settings: Settings = None, root: OptionalRoot = None, config_dir: ConfigDir = None) -> None:
    """Build and filter the dataset of an experiment.

    Examples:
      millrace data make experiment=countdown_demo
    """
    composed = compose_arguments(settings, root)
    from flows import chain
    from flows.progress import display_for_console, use_display
    from flows.stages.dataset import Filter
    from flows.work.checks import check_before_plan, run_stage_checks
    from flows.work.open_run import OpenRun

    check_before_plan(composed.config)
    run = OpenRun(composed.config)
    run_stage_checks(
        run, [stage for stage in chain.stages_until(run.config, Filter.name) if not stage.status(run).cached]
    )
    with use_display(display_for_console()):
        chain.make_rows(run, chain.run_on_console)


def pass_rates(
    settings: Settings = None, root: OptionalRoot = None, config_dir: ConfigDir = None, verbose: Verbose = False
) -> None:
    """Measure how often the initial policy solves each training row. A missing dataset or model is built first.

    Examples:
      millrace data pass-rates experiment=countdown_demo pass_rates.samples=8
      millrace data pass-rates experiment=countdown_demo pass_rates.samples=8 'pass_rates.keep=[0.1,0.9]'
    """
    composed = compose_arguments(settings, root)
    from flows import chain
    from flows.stages.train import PassRates
    from flows.work.checks import check_run

    chain.stages_until(composed.config, PassRates.name)  # raises if no pass rates are measured
    check_run(composed)
    with chain.open_on_console(composed, "data pass-rates", verbose=verbose) as run:
        chain.run_stages(run, chain.run_on_console, PassRates.name)


def summary_lines(
    config: "RunConfig", result: "PipelineResult", prefect_url: str = "", server: "LocalServer | None" = None
) -> list[str]:
    """Return the last output lines of `millrace run`.

    `prefect_url` is '' if no stage had to run. `server` is the Prefect server, if this command has started one.
    """
    root = result.run_dir.parents[1]
    lines = ["", f"{result.run_id}: {result.outcome(config) if config.is_supervised else f'{result.steps} steps'}"]
    lines += [f"  {one.headline()}" for one in result.validations]
    lines += [f"  report   {result.report}", f"  weights  {result.weights}"]
    if result.mlflow.ui_command:
        lines.append(f"  MLflow   {with_program_path(f'millrace ui --root {quote(str(root))}')}")
    elif result.mlflow.url:
        lines.append(f"  MLflow   {result.mlflow.url}")
    if not prefect_url:
        return lines
    if server is None:
        return [*lines, f"  Prefect  {prefect_url.removesuffix('/api')}"]
    if server.home == root / "prefect":
        from flows.stack.state import read_stack

        if (started := read_stack(root).running_service("prefect")) is not None:  # since the run's start
            return [*lines, f"  Prefect  {started.url}"]
        return [*lines, f"  Prefect  {with_program_path(f'millrace up --root {quote(str(root))}')}"]
    command = with_program_path("prefect server start")
    return [*lines, f"  Prefect  PREFECT_HOME={quote(str(server.home))} {command}"]
