"""The arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.commands import complete
from flows.commands.settings import root_folder, use_config_dir

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings: experiment=<a file in conf/experiment>, a group such as algo=dapo, a key such as "
        "trainer.total_steps=40.",
        show_default=False,
        autocompletion=complete.settings,
    ),
]
Run = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="A run: its folder, its id, or the settings it was started with.",
        autocompletion=complete.runs_and_settings,
    ),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Runs by folder, id, or the beginning of an id.",
        show_default=False,
        autocompletion=complete.runs,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, and stop.")]
PlanAsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ROOT_HELP = "Folder of datasets, models, runs and databases; paths.root=DIR means the same."
Root = Annotated[Path, typer.Option(metavar="DIR", help=ROOT_HELP, parser=root_folder)]
ARTIFACTS = Path("artifacts")
OptionalRoot = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help=ROOT_HELP, show_default="artifacts", parser=root_folder)
]
"""The option `--root` of commands whose settings may also name the root."""
Uri = Annotated[str | None, typer.Option(help="MLflow store (tracking.uri); default: the one under the root.")]
Fork = Annotated[
    str | None,
    typer.Option(
        metavar="RUN[@CHECKPOINT]",
        help="Start from the weights of another run: its folder or id, and last (the default), best, or a step.",
        show_default=False,
        autocompletion=complete.runs,
    ),
]
Cfg = Annotated[
    Literal["job"] | None,
    typer.Option("--cfg", "-c", help="Print the composed and resolved settings as YAML, and stop."),
]
Package = Annotated[
    str | None,
    typer.Option("--package", "-p", metavar="KEY", help="With --cfg: only this section.", show_default=False),
]
Info = Annotated[
    Literal["all", "defaults", "searchpath"] | None,
    typer.Option("--info", "-i", help="Print the sources of the settings, and stop."),
]
Multirun = Annotated[
    bool,
    typer.Option("--multirun", "-m", help="Run every combination of settings with several values: seed=1,2,3."),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="Your folder of groups, experiments, suites and sweeps, of the form of conf/; MILLRACE_CONFIG_DIR too.",
        show_default=False,
        callback=use_config_dir,
        is_eager=True,  # before any name of a member is looked up
    ),
]
"""The option `--config-dir`. Commands do not read it, because `use_config_dir` sets the environment of this process and
of its children.
"""
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of Prefect and the trainer too.")]
