"""Which flow runs are in this process."""

import os
from uuid import UUID

from prefect.runtime import flow_run

STARTED_FOR = "PREFECT__FLOW_RUN_ID"
"""Set by a worker for the process that it starts: the flow run that the process is for."""


def outermost() -> UUID:
    """The flow run around all others in this process. A run that a worker started may be the child of one elsewhere."""
    return UUID(os.environ.get(STARTED_FOR) or str(flow_run.root_flow_run_id or flow_run.id))


def flow_runs_in_here() -> list[UUID]:
    """The flow run that we are in, and those around it in this process."""
    inner, outer = UUID(str(flow_run.id)), outermost()
    if inner == outer:
        return [inner]
    return list(dict.fromkeys((inner, UUID(str(flow_run.parent_flow_run_id or outer)), outer)))
