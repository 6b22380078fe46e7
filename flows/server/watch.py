"""Cancellation and suspension of this process's flow run, requested at the Prefect server.

Prefect's events are not enough: the event of a suspension may come before the state is in the database, a worker of
Prefect 3.7 cancels a flow run once but not after a retry, and a run without a living worker is never cancelled. So
the flow also polls its state every few seconds.
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
CANCEL_AFTER_S = 20.0
"""Seconds after which a cancelled flow run ends itself; a living worker sends a signal long before."""
MAX_RETRIES = 2
"""Retries of a request at the end of a run."""
STOP_REQUESTED = "stop requested; the same command resumes from the last checkpoint"
CANCELLED_TYPES = (StateType.CANCELLING, StateType.CANCELLED)
ENGINE = "prefect.engine"
"""Name of the logger of a flow run's process."""


class FlowCancelledError(Abort):
    """The flow run was cancelled or got a signal, and no worker ends it. The trainer has saved."""


class _FlowRunWatch:
    """A thread that polls a flow run's state, so that a server that does not answer blocks nothing."""

    def __init__(self, flow_run_id: UUID, *, is_deployed: bool) -> None:
        self._flow_run_id = flow_run_id
        self.is_deployed = is_deployed
        self.over = threading.Event()
        self.suspended: State[object] | None = None
        self.cancelled_at: float | None = None
        here = copy_context()  # Prefect's settings
        threading.Thread(target=here.run, args=(self._poll,), name="flow-run-watch", daemon=True).start()

    def is_cancelled(self) -> bool:
        """Return whether the flow run is cancelled now; False if the server does not answer."""
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
    """Watch this process's flow run in the block. Enter it before the run's lock, which the next attempt needs."""
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
    """End the flow run if it was cancelled. Called often, while a trainer works.

    Raises:
        FlowCancelledError: the flow run was cancelled.
    """
    since = None if _watch is None else _watch.cancelled_at
    if since is not None and time.monotonic() - since >= CANCEL_AFTER_S:
        raise FlowCancelledError(STOP_REQUESTED)


def end_if_suspended() -> None:
    """Leave the flow run if it was suspended. Called where everything is saved.

    Raises:
        Pause: the flow run was suspended. Prefect ends the process; resumed, the run continues from its checkpoint.
    """
    if _watch is not None and _watch.suspended is not None:
        raise Pause(state=_watch.suspended)


@contextmanager
def stop_as_cancellation(is_stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn a signal in the block into a cancellation.

    Prefect takes SIGINT for a crash, and at SIGTERM ends the process before it reports, or marks the task crashed. A
    signalled deployed run that was not cancelled has lost its worker: the next `millrace up` resumes it.

    Args:
        is_stopped: Returns whether `millrace stop` has stopped the run.

    Raises:
        FlowCancelledError: in place of the error that a signal to this process or the trainer raised.
    """
    try:
        yield
    except (KeyboardInterrupt, TerminationSignal, StopRequestedError) as ended:
        if _watch is None or (_watch.is_deployed and not is_stopped() and not _watch.is_cancelled()):
            raise
        raise FlowCancelledError(str(ended) if isinstance(ended, StopRequestedError) else STOP_REQUESTED) from ended


class DeferredSignals:
    """A block that defers SIGINT and SIGTERM to its end, or to a part of it inside `deliver`.

    It is put around Prefect's engine: interrupted while it creates or ends a task run, the engine fails with its own
    error, and the stop is lost. A second signal is not deferred. Outside the main thread the block has no effect.
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
        """Deliver signals immediately in the block, a deferred one at its beginning."""
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
    """Set the flow run and its unfinished tasks Cancelled; warn if the server does not answer."""
    state: State[object] = Cancelled(message="cancelled; saved, and resumes after a retry")
    try:
        with limit_retries(), get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, state, force=True)
            for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))):
                if task.state is None or not task.state.is_final():
                    client.set_task_run_state(task.id, state, force=True)
    except Exception as error:
        log.warning("the end of the run was not reported to the Prefect server: %s", error)


def set_flow_run_state(state: State[object]) -> None:
    """Set the flow run's state. Prefect's `pause_flow_run` would block the flow, which must read from its trainer."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(str(flow_run.id)), state)


def limit_retries(number: int = MAX_RETRIES) -> AbstractContextManager[object]:
    """Limit the retries of requests to an absent server in the block. Entering it takes 60 ms."""
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: number})


def shorten_known_errors(record: logging.LogRecord) -> bool:
    """Log an error of ours as its message, without the traceback of our code.

    A cancellation is logged as information. Prefect's line of a task that finished in state `Running` is dropped.
    """
    if any(isinstance(argument, FlowCancelledError) for argument in record.args or ()):
        record.levelno, record.levelname = logging.INFO, "INFO"
    if record.getMessage() == "Finished in state Running()":
        return False
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, MillraceError):
        return True
    record.msg, record.args, record.exc_info = str(error), (), None
    return record.name != ENGINE  # it repeats the flow run's line


for _name in ("prefect.flow_runs", "prefect.task_runs", ENGINE):
    logging.getLogger(_name).addFilter(shorten_known_errors)
