"""The trainer process of a run: it serves commands on one descriptor and sends events on another.

    python -m rlcore.run.process --run RUN_DIR --commands-fd N --replies-fd M [--lock-fd L]

A command is a method of `Session` with its arguments, one JSON object a line; events are sent in the same form:

    {"command": "train", "to_step": 40}
    {"command": "validate", "checkpoint": "start" | "last" | "best" | "step-000040", "name": "before"}
    {"command": "close"}

    {"event": "progress", ...}  {"event": "note", "text": ...}
    {"event": "done", "command": ..., "result": {...}}
    {"event": "error", "command": ..., "type": ..., "message": ...}

The stages of a run name its commands (`flows.stages`). Exit codes: 0 done, 75 saved and resumable, 1 failed.
SIGTERM and SIGINT finish the step and save; a second one ends the process at once (`rlcore.run.stop`). A phase that
hangs ends it too (`rlcore.run.watchdog`): the next process resumes from the last checkpoint.
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

from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import EXIT_RESUMABLE, RESUMABLE, DataError, MillraceError, StopRequestedError
from rlcore.run.layout import RunLayout
from rlcore.run.session import Session
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Report, exit_immediately, report_and_exit
from rlcore.tracking.lineage import read_origin
from rlcore.user_code import run_code

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


def serve(session: Session, commands: Iterator[Mapping[str, Any]], report: Report, stop: StopFlag) -> int:
    """Serve commands until `close`, the end of them, or an error, which ends the process."""
    for command in commands:
        arguments = dict(command)
        name = str(arguments.pop("command", None))
        if stop() or name == "close":
            break
        try:
            result = getattr(session, name)(**arguments)
        except StopRequestedError as wish:
            log.warning("%s", wish)
            report(_error(name, wish))
            return EXIT_RESUMABLE
        except Exception as error:
            log.exception("%s failed", name)
            report(_error(name, session.record_failure(error)))
            session.fail()
            return _exit_code(error)
        report({"event": "done", "command": name, "result": result})
    if stop():  # between two commands: training may be some steps beyond the last checkpoint
        try:
            report(_error("stop", StopRequestedError(session.save_finished())))
        except Exception as error:
            log.exception("the last finished step is not saved")
            report(_error("stop", session.record_failure(error)))
        return EXIT_RESUMABLE
    return EXIT_DONE


def _exit_code(error: Exception) -> int:
    return EXIT_RESUMABLE if isinstance(error, RESUMABLE) else EXIT_FAILED


def _error(command: str, error: Exception) -> Mapping[str, object]:
    message = str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
    return {"event": "error", "command": command, "type": type(error).__name__, "message": message}


def run(run_dir: Path, channel: Channel, stop: StopFlag, *, is_locked: bool = False) -> int:
    """Serve a run until it is stopped; return the exit code. `is_locked`: see `Session`."""
    report = channel.send

    def give_up(error: MillraceError) -> None:
        """End the process with this error: a phase or a stop lasts too long. Called from a thread."""

        def say() -> None:
            log.error("%s", error)
            report(_error("watch", error))

        report_and_exit(say, _exit_code(error))

    try:
        if (origin := read_origin(run_dir)) is None:
            raise DataError(f"{run_dir / RUN_FILE}: is not there. Name the folder of a run that `millrace train` began")
        config = origin.settings
        layout = RunLayout(Path(config.paths.root).resolve(), run_dir.resolve())
        session_here = Session(config, layout, report=report, stop=stop, abandon=give_up, is_locked=is_locked)
        with run_code(layout.code), session_here as session:
            return serve(session, channel.commands(stop), report, stop)
    except MillraceError as error:
        log.error("%s", error)
        report(_error("start", error))
        return _exit_code(error)


def main() -> None:
    """Entry point of `python -m rlcore.run.process`."""
    parser = argparse.ArgumentParser(description="The trainer process of a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with run.json in it")
    parser.add_argument("--commands-fd", type=int, required=True, help="descriptor from which commands are read")
    parser.add_argument("--replies-fd", type=int, required=True, help="descriptor to which events are written")
    parser.add_argument("--lock-fd", type=int, help="descriptor of the run's lock, which this process inherits")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = StopFlag(lambda: exit_immediately(EXIT_RESUMABLE))
    stop.install()
    channel = Channel(given.commands_fd, given.replies_fd)
    code = run(given.run, channel, stop, is_locked=given.lock_fd is not None)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
