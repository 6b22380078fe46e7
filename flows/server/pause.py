"""The state Paused of a flow run whose trainer waits for room on a disk.

Prefect's own `pause_flow_run` would block the flow, which has to go on listening to its trainer; so only the state is
set. It has no time-out: the trainer has one (`checkpoint.wait_for_room_s`).
"""

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Paused, Running

from flows.server.around import flow_runs_in_here


def show_paused(message: str) -> None:
    """The flow run that we are in, and those around it, are Paused."""
    _set(Paused(message=message))


def show_running() -> None:
    """They are Running again."""
    _set(Running(message="going on"))


def _set(state: State[object]) -> None:
    with get_client(sync_client=True) as client:
        for one in flow_runs_in_here():
            client.set_flow_run_state(one, state)
