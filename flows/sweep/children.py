"""How the runs of a sweep are worked on: one after the other in this process, or by workers of the work pool."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from flows.server.nested import begin_anew, cancel_nested
from flows.server.watch import end_if_cancelled, end_if_suspended, few_retries
from flows.sweep.child import sweep_child
from rlcore.errors import MillraceError, StopRequestedError

DEPLOYMENT = "sweep-child/local"
IN_FLIGHT = 8
"""Child flow runs that wait or run at a time; how many of them run is the work queue's concurrency limit."""
POLL_S = 1.0
STOP_WAIT_S = 20.0
"""For children on workers to save once the sweep is told to stop; Prefect's worker kills the sweep after 30 s."""


@dataclass(frozen=True, slots=True)
class Child:
    """A run to be trained to a step. `index`: for the one who asks."""

    index: int
    experiment: str | None
    overrides: list[str]
    to_step: int
    label: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went. `error`: nothing, or one message."""

    index: int
    error: str


class Children(Protocol):
    """Works on runs, and tells of each as it ends. A failed one is no error here."""

    def work(self, children: Iterator[Child]) -> Iterator[Ended]:
        """Takes the next child when there is room for it."""


class InTurn:
    """Each as a child flow run in this process."""

    def __init__(self, mlflow_parent: str | None) -> None:
        self._parent = mlflow_parent
        begin_anew(sweep_child)

    def work(self, children: Iterator[Child]) -> Iterator[Ended]:
        """One after the other. Being told to stop is passed on; the run in hand has saved."""
        for child in children:
            end_if_cancelled()
            end_if_suspended()
            error = ""
            try:
                sweep_child(
                    child.experiment,
                    child.overrides,
                    to_step=child.to_step,
                    label=child.label,
                    mlflow_parent=self._parent,
                )
            except StopRequestedError:
                raise
            except Exception as failure:
                error = str(failure) or type(failure).__name__
            yield Ended(child.index, error)


class OnWorkers:
    """Each as a run of the deployment `sweep-child/local`."""

    def __init__(self, mlflow_parent: str | None, root: Path) -> None:
        self._parent = mlflow_parent
        self._root = str(root)
        with get_client(sync_client=True) as client:
            try:
                client.read_deployment_by_name(DEPLOYMENT)
            except ObjectNotFound:
                raise MillraceError(
                    f"on_workers: the Prefect server at {client.api_url} has no deployment {DEPLOYMENT}. `millrace up` "
                    "applies the deployments and starts a worker; without on_workers the runs go on in this process."
                ) from None

    def work(self, children: Iterator[Child]) -> Iterator[Ended]:
        """Up to `IN_FLIGHT` at a time."""
        flying: dict[UUID, Child] = {}
        with get_client(sync_client=True) as client:
            exhausted = False
            while flying or not exhausted:
                while not exhausted and len(flying) < IN_FLIGHT:
                    child = next(children, None)
                    exhausted = child is None
                    if child is not None:
                        flying[self._submit(child).id] = child
                for flow_run_id, error in _ended(client, list(flying)):
                    yield Ended(flying.pop(flow_run_id).index, error)
                end_if_cancelled()
                end_if_suspended()
                if flying:
                    time.sleep(POLL_S)

    def _submit(self, child: Child) -> FlowRun:
        parameters = {
            "experiment": child.experiment,
            # A worker may stand elsewhere, and its deployment knows another root.
            "overrides": [text for text in child.overrides if not text.startswith("paths.root=")],
            "root": self._root,
            "to_step": child.to_step,
            "label": child.label,
            "mlflow_parent": self._parent,
        }
        # A request whose answer is lost is sent again: without a key the server would make a second run of it.
        submitted = run_deployment(DEPLOYMENT, parameters=parameters, timeout=0, idempotency_key=str(uuid4()))
        assert isinstance(submitted, FlowRun)
        return submitted


@contextmanager
def cancelled_with_us() -> Iterator[None]:
    """Where the block does not come to its end, neither do the children: what runs saves, what waits is not begun."""
    sweep = UUID(str(flow_run.id))
    try:
        yield
    except BaseException:
        # The server may be gone: we end all the same, and soon.
        with (
            suppress(Exception),
            few_retries(1),
            get_client(sync_client=True) as client,
        ):
            cancel_nested(client, sweep, wait_s=STOP_WAIT_S)
        raise


def _ended(client: SyncPrefectClient, flow_run_ids: Sequence[UUID]) -> Iterator[tuple[UUID, str]]:
    """Those that are over, with what went wrong."""
    for flow_run_id in flow_run_ids:
        try:
            state = client.read_flow_run(flow_run_id).state
        except ObjectNotFound:
            yield flow_run_id, f"flow run {flow_run_id} was deleted in Prefect"
            continue
        if state is not None and state.is_final():
            yield flow_run_id, _error(state)


def _error(state: State) -> str:
    return "" if state.is_completed() else f"{state.name}: {state.message or 'no message'}"
