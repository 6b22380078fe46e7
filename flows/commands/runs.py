"""The commands `millrace runs`, `logs`, `stop` and `slots`. They do not use Prefect or MLflow."""

import json
import re
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import ARTIFACTS, AsJson, OptionalRoot, Root, Run, choices, complete_runs
from rlcore.errors import ConfigError, DataError, RunInUseError

if TYPE_CHECKING:
    from flows.work.slots import SlotRequest, SlotState
    from rlcore.storage.locks import Holder

POLL_S = 0.2
MAX_SLOTS = 1_024  # each slot of a workspace is a lock on a file
STATES = ("running", "waiting", "stopping", "finished", "stopped", "failed", "lost", "not begun")
"""The values of `flows.work.runs.State`. They are repeated here, because the import of that module is slow."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))  # seconds and names of units, largest first


def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...",
            help="Only runs whose id contains this text; default: all.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option("--state", help=f"Only {', '.join(STATES)} runs.", autocompletion=choices(*STATES)),
    ] = None,
    as_json: AsJson = False,
    root: Root = ARTIFACTS,
) -> None:
    """List the runs of a workspace with state, step, score, age and size. A note explains why a run waits or failed.

    Examples:
      millrace runs
      millrace runs countdown --state failed --state lost
    """
    from flows.progress import print_table
    from flows.work.open_run import EVALUATION
    from flows.work.runs import all_runs, status_of
    from rlcore.storage.disk import size

    for state in states or ():
        if state not in STATES:
            raise typer.BadParameter(f"{state} is not one of {', '.join(STATES)}", param_hint="--state")
    root = root.resolve()
    chosen = [path for path in all_runs(root) if not names or any(text in path.name for text in names)]
    found = sorted(map(status_of, chosen), key=lambda one: -one.changed)
    found = [one for one in found if not states or one.state in states]
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2))
        return
    if not found:
        such = "such " if names or states else ""
        print(f"{root / 'runs'}: no {such}run; --root names another workspace", file=sys.stderr)
        return
    rows = []
    for one in found:
        steps = f"{one.step}/{'?' if one.total_steps is None else one.total_steps}"
        if one.name == EVALUATION and not one.step:
            steps = "-"  # an evaluation has no steps
        figures = ("" if figure is None else f"{figure:.3f}" for figure in (one.score, one.reward))
        age = format_age(time.time() - one.changed)
        rows.append((one.run_id, one.state, steps, *figures, age, size(one.size_bytes), one.note))
    print_table(("run", "state", "step", "held-out", "reward", "age", "size", "note"), rows)


def format_age(seconds: float) -> str:
    """Return a duration in seconds as a whole number of the largest suitable unit.

    >>> format_age(7_300), format_age(45.2), format_age(0.1)
    ('2 h', '45 s', '0 s')
    """
    unit_s, unit = next((one for one in AGES if seconds >= one[0]), AGES[-1])
    return f"{max(0, int(seconds / unit_s))} {unit}"


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10**9, help="Number of last lines.")] = 40,
    root: OptionalRoot = None,
) -> None:
    """Show the log of a run's newest trainer process.

    Examples:
      millrace logs countdown_demo-s1 -f
    """
    from flows.work.runs import find_run, worker_of
    from flows.work.trainer import LogTail, trainer_logs

    _, layout = find_run(run, root)
    if not (known := trainer_logs(layout.logs)):
        raise DataError(
            f"{layout.logs}: holds no trainer's log: none was started for run {layout.run_dir.name} yet. Earlier "
            "stages print where the run was started; millrace runs shows its state."
        )
    tail = LogTail(known[max(known)])
    print(f"{tail.path}:")
    last = deque[str](maxlen=num_lines)
    while not tail.is_at_end():
        last.extend(tail.new_lines())
    for line in [*last, *([tail.rest] if tail.rest and not follow else [])]:
        _print_line(line)
    with suppress(KeyboardInterrupt):  # the usual way to stop following
        while follow:
            is_over = worker_of(layout.run_dir) is None  # read before the last lines, like `newest`
            known = trainer_logs(layout.logs)
            newest = known[max(known)] if known else tail.path
            while not tail.is_at_end():
                for line in tail.new_lines():
                    _print_line(line)
            if tail.rest and (newest != tail.path or is_over):
                _print_line(tail.rest)
            if newest != tail.path:
                tail = LogTail(newest)
                print(f"{newest}:", flush=True)
            elif is_over:
                return
            else:
                time.sleep(POLL_S)


def _print_line(line: str) -> None:
    """Print a line without Ray's color codes. Escape other control characters, which a response may contain."""
    from flows.progress import printable

    print(printable(_COLOUR.sub("", line)), flush=True)


