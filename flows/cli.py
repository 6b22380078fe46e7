"""The command line: words, options and help of each command. What it does is in `flows/commands/`.

Nothing heavy is imported before a command needs it: a mistake is told in a second.
"""

import atexit
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from flows import SOURCE_FOLDER
from flows.commands import complete
from flows.commands.settings import MOST_SLOTS, Commands, composed_or_shown, root_folder
from rlcore.errors import EXIT_RESUMABLE, RESUMABLE, ConfigError, MillraceError
from rlcore.run.stop import ONE_WISH_S
from rlcore.start import collect_rarely

EXIT_FAILED, EXIT_WRONG_SETTINGS = 1, 2
CLICK_INTERRUPTED = 130
"""What typer makes of an interrupt at the keyboard."""
OF_THE_MACHINE = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EINVAL,
    errno.EISDIR,
})  # fmt: skip
"""Errors of a file that a message with its name explains, wherever they occur: a traceback would add nothing."""
INTERRUPTED = "interrupted; the same command goes on"

app = typer.Typer(
    cls=Commands,
    help="Experiments in reinforcement learning of language models: data, training, validation and report as one run.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    cls=Commands, help="Make datasets, and look into them.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")


DECLARED: dict[str, Callable[..., None]] = {}
"""The signature of each command by its target; a test holds it against the target's own."""


def command(
    target: str, *examples: str, name: str | None = None, about: str | None = None, of: typer.Typer = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command by a signature, which gives its words and options, and a docstring, which gives its help.

    Args:
        target: `module:function` in `flows`, imported when the command is called, and called with the same parameters;
            `settings` reach it composed, and without the options that say how.
        examples: at the end of the help, one a line, not wrapped: they are copied from there.
        about: help in place of the docstring, where commands share a signature.
    """

    def declare(signature: Callable[..., None]) -> Callable[..., None]:
        @wraps(signature)
        def call(**words: Any) -> None:
            if "settings" not in words or composed_or_shown(words):
                resolve_name(f"flows.{target}")(**words)

        DECLARED[target] = signature
        title = "Examples:" if len(examples) > 1 else "Example:"
        epilog = "\n".join(["\b", title, *(f"  {line}" for line in examples)])
        of.command(name, epilog=epilog, help=about)(call)
        return signature

    return declare


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
        help="A run: its folder, its id, or the settings that it was started with.",
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]
PlanAsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
ROOT_HELP = "Folder of datasets, models, runs and databases; paths.root=DIR means the same."
Root = Annotated[Path, typer.Option(metavar="DIR", help=ROOT_HELP, parser=root_folder)]
ARTIFACTS = Path("artifacts")
RootOfRun = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help=ROOT_HELP, show_default="artifacts", parser=root_folder)
]
"""The root of commands that take settings: none leaves it to them."""
Uri = Annotated[str | None, typer.Option(help="MLflow store (tracking.uri); none: the one under the root.")]
Fork = Annotated[
    str | None,
    typer.Option(
        metavar="RUN[@CHECKPOINT]",
        help="Start from the weights of another run: its folder or id, and last (taken if not given), best, or a step.",
        show_default=False,
        autocompletion=complete.runs,
    ),
]
Cfg = Annotated[
    str | None,
    typer.Option("--cfg", metavar="job", help="Print the composed settings as YAML, and stop.", show_default=False),
]
Info = Annotated[bool, typer.Option("--info", help="Print what the settings are composed of, and stop.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Prefect's log and the trainer's too.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"millrace {metadata.version('millrace')}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Handle `--version`; the commands handle everything else."""


@command(
    "commands.run:train",
    "millrace train experiment=countdown_demo trainer.total_steps=40",
    name="train",
    about="The same training without Prefect. Data, warm start, chunks, validation, weights.",
)
@command(
    "commands.run:run",
    "millrace run experiment=countdown_demo",
    "millrace run experiment=countdown_demo seed=2 trainer.total_steps=40",
    "millrace run experiment=debug --dry-run",
)
def run(
    settings: Settings = None,
    root: RootOfRun = None,
    fork: Fork = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
    cfg: Cfg = None,
    info: Info = False,
    verbose: Verbose = False,
) -> None:
    """Run an experiment from dataset to report, as Prefect flows. What is finished is not done again."""


@command(
    "sweep.command:sweep",
    "millrace sweep debug_grid --dry-run",
    "millrace sweep my_sweep.yaml trainer.total_steps=40",
    "millrace sweep countdown_lr --max-hours 8",
)
def sweep(
    spec: Annotated[
        str,
        typer.Argument(
            help="A name in conf/sweep, or the path of a file; see docs/sweeps.md.", autocompletion=complete.sweeps
        ),
    ],
    overrides: Settings = None,
    max_runs: Annotated[int | None, typer.Option(min=1, help="Runs to work on at most.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Training steps to spend at most.")] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0.001, max=100_000, help="Begin no run after so many hours.")
    ] = None,
    root: RootOfRun = None,
    on_workers: Annotated[bool, typer.Option("--on-workers", help="Send the runs to the work pool.")] = False,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
    verbose: Verbose = False,
) -> None:
    """Run many points of settings, several seeds each. They are compared; what is finished is not done again."""


