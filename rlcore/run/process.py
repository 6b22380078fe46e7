"""The trainer process: one for a run, started by a flow or by hand.

    python -m rlcore.run.process --run RUN_DIR [--commands-fd N --replies-fd M --lock-fd L]

With the descriptors it serves commands, one JSON object a line, and answers in the same form:

    {"command": "warm_start"}
    {"command": "pass_rates"}                                 # of the training rows, by the start model
    {"command": "train", "to_step": 40}                       # "settle": false: the next command waits for the save
    {"command": "validate", "checkpoint": "start" | "last" | "best" | "step-000040", "name": "before"}
    {"command": "evaluate"}                                   # the model of step 0 on the suites, and train nothing
    {"command": "export", "checkpoint": "last"}
    {"command": "close"}

    {"event": "progress", ...}  {"event": "note", "text": ...}
    {"event": "done", "command": ..., "result": {...}}
    {"event": "error", "command": ..., "type": ..., "message": ...}

Without them it goes through all commands of a run, and prints its answers. Exit codes: 0 done, 75 saved and can go on,
1 failed. SIGTERM and SIGINT finish the step and save; a second one ends at once (`rlcore.run.stop`). A phase that hangs
ends the process too (`rlcore.run.watchdog`): the next one goes on from the last checkpoint.
"""

import argparse
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import EXIT_RESUMABLE, RESUMABLE, DataError, MillraceError, StopRequestedError
from rlcore.run.layout import RunLayout
from rlcore.run.session import Session
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Report, end_at_once, say_and_end
from rlcore.tracking.lineage import read_origin
from rlcore.user_code import working_by

EXIT_DONE, EXIT_FAILED = 0, 1
POLL_S = 0.25
"""Seconds between two checks whether a stop was asked for, while there is no command."""

log = logging.getLogger("rlcore.run.process")


class Channel:
    """Commands in, replies out; a reader that has gone away is no error of the training."""

    def __init__(self, commands_fd: int, replies_fd: int) -> None:
        self._commands_fd = commands_fd
        self._read = b""
        self._replies = os.fdopen(replies_fd, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def commands(self, stop: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
        """Commands until the other side closes, or a stop is asked for while there is none."""
        while not stop():
            line, found, rest = self._read.partition(b"\n")
            if found:
                self._read = rest
                yield json.loads(line)
                continue
            # Not a blocking read: Python takes that up again after a signal, and would not check for a stop.
            if not select.select([self._commands_fd], [], [], POLL_S)[0]:
                continue
            content = os.read(self._commands_fd, 1 << 16)
            if not content:
                return
            self._read += content

    def send(self, event: Mapping[str, object]) -> None:
        """Send one event."""
        try:
            with self._lock:  # the watch speaks from a thread of its own
                self._replies.write(json.dumps(event) + "\n")
        except (BrokenPipeError, ValueError):
            log.warning("nobody reads the replies any more; going on until the next checkpoint")


COMMANDS: Mapping[str, Callable[..., Mapping[str, object]]] = {
    "warm_start": Session.warm_start,
    "pass_rates": Session.measure_pass_rates,
    "train": Session.train,
    "validate": Session.validate,
    "evaluate": Session.evaluate,
    "export": Session.export,
}
"""What is called by a command, with its further entries as arguments."""


def whole_run(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    """The commands of a run, in place of a flow's."""
    yield {"command": "warm_start"}
    if config.pass_rates.is_wanted:
        yield {"command": "pass_rates"}
    yield {"command": "train", "to_step": config.trainer.total_steps}
    yield {"command": "validate", "checkpoint": "start", "name": "before"}
    yield {"command": "validate", "checkpoint": "last", "name": "after"}
    yield {"command": "export", "checkpoint": "last"}


def serve(session: Session, commands: Iterator[Mapping[str, Any]], report: Report, stop: StopFlag) -> int:
    """Answer commands until `close`, the end of them, or an error that the process cannot go on from."""
    for command in commands:
        arguments = dict(command)
        name = str(arguments.pop("command", None))
        if stop() or name == "close":
            break
        try:
            result = COMMANDS[name](session, **arguments)
        except StopRequestedError as wish:
            log.warning("%s", wish)
            report(_error(name, wish))
            return EXIT_RESUMABLE
        except Exception as error:
            log.exception("%s failed", name)
            report(_error(name, session.fault(error)))
            session.fail()
            return _exit_code(error)
        report({"event": "done", "command": name, "result": result})
    if stop():  # between two commands: training may be some steps beyond the last checkpoint
        try:
            report(_error("stop", StopRequestedError(session.save_finished())))
        except Exception as error:
            log.exception("the last finished step is not saved")
            report(_error("stop", session.fault(error)))
        return EXIT_RESUMABLE
    return EXIT_DONE


def _exit_code(error: Exception) -> int:
    return EXIT_RESUMABLE if isinstance(error, RESUMABLE) else EXIT_FAILED


def _error(command: str, error: Exception) -> Mapping[str, object]:
    message = str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
    return {"event": "error", "command": command, "type": type(error).__name__, "message": message}


def run(run_dir: Path, channel: Channel | None, report: Report, *, is_locked: bool = False) -> int:
    """Serve a run until it is stopped, or without a channel go through it; the exit code."""
    stop = StopFlag(lambda: end_at_once(EXIT_RESUMABLE))
    stop.install()
    return run_one(run_dir, channel, report, stop, is_locked=is_locked)


def run_one(run_dir: Path, channel: Channel | None, report: Report, stop: StopFlag, *, is_locked: bool = False) -> int:
    """Serve or go through a run; the exit code. `is_locked`: see `Session`."""

    def give_up(error: MillraceError) -> None:
        """End the process with this error: a phase or a stop lasts too long. Called from a thread."""

        def say() -> None:
            log.error("%s", error)
            report(_error("watch", error))

        say_and_end(say, _exit_code(error))

    try:
        if (origin := read_origin(run_dir)) is None:
            raise DataError(f"{run_dir / RUN_FILE}: is not there. Name the folder of a run that `millrace train` began")
        config = origin.settings
        layout = RunLayout(Path(config.paths.root).resolve(), run_dir.resolve())
        session_here = Session(config, layout, report=report, stop=stop, give_up=give_up, is_locked=is_locked)
        with working_by(layout.code), session_here as session:
            commands = whole_run(config) if channel is None else channel.commands(stop)
            return serve(session, commands, report, stop)
    except MillraceError as error:
        log.error("%s", error)
        report(_error("start", error))
        return _exit_code(error)


def main() -> None:
    """Entry point of `python -m rlcore.run.process`."""
    parser = argparse.ArgumentParser(description="The trainer process of a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with run.json in it")
    parser.add_argument("--commands-fd", type=int, help="descriptor from which commands are read")
    parser.add_argument("--replies-fd", type=int, help="descriptor to which events are written")
    parser.add_argument("--lock-fd", type=int, help="descriptor of the run's lock, which this process inherits")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    served = given.commands_fd is not None and given.replies_fd is not None
    channel = Channel(given.commands_fd, given.replies_fd) if served else None
    report = _print_event if channel is None else channel.send
    code = run(given.run, channel, report, is_locked=given.lock_fd is not None)
    sys.stdout.flush()
    sys.exit(code)


def _print_event(event: Mapping[str, object]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