def stop(run: Run, root: OptionalRoot = None) -> None:
    """Let a run finish its current step, save and stop. The command waits until the run has ended.

    Repeat the run's command to resume the run.

    Examples:
      millrace stop countdown_demo-s1
    """
    from flows.work.open_run import END_WAIT_S
    from flows.work.runs import SAME_COMMAND, find_run, is_stop_requested, resume_hint, worker_of

    config, layout = find_run(run, root)
    worker = worker_of(layout.run_dir)
    name = layout.run_dir.name
    if worker is None:
        print(f"run {name}: no process works on it, there is nothing to stop ({_last_saved_step(layout.run_dir)})")
        return
    if is_stop_requested(layout.run_dir, worker):
        print(f"run {name}: stop requested already; waiting for {worker}", flush=True)
    else:
        _request_stop(layout.run_dir, worker)
        print(f"run {name}: requested {worker} to finish its step and save", flush=True)
    deadline = time.monotonic() + config.runtime.stop_deadline_s + END_WAIT_S
    while (still := worker_of(layout.run_dir)) is not None:
        if time.monotonic() > deadline:
            raise RunInUseError(
                f"run {name}: {still} still works on it, beyond runtime.stop_deadline_s. A second signal ends it "
                f"immediately, and its newest checkpoint stays: kill {still.pid}"
            )
        time.sleep(POLL_S)
    how = resume_hint(layout.run_dir)
    command = f":\n  {worker.command}" if how == SAME_COMMAND else ""
    print(f"run {name}: stopped; {_last_saved_step(layout.run_dir)}; {how}{command}")


def _request_stop(run_dir: Path, worker: "Holder") -> None:
    """Send SIGTERM to the process that holds the run's lock. Raises RunInUseError if this is not possible."""
    import psutil

    from flows.work.open_run import record_stop_request
    from flows.work.runs import STOP_FILE

    process = worker.process()
    if process is None and worker.host == socket.gethostname() and not psutil.pid_exists(worker.pid):
        return  # it has ended, so its trainer was signalled and saves
    if process is None:
        where = "here" if worker.host == socket.gethostname() else f"on {worker.host}"
        raise RunInUseError(
            f"run {run_dir.name}: is in use by {worker}, and that process cannot be signalled from "
            f"{socket.gethostname()}. Stop it {where}, by its command or in Prefect."
        )
    record_stop_request(run_dir, worker)
    try:
        process.send_signal(signal.SIGTERM)
    except psutil.Error as error:
        (run_dir / STOP_FILE).unlink(missing_ok=True)  # no stop was requested: its owner's request must be sent
        if not isinstance(error, psutil.NoSuchProcess):
            raise RunInUseError(
                f"run {run_dir.name}: {worker} is not yours, so no stop was requested. Stop it as its owner."
            ) from error


def _last_saved_step(run_dir: Path) -> str:
    from rlcore.checkpoint.catalog import scan

    known = scan(run_dir / "checkpoints").checkpoints
    return f"step {known[-1].step} is saved" if known else "it has no checkpoint yet"


def slots(
    root: Root = ARTIFACTS,
    number: Annotated[
        int | None, typer.Option("--set", min=0, max=MAX_SLOTS, help="Ranks that train concurrently; 0: any number.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="I,J", help="A slot for each of these GPUs instead.")] = None,
    per_gpu: Annotated[
        int | None, typer.Option(min=1, max=64, help="Slots of each GPU, for runs that share one.", show_default="1")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or set the slots of a workspace, and list the runs that hold or await slots. A rank needs a slot to train.

    Examples:
      millrace slots
      millrace slots --set 2
      millrace slots --gpus 0,1 --per-gpu 2
    """
    from flows.work.slots import Slots

    found = Slots(root.resolve())
    if number is not None and gpus is not None:
        raise ConfigError(f"--set {number} and --gpus {gpus}: give one of them; --gpus counts its slots itself")
    if per_gpu is not None and gpus is None:
        raise ConfigError(f"--per-gpu {per_gpu}: is the number of slots of each of --gpus I,J; give that too")
    if number is not None:
        found.set_devices([""] * number)
    elif gpus is not None:
        parts = [part.strip() for part in gpus.split(",")]
        if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
            raise ConfigError(
                f"--gpus: must be different numbers of GPUs, such as 0,1 (nvidia-smi -L lists them); got {gpus}"
            )
        devices = [gpu for gpu in parts for _ in range(per_gpu or 1)]
        if len(devices) > MAX_SLOTS:
            raise ConfigError(f"--gpus: must give {MAX_SLOTS:,} slots at most; got {len(devices):,}. Name fewer")
        found.set_devices(devices)
    state = found.read_state()
    if not as_json:
        _show_slots(state, root)
        return
    holders = {str(number): asdict(holder) for number, holder in state.holders.items()}
    waiting = [asdict(request) | {"reason": state.wait_reason(request)} for request in state.waiting]
    print(json.dumps({"devices": state.devices, "holders": holders, "waiting": waiting}))


def _show_slots(state: "SlotState", root: Path) -> None:
    from flows.progress import print_table

    if not state.devices:
        print(
            f"{root}: no slots, so any number of runs train concurrently; --set N or --gpus I,J makes some",
            file=sys.stderr,
        )
        return

    def cells(request: "SlotRequest") -> tuple[str, str, str]:
        return request.run_id, str(request.priority), format_age(time.time() - request.since)

    rows = []
    for number, device in enumerate(state.devices):
        holder = state.holders.get(number)
        taken = ("free", "", "", "") if holder is None else ("taken", *cells(holder))
        rows.append((str(number), device, *taken, ""))
    rows += [("", "", "waiting", *cells(one), state.wait_reason(one)) for one in state.waiting]
    print_table(("slot", "GPU", "state", "run", "priority", "age", "note"), rows)
