"""The commands `millrace data make` and `millrace data pass-rates`."""

from flows.commands.options import ConfigDir, OptionalRoot, Settings, Verbose
from flows.commands.settings import compose_arguments
from rlcore.errors import ConfigError


def make(settings: Settings = None, root: OptionalRoot = None, config_dir: ConfigDir = None) -> None:
    """Build and filter the dataset of an experiment.

    Examples:
      millrace data make experiment=countdown_demo
    """
    composed = compose_arguments(settings, root)
    from flows import chain
    from flows.plan.checks import check_before_plan, run_stage_checks
    from flows.progress import display_for_console, use_display
    from flows.stages.dataset import Filter
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
    from flows.plan.checks import check_run
    from flows.stages.pass_rates import PassRates
    from rlcore.run.pass_rates import WITHOUT_PASS_RATES

    if not composed.config.pass_rates.is_enabled:
        raise ConfigError(WITHOUT_PASS_RATES)
    check_run(composed)
    with chain.open_on_console(composed, "data pass-rates", verbose=verbose) as run:
        chain.run_stages(run, chain.run_on_console, PassRates.name)