@command("commands.run:validate", "millrace validate experiment=countdown_demo --checkpoint best")
def validate(
    settings: Settings = None,
    root: RootOfRun = None,
    checkpoint: Annotated[str, typer.Option(help="Which one: start, last, best, or a step.")] = "last",
    verbose: Verbose = False,
) -> None:
    """Judge a checkpoint of a run on the held-out problems."""


@command(
    "commands.evaluate:run",
    "millrace eval artifacts/runs/<run id> --suite gsm8k",
    "millrace eval <run id>@start <run id>@best --suite gsm8k --suite my_suite.yaml",
    "millrace eval /models/SmolLM2-135M-Instruct --suite gsm8k rollout.engine=vllm",
    name="eval",
)
def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_RUN... [KEY=VALUE]...",
            help="Model directories, or runs by folder or id with @last (taken if not given), @best, @start or a step; "
            "settings for all of them.",
            autocompletion=complete.runs_and_settings,
        ),
    ],
    suites: Annotated[
        list[str],
        typer.Option(
            "--suite",
            help="A name in conf/suite, or the path of a file. May be repeated.",
            autocompletion=complete.suites,
        ),
    ],
    root: RootOfRun = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
) -> None:
    """Judge models or checkpoints on suites. Figures have intervals; each model is paired with the first."""


@command("commands.run:report", "millrace report experiment=countdown_demo", "millrace report artifacts/runs/<run id>")
def report(run: Run, root: RootOfRun = None) -> None:
    """Write the report of a run: pages in HTML, their figures in JSON and pictures."""


@command(
    "commands.checkpoints:checkpoints",
    "millrace checkpoints experiment=countdown_demo --verify",
    "millrace checkpoints artifacts/runs/<run id> --export model --checkpoint best",
)
def checkpoints(
    run: Run,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte. Exit code 1 if one is broken.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write one as a transformers directory to this folder.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Which one to export: last, best, or a step.", show_default="last")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Delete those that the retention rule does not keep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with all metrics of each.")] = False,
    root: RootOfRun = None,
) -> None:
    """Show the checkpoints of a run. Step, size, scores, the last and the best, and whether they are whole."""


@command("commands.runs:runs", "millrace runs", "millrace runs countdown --state failed --state lost")
def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...",
            help="Only runs with this in their id; none: all.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Only these: running, waiting, stopping, finished, stopped, failed, lost, 'not begun'."
        ),
    ] = None,
    as_json: AsJson = False,
    root: Root = ARTIFACTS,
) -> None:
    """List the runs of a root. State, step, score, age, size, and what each waits for or why it failed."""


@command("commands.runs:logs", "millrace logs countdown_demo-s1 -f")
def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the run ends.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10**9, help="Last lines to begin with.")] = 40,
    root: RootOfRun = None,
) -> None:
    """Show the log of a run's newest trainer process."""


