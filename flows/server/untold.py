"""The end of a command that was told to end, or has done its work, while its Prefect server is gone.

Prefect's engine tells its server of every end, and asks again for a quarter of an hour; at the interpreter's end it
sends what is left of events and logs, and waits for each. Nobody who has pressed Ctrl-C waits for that, and nothing is
lost by not telling. Only for a process that is a command's own: see `own_process`.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

WISHES = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 15.0
"""Seconds without a server before the process ends, counted from the end of a trainer that saves."""
POLL_S = 0.5

_is_own = False
_url: str | None = None
"""The server of the last flow of this process."""


def own_process() -> None:
    """Say that this process is a command and nothing else, so that it may be ended."""
    global _is_own
    _is_own = True


@contextmanager
def not_kept_by(url: str, leave: Callable[[], object]) -> Iterator[None]:
    """From a SIGINT or SIGTERM inside the block on, a server at `url` that is gone for `PATIENCE_S` does not keep this
    process. `leave` is called before its end. A trainer that was told to stop is waited for; another saves by itself.
    """
    global _url
    if not _is_own:
        yield
        return
    _url = url
    # Whoever handles the signal - we, Python, Prefect - its number comes through here too.
    hears, told = socket.socketpair()
    told.setblocking(False)
    threading.Thread(target=_watch, args=(hears, url, leave), name="untold", daemon=True).start()
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        told.close()  # the watch ends, or goes on to the end of the process where it has heard a wish


def end_without_server(end: Callable[[], object]) -> None:
    """From here on, where the work is done, a server that is gone for `PATIENCE_S` does not keep this process from its
    `end`, which is called in another thread while Prefect waits."""

    def watch(url: str) -> None:
        _wait_until_gone(url)
        _say(f"Prefect was not told of the end, since no server answers at {url}")
        end()

    if _url is not None:
        import flows.server.api
        import flows.work.trainer  # noqa: F401 a module of theirs cannot be imported once the interpreter ends

        threading.Thread(target=watch, args=(_url,), name="untold-end", daemon=True).start()


def _watch(hears: socket.socket, url: str, leave: Callable[[], object]) -> None:
    with hears:  # open to the end: Python complains of a signal whose number finds no reader
        while numbers := hears.recv(64):
            if any(number in WISHES for number in numbers):
                _end_where_no_server_is(url, leave)


def _end_where_no_server_is(url: str, leave: Callable[[], object]) -> None:
    from rlcore.errors import EXIT_RESUMABLE

    _wait_until_gone(url)
    with suppress(Exception):
        leave()
    _say(
        f"told to end; Prefect was not told, since no server answers at {url}. The same command goes on from the last "
        "checkpoint"
    )
    os._exit(EXIT_RESUMABLE)


def _wait_until_gone(url: str) -> None:
    from flows.server.api import answers
    from flows.work.trainer import is_stopping_one

    gone_since: float | None = None
    while gone_since is None or time.monotonic() - gone_since < PATIENCE_S:
        time.sleep(POLL_S)
        if answers(url) or is_stopping_one():
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
