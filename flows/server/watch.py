"""A watch on this process's flow run. It notices when a user cancels or suspends the flow run at the Prefect server.

The watch polls the state of the flow run, because Prefect's events and signals are not sufficient. The event of a
suspension may arrive before the new state is in the database. After a cancellation, the worker sends a signal to the
process. A worker of Prefect 3.7 sends no signal if the flow run was cancelled and retried before. A dead worker never
sends a signal.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled

from rlcore.errors import MillraceError, StopRequestedError

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 4.0
CANCEL_AFTER_S = 20.0  # seconds until a cancelled flow run ends itself; a living worker sends a signal much earlier
MAX_RETRIES = 2  # retries of a request about the state of the flow run
STOP_REQUESTED = "stop requested; the same command resumes from the last checkpoint"
CANCELLED = "cancelled; finished work is saved, and a retry resumes it"
CANCELLED_TYPES = (StateType.CANCELLING, StateType.CANCELLED)
ENGINE = "prefect.engine"
"""The name of the logger that Prefect's engine uses in the process of a flow run."""


class FlowCancelledError(Abort):
    """The error that a process raises to end its flow run after a cancellation or a stop signal.

    The trainer saves a checkpoint before the flow run ends.
    """


class _FlowRunWatch:
    """A thread that polls the state of a flow run. A server that does not respond blocks only this thread."""

    def __init__(self, flow_run_id: UUID, *, is_deployed: bool) -> None:
        self._flow_run_id = flow_run_id
        self.is_deployed = is_deployed
        self.over = threading.Event()
        self.suspended: State[object] | None = None
        self.cancelled_at: float | None = None
        here = copy_context()  # has Prefect's settings
        threading.Thread(target=here.run, args=(self._poll,), name="flow-run-watch", daemon=True).start()

    def is_cancelled(self) -> bool:
        """Return whether the flow run is cancelled. If the server does not respond, the last known state is used."""
        with suppress(Exception), limit_retries():
            self._look()
        return self.cancelled_at is not None

    def _poll(self) -> None:
        with limit_retries():
            while not self.over.is_set():
                try:
                    self._look()
                except Exception as error:  # the training does not depend on the server
                    log.debug("the state of flow run %s is not known: %s", self._flow_run_id, error)
                self.over.wait(POLL_INTERVAL_S)

    def _look(self) -> None:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(self._flow_run_id).state
        if state is None:
            return
        if state.is_paused() and state.name == "Suspended":
            self.suspended = state
        if state.type not in CANCELLED_TYPES:
            self.cancelled_at = None
        elif self.cancelled_at is None:
            self.cancelled_at = time.monotonic()


_watch: _FlowRunWatch | None = None


@contextmanager
def watch_flow_run() -> Iterator[None]:
    """Watch this process's flow run inside the block.

    A stopped flow run is set to Cancelled only after the block has ended and released its locks.
    """
    global _watch
    run_id = UUID(str(flow_run.id))
    watch = _watch = _FlowRunWatch(run_id, is_deployed=bool(deployment.id))
    try:
        with stop_as_cancellation():
            yield
    except FlowCancelledError:
        _set_cancelled(run_id)
        raise
    finally:
        _watch = None
        watch.over.set()  # a request in progress is not interrupted


def end_if_cancelled() -> None:
    """Raise FlowCancelledError if the flow run was cancelled at least `CANCEL_AFTER_S` seconds ago.

    If the worker is alive, its signal ends the flow run much earlier.
    """
    since = None if _watch is None else _watch.cancelled_at
    if since is not None and time.monotonic() - since >= CANCEL_AFTER_S:
        raise FlowCancelledError(STOP_REQUESTED)


def is_suspended() -> bool:
    """Return whether the flow run was suspended."""
    return _watch is not None and _watch.suspended is not None


def end_if_suspended() -> None:
    """Raise Pause if the flow run was suspended. Call this function only when everything is saved."""
    if _watch is not None and _watch.suspended is not None:  # Prefect ends the process, and a resume continues
        raise Pause(state=_watch.suspended)


@contextmanager
def stop_as_cancellation(is_stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Convert a stop signal inside the block into FlowCancelledError, which sets the flow run to Cancelled.

    Prefect itself treats SIGINT as a crash, and leaves a wrong state after SIGTERM. A deployed run also gets a signal
    when its worker ends, but `millrace up` resumes it later. For a deployed run, the signal's error is therefore
    converted only if the flow run was cancelled or `is_stopped` returns true.
    """
    try:
        yield
    except (KeyboardInterrupt, TerminationSignal, StopRequestedError) as ended:
        if _watch is None or (_watch.is_deployed and not is_stopped() and not _watch.is_cancelled()):
            raise
        raise FlowCancelledError(str(ended) if isinstance(ended, StopRequestedError) else STOP_REQUESTED) from ended


class DeferredSignals:
    """A `with` block that defers SIGINT and SIGTERM until its end, or until an inner `deliver` block.

    A signal while Prefect's engine creates or ends a task run would make the engine fail with an unrelated error. A
    second signal is delivered immediately. The block has no effect outside the main thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._deferred: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._defer()
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @contextmanager
    def deliver(self) -> Iterator[None]:
        """Deliver signals immediately inside this block. A deferred signal is delivered when the block begins."""
        try:
            self._restore()
            yield
        finally:
            self._defer()

    def _defer(self) -> None:
        for number in self._handlers:
            signal.signal(number, self._record)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            signal.raise_signal(deferred)

    def _record(self, number: int, frame: object) -> None:
        is_second, self._deferred = self._deferred is not None, number
        if is_second:
            self._restore()


def _set_cancelled(run_id: UUID) -> None:
    """Set the flow run and its unfinished tasks to Cancelled. If the server does not respond, only log a warning."""
    state: State[object] = Cancelled(message=CANCELLED)
    try:
        with limit_retries(), get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, state, force=True)
            for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))):
                if task.state is None or not task.state.is_final():
                    client.set_task_run_state(task.id, state, force=True)
    except Exception as error:
        log.warning("the end of the run was not reported to the Prefect server: %s", error)


def set_flow_run_state(state: State[object]) -> None:
    """Set the state of this process's flow run, for example to Paused while the run waits for disk space.

    Prefect's `pause_flow_run` is not used, because it would block the flow.
    """
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(str(flow_run.id)), state)


def limit_retries(number: int = MAX_RETRIES) -> AbstractContextManager[object]:
    """Return a context manager in which a failed request to the Prefect server is retried at most `number` times.

    Enter it once for several requests, because entering it takes 60 ms.
    """
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: number})


def shorten_known_errors(record: logging.LogRecord) -> bool:
    """Replace the traceback in a log record by the error's message if the error is a MillraceError.

    A cancellation gets the level INFO. Return False to drop a Prefect record that repeats or contradicts another
    record.
    """
    if any(isinstance(argument, FlowCancelledError) for argument in record.args or ()):
        record.levelno, record.levelname = logging.INFO, "INFO"
    if record.getMessage() == "Finished in state Running()":
        return False
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, MillraceError):
        return True
    record.msg, record.args, record.exc_info = str(error), (), None
    return record.name != ENGINE  # the engine's record repeats the flow run's line


for _name in ("prefect.flow_runs", "prefect.task_runs", ENGINE):
    logging.getLogger(_name).addFilter(shorten_known_errors)