@command("commands.runs:stop", "millrace stop countdown_demo-s1")
def stop(run: Run, root: RootOfRun = None) -> None:
    """Tell a run to stop, and wait until it has. It finishes its step and saves; the same command goes on."""


@command("commands.doctor:doctor", "millrace doctor")
def doctor(as_json: AsJson = False, root: Root = ARTIFACTS) -> None:
    """Look at what a run needs of this machine. Each line is ok, a warning or an error; exit code 1 for an error."""


@command("commands.new:new", "millrace new task my_task", "millrace new experiment mine")
def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="task|experiment|scorer",
            help="What to write.",
            autocompletion=complete.one_of("task", "experiment", "scorer"),
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the file, without its ending.")],
) -> None:
    """Write a task, experiment or scorer to begin with into this folder. It runs as it is."""


Step = Annotated[str, typer.Option(metavar="N|LOW..HIGH", help="Only answers of these steps.")]
Prompt = Annotated[int | None, typer.Option(help="Only answers to this prompt (prompt_id).")]
ScoreRange = Annotated[str, typer.Option("--score", metavar="X|LOW..HIGH", help="Only answers with such a score.")]
Search = Annotated[str, typer.Option(help="Only answers with this text in them.")]
KINDS = ("all", "training", "validation")
Kind = Annotated[
    str, typer.Option(help="all, training or validation.", metavar="KIND", autocompletion=complete.one_of(*KINDS))
]
SORTS = ("step", "score", "advantage", "num_tokens", "logprob", "gap", "prompt_id", "change")


@command(
    "commands.rollouts:rollouts",
    "millrace rollouts countdown_demo-s1 --sort -score",
    "millrace rollouts countdown_demo-s1 --step 20..40 --score ..0 --search '<answer>' --json",
)
def rollouts(
    run: Run,
    step: Step = "",
    prompt: Prompt = None,
    score: ScoreRange = "",
    search: Search = "",
    kind: Kind = "all",
    sort: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(SORTS[:-1])} or {SORTS[-1]}; with - the highest first.",
            autocompletion=complete.one_of(*SORTS),
        ),
    ] = "step",
    limit: Annotated[int, typer.Option(min=0, help="Answers at most; 0: all.")] = 20,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --json: also what is known of each token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    root: RootOfRun = None,
) -> None:
    """Show the answers that a run has on record, of training and of validations."""


@command(
    "commands.rollouts:rescore",
    "millrace rescore countdown_demo-s1 --scorer my_scorer:score --kind training",
    "millrace rescore countdown_demo-s1 --scorer my_scorer:score 'reward.weights={correct: 1, format: 0.2}'",
)
def rescore(
    run: Run,
    scorer: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="The other scorer.")],
    step: Step = "",
    prompt: Prompt = None,
    score: ScoreRange = "",
    search: Search = "",
    kind: Kind = "all",
    as_json: AsJson = False,
    root: RootOfRun = None,
) -> None:
    """Score a run's answers by another scorer. Says what would have changed; nothing is written."""


@command(
    "commands.rollouts:audit", "millrace audit countdown_demo-s1", "millrace audit my-run --scorer my_scorer:score"
)
def audit(
    run: Run,
    scorer: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Another scorer than the run's own.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    root: RootOfRun = None,
) -> None:
    """Look for holes in a reward. Gives the scorer answers that must not score; exit code 1 if some do."""


@command("commands.run:make_data", "millrace data make experiment=countdown_demo", name="make", of=data_app)
def data_make(settings: Settings = None, root: RootOfRun = None) -> None:
    """Make and filter the dataset of an experiment."""


@command(
    "commands.run:pass_rates",
    "millrace data pass-rates experiment=countdown_demo pass_rates.samples=8",
    "millrace data pass-rates experiment=countdown_demo pass_rates.samples=8 'pass_rates.keep=[0.1,0.9]'",
    name="pass-rates",
    of=data_app,
)
def data_pass_rates(settings: Settings = None, root: RootOfRun = None, verbose: Verbose = False) -> None:
    """Measure how often an experiment's start model solves each training row. Data and model are made if missing."""


