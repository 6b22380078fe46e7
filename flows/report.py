"""Write the report of a run."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.naming import flow_run_name
from flows.parameters import NO_OVERRIDES, Experiment, Root, Seed, all_overrides, plain_command, settings_of
from flows.shown.artifacts import show_report
from flows.shown.tell import tell, tell_command
from flows.work.report import Report, write_report
from rlcore.config import RunConfig
from rlcore.run.layout import RunLayout


@task(task_run_name="report/{config.name}", cache_policy=NO_CACHE)
def make_report(config: RunConfig) -> Report:
    """Write the report, or find it."""
    made = write_report(RunLayout.of(config))
    tell(f"report: {made.html}{', skipped: it is current' if made.cached else ''}")
    return made


@flow(name="report", flow_run_name=flow_run_name)
def report(
    experiment: Experiment = None, overrides: list[str] = NO_OVERRIDES, seed: Seed = None, root: Root = None
) -> Report:
    """Write the report of a run as one HTML file, and as JSON.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line; they name the run.
        seed: Of the run.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    given = all_overrides(overrides, seed=seed, root=root)
    config = settings_of(experiment, given)
    tell_command(plain_command("report", experiment, given))
    made = make_report(config)
    show_report(RunLayout.of(config).run_dir, made)
    return made