@command(
    "commands.run:inspect",
    "millrace data inspect artifacts/datasets/<fingerprint> --rows 5",
    name="inspect",
    of=data_app,
)
def data_inspect(
    path: Annotated[Path, typer.Argument(help="A parquet file of a dataset, or its folder.")],
    num_rows: Annotated[int, typer.Option("--rows", min=0, help="Rows to show of each file, chosen at random.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the rows.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show a dataset: rows, counts, lengths, duplicates."""


@command(
    "commands.tracking:compare",
    "millrace compare countdown_demo-s1 countdown_demo-s2",
    "millrace compare --search \"tags.task = 'countdown' and params.seed = '1'\"",
)
def compare(
    runs: Runs = None,
    search: Annotated[str, typer.Option(help="Also the runs that this finds in MLflow, in MLflow's language.")] = "",
    root: Root = ARTIFACTS,
    uri: Uri = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment to search (tracking.experiment).")] = "millrace",
) -> None:
    """Compare runs by settings, curves, figures and costs. The first one is the measure; figures have intervals."""


@command("commands.tracking:sync", "millrace sync", "millrace sync countdown_demo-s1 --uri http://127.0.0.1:5000")
def sync(runs: Runs = None, root: Root = ARTIFACTS, uri: Uri = None) -> None:
    """Deliver to MLflow what it has not got of these runs' journals, or of all. Doing it again changes nothing."""


@command("commands.tracking:ui", "millrace ui --port 5000")
def ui(
    root: Root = ARTIFACTS,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Of the page; none: a free one.")] = None,
) -> None:
    """Serve MLflow's pages of the root's store, and that of the answers of its runs, until interrupted."""


@command("commands.tracking:gc", "millrace gc --dry-run")
def gc(
    root: Root = ARTIFACTS,
    uri: Uri = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove from MLflow the artifacts of runs deleted there. Registered models and metrics stay."""


@command("commands.runs:slots", "millrace slots", "millrace slots --set 2", "millrace slots --gpus 0,1 --per-gpu 2")
def slots(
    root: Root = ARTIFACTS,
    number: Annotated[
        int | None, typer.Option("--set", min=0, max=MOST_SLOTS, help="Ranks that train at a time; 0: any number.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="I,J", help="A slot for each of these GPUs instead.")] = None,
    per_gpu: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Slots of each GPU, for runs that fit side by side.", show_default="1"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or set how many ranks train at a time under a root. Who holds which slot, who waits, in their order."""


Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Else the one it had, or a free one.")]


@command("stack.command:up", "millrace up", "millrace up --ray --workers 2")
def up(
    root: Root = ARTIFACTS,
    ray: Annotated[bool, typer.Option("--ray", help="Also a Ray head.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Prefect workers.")] = 1,
    prefect_port: Port = None,
    mlflow_port: Port = None,
    notify_url: Annotated[
        str | None,
        typer.Option(envvar="MILLRACE_NOTIFY_URL", help="A webhook that is called when a run fails or pauses."),
    ] = None,
    notify_block: Annotated[
        str | None,
        typer.Option(
            envvar="MILLRACE_NOTIFY_BLOCK",
            metavar="TYPE/NAME",
            help="A notification block in Prefect (Slack, mail, ...) that is told the same.",
        ),
    ] = None,
) -> None:
    """Start Prefect, MLflow and a worker on this machine. The deployments are applied.

    Other databases than files under the root: PREFECT_API_DATABASE_CONNECTION_URL and MLFLOW_BACKEND_STORE_URI in the
    environment (docs/stack.md).
    """


@command(
    "stack.own:deploy",
    "millrace deploy mine.yaml",
    "millrace deploy mine.yaml seed=2 --name mine-2 --cron '0 3 * * *' --timezone Europe/Berlin",
)
def deploy(
    experiment: Annotated[str, typer.Argument(metavar="FILE", help="An experiment's file, or one's name.")],
    overrides: Settings = None,
    name: Annotated[str | None, typer.Option(help="Of the deployment.", show_default="the experiment's name")] = None,
    cron: Annotated[
        str | None, typer.Option(metavar="'M H D M W'", help="When it runs by itself; none: as before, at first never.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="Of --cron.")] = "UTC",
    root: RootOfRun = None,
) -> None:
    """Make a deployment of an experiment in the stack that is up, or bring it up to date. It runs in its worker."""


@command("stack.command:down", "millrace down")
def down(root: Root = ARTIFACTS) -> None:
    """End what `millrace up` has started. Runs save, and go on after the next `up`."""


@command("stack.command:status", "millrace status")
def status(root: Root = ARTIFACTS) -> None:
    """Show what `millrace up` has started, and whether it answers. Exit code 1 if something is missing."""


def main() -> NoReturn:
    """Entry point: a mistake is a message, not a traceback."""
    open_standard_streams()
    look_here_too()
    leave(app)


def open_standard_streams() -> None:
    """Open the streams that whoever started this process has closed, or the next file would be the output of its
    children; and print what the terminal's encoding lacks as an escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 until the end
        elif mode == "w":
            getattr(sys, name).reconfigure(errors="backslashreplace")


def look_here_too() -> None:
    """Find a task in the folder that the command was started in, but never a `data.py` there in place of our own."""
    sys.path.append(str(SOURCE_FOLDER))
    with suppress(FileNotFoundError):  # it is deleted, as each command says
        sys.path.append(str(Path.cwd()))


def leave(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process as soon as its outputs are flushed and its exit handlers have run.

    To take the interpreter apart with all that a run has imported takes another 3 s, and nobody needs it.
    """
    collect_rarely()
    signal.signal(signal.SIGTERM, _Terminated())
    codes: list[int] = []

    def end() -> None:
        logging.shutdown()
        said_all = _flushed()
        with suppress(OSError):
            sys.stderr.flush()
        if codes:  # else it has failed in a way that nobody foresaw
            os._exit(codes[0] if said_all else codes[0] or EXIT_FAILED)

    atexit.register(end)  # the first that is registered is called last
    codes.append(exit_code(command))
    if (url := os.environ.get("PREFECT_API_URL")) and "prefect" in sys.modules:
        from flows.server.api import answers

        if not answers(url):  # at its end Prefect waits for a server that takes the last events
            print(f"Prefect was not told of the end, since no server answers at {url}", file=sys.stderr)
            end()
    sys.exit(codes[0])


def _flushed() -> bool:
    """Whether all that was printed is written: a disk may be full, a reader gone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            with suppress(OSError):
                _told(f"not all of the output could be written: {error}", EXIT_FAILED)
        return False
    return True


class _Terminated:
    """Turns SIGTERM into an interrupt at the keyboard. Several within `ONE_WISH_S` are one."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._asked_at > ONE_WISH_S:
            self._asked_at = now
            raise KeyboardInterrupt


def exit_code(command: Callable[[], object]) -> int:
    """Run a command; what the shell is told."""
    try:
        command()
    except SystemExit as exit:
        if exit.code == CLICK_INTERRUPTED:
            return _told(INTERRUPTED, EXIT_RESUMABLE)
        return exit.code if isinstance(exit.code, int) else EXIT_FAILED
    except MillraceError as error:
        failed = EXIT_WRONG_SETTINGS if isinstance(error, ConfigError) else EXIT_FAILED
        return _told(error, EXIT_RESUMABLE if isinstance(error, RESUMABLE) else failed)
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        file = error.filename2 or error.filename or "the output, or a file"
        return _told(f"{file}: {error.strerror}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _told(INTERRUPTED, EXIT_RESUMABLE)
    return 0


def _told(message: object, code: int) -> int:
    from flows.progress import printable  # in a start that ends well nobody needs it

    print(printable(str(message)), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
