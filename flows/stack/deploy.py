"""Everything that Millrace has in a Prefect server: work pool, queues, automations, deployments.

    python -m flows.stack.deploy [--workers-are-up]

Talks to the server of `PREFECT_API_URL`. What is there already is brought up to date, so it may run again and again.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.actions import CallWebhook, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Scheduled
from prefect.types import SecretDict
from pydantic import SecretStr

from flows import SOURCE_FOLDER
from flows.server.watch import NO_HEARTBEAT
from flows.stack.control import NOTIFY_BLOCK, NOTIFY_URL, SAID, WORKERS_ARE_UP
from flows.stack.services import FLOW_COMMAND, POOL
from flows.stack.state import FLOW_RUN, STACK
from flows.work.slots import Slots
from rlcore.errors import MillraceError

DEPLOYMENTS = Path("conf", "prefect.yaml")
JOB: dict[str, Any] = {
    # The worker's folder; else a temporary one, which a killed worker leaves.
    "job_configuration": {"working_dir": ".", "command": FLOW_COMMAND, "stream_output": False},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""How the worker starts a flow run: by Prefect's own command, in its own environment, with a log that stays where the
worker is killed. A job variable is refused: by default one may name another command, other variables of the environment
or another folder."""
QUEUES: dict[str, int | None] = {"training": 1, "control": None}
"""Flow runs at a time. One training, as long as the root has no slots: with slots each run waits for its own."""
LOST_AFTER = timedelta(seconds=90)
"""Three heartbeats."""
OUR_POOL = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
OWN = "own"
"""Tag of deployments that `millrace deploy` has made, and no file lists."""
MODEL = "pipeline/debug"
"""The deployment whose flow and parameters those deployments have."""
HEARTBEAT_LOST = "millrace: a flow run without a heartbeat has crashed"


def main() -> None:
    """Set it all up, and say what is worth saying."""
    with get_client(sync_client=True) as client:
        _ensure_pool(client)
        has_slots = bool(Slots(Path(os.environ[STACK])).devices())
        for name, limit in QUEUES.items():
            _ensure_queue(client, name, limit, has_slots=has_slots)
        _ensure_automation(client)
        notify(client, os.environ.get(NOTIFY_URL), os.environ.get(NOTIFY_BLOCK))
        recovered = recover_lost_runs(client, workers_are_up=WORKERS_ARE_UP in sys.argv)
        paused = {one.id for one in client.read_deployments(work_pool_filter=OUR_POOL) if one.paused}
        apply_deployments()
        model = client.read_deployment_by_name(MODEL)
        for one in client.read_deployments(work_pool_filter=OUR_POOL):
            form = (model if OWN in one.tags else one).parameter_openapi_schema or {}
            as_before = DeploymentUpdate(parameter_openapi_schema=eased_schema(form), paused=one.id in paused)
            client.update_deployment(one.id, as_before)
    for name in recovered:
        _say(f"flow run {name} had lost its process; it is scheduled again")
    _say(f"deployments are up to date in work pool {POOL}")


def apply_deployments() -> None:
    """Have Prefect apply the file of deployments. Schedules stay; deployments that people have paused go on.

    Raises:
        MillraceError: it does not; with what Prefect says.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(DEPLOYMENTS)]
    done = subprocess.run(command, cwd=SOURCE_FOLDER, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MillraceError(
            f"{DEPLOYMENTS}: Prefect does not apply it:\n{(done.stdout + done.stderr).strip()[-3_000:]}"
        )


def _say(text: str) -> None:
    print(f"{SAID}{text}", flush=True)


def known_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """A deployment by flow and name; None where there is none."""
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _ensure_pool(client: SyncPrefectClient) -> None:
    try:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=JOB))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=JOB))


def _ensure_queue(client: SyncPrefectClient, name: str, limit: int | None, *, has_slots: bool) -> None:
    """Make a queue with this limit, or keep it as people have set it; where the root has slots the limit is removed."""
    try:
        queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
    except ObjectNotFound:
        queue = client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)
    if has_slots and limit is not None and queue.concurrency_limit == limit:
        client.update_work_queue(queue.id, concurrency_limit=None)


def _ensure_automation(client: SyncPrefectClient) -> None:
    """Without it a flow run whose worker and process are both gone is Running for ever."""
    crash = ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=NO_HEARTBEAT, force=False)
    wanted = AutomationCore(
        name=HEARTBEAT_LOST,
        description="Three heartbeats missed: whoever ran it is gone. Retry it to go on from its last checkpoint.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},  # the next heartbeat, or any change of state
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=LOST_AFTER,
        ),
        actions=[crash],
    )
    keep_automation(client, wanted)


NOTHING = {"type": "null"}


def eased_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in which what may be None has its other type alone, and no default: Prefect's form leaves it empty then.
    One that is eased already stays.

    >>> eased_schema({"properties": {"seed": {"anyOf": [{"type": "integer"}, NOTHING], "default": None}}})
    {'properties': {'seed': {'type': 'integer'}}}
    """
    return {**schema, "properties": {name: _eased(one) for name, one in schema.get("properties", {}).items()}}


def _eased(one: Mapping[str, Any]) -> dict[str, Any]:
    kinds = one.get("anyOf", [])
    if len(kinds) != 2 or NOTHING not in kinds or one.get("default", ...) is not None:
        return dict(one)
    (kind,) = (kind for kind in kinds if kind != NOTHING)
    return {**{key: value for key, value in one.items() if key not in ("anyOf", "default")}, **kind}


BLOCK = "millrace-notify"
ENDED_BADLY = "millrace: tell of a run that failed or waits"
SHORT_OF_ROOM = "millrace: tell of a run that waits for room on the disk"
BAD_ENDS = ("Failed", "Crashed", "TimedOut", "Suspended")
"""States that people are told of. A flow run is Paused only while it waits, for room on a disk or for slots: of room
the automation SHORT_OF_ROOM tells, also where no deployment has started the run."""
ANY_RUN = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
STARTED_AS_DEPLOYMENT = ResourceSpecification(
    {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"}
)
"""Flow runs of deployments alone: flows nested in one fail with it, and people are told once."""
OF_A_FLOW_RUN = (
    '{"event": {{ event.event | tojson }}, "run": {{ flow_run.name | tojson }}, '
    '"message": {{ (flow_run.state.message or "") | tojson }}, "page": {{ (flow_run | ui_url) | tojson }}}'
)
OF_A_RUN = (
    '{"event": {{ event.event | tojson }}, "run": {{ event.resource.name | tojson }}, '
    '"message": {{ event.payload.text | tojson }}}'
)
"""Bodies of the request: JSON, filled in by the server."""
WORDS_OF_A_FLOW_RUN = (
    "{{ flow_run.name }}: {{ flow_run.state.name }}",
    '{{ flow_run.state.message or "" }}\n{{ flow_run | ui_url }}',
)
WORDS_OF_A_RUN = ("{{ event.resource.name }}: {{ event.event }}", "{{ event.payload.text }}")
"""Subject and body of the same for people."""


def notify(client: SyncPrefectClient, url: str | None, block: str | None) -> None:
    """Call `url`, and have a notification block tell people, from now on. Where both are None, what is set up stays.

    Raises:
        MillraceError: there is no such block, or it is none that notifies.
    """
    hook = None if url is None else _webhook(url)
    teller = None if block is None else _notification_block(client, block)
    if hook is None and teller is None:
        return
    at_once = partial(EventTrigger, posture=Posture.Reactive, threshold=1, within=timedelta(0))
    bad_ends = {f"prefect.flow-run.{end}" for end in BAD_ENDS}
    runs = at_once(expect=bad_ends, match=ANY_RUN, match_related=STARTED_AS_DEPLOYMENT)
    room = at_once(expect={"millrace.paused_for_disk"})
    for name, trigger, document, (subject, body) in (
        (ENDED_BADLY, runs, OF_A_FLOW_RUN, WORDS_OF_A_FLOW_RUN),
        (SHORT_OF_ROOM, room, OF_A_RUN, WORDS_OF_A_RUN),
    ):
        actions: list[CallWebhook | SendNotification] = []
        if hook is not None:
            actions.append(CallWebhook(block_document_id=hook, payload=document))
        if teller is not None:
            actions.append(SendNotification(block_document_id=teller, subject=subject, body=body))
        keep_automation(client, AutomationCore(name=name, trigger=trigger, actions=[*actions]))


def _webhook(url: str) -> UUID:
    block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    saved = block.save(BLOCK, overwrite=True)
    assert isinstance(saved, UUID)  # no event loop runs here, so it was saved before the call returned
    return saved


def _notification_block(client: SyncPrefectClient, named: str) -> UUID:
    """The block that `TYPE/NAME` names, such as `slack-webhook/team`."""
    known: dict[str, UUID] = {}
    for one in client.read_block_documents(include_secrets=False):
        kind, schema = one.block_type, one.block_schema
        if kind is not None and schema is not None and "notify" in (schema.capabilities or ()):
            known[f"{kind.slug}/{one.name}"] = one.id
    if named not in known:
        raise MillraceError(
            f"{NOTIFY_BLOCK}: must name a notification block in Prefect as TYPE/NAME; got {named}, and there is "
            f"{', '.join(sorted(known)) or 'none'}. Make it first, in the page (Blocks) or as docs/stack.md says, "
            "while the stack is up without this setting"
        )
    return known[named]


def keep_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Create the automation, or update it where it differs."""
    known = client.read_automations_by_name(wanted.name)
    if not known:
        client.create_automation(wanted)
    elif AutomationCore(**known[0].model_dump(include={*AutomationCore.model_fields})) != wanted:
        client.update_automation(known[0].id, wanted)


LOST = "Its process is gone."
GIVEN_UP_WITHIN = timedelta(days=1)
"""A run that was given up longer ago stays as it is."""
ALIVE = (StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED)
"""States of a run that has a process; while it waits for room on a disk or for slots it is Paused."""
SUSPENDED = "Suspended"
"""Name of a state of the type PAUSED in which a run has no process: it goes on only when it is resumed."""


def recover_lost_runs(client: SyncPrefectClient, *, workers_are_up: bool) -> list[str]:
    """Schedule runs that have lost their process again, to go on from their last checkpoint; their names.

    A run that was being cancelled is cancelled. Only processes of this host are judged. Where no worker is up, a run
    that waits to be started has lost the worker that was about to start it.
    """
    crashed = _flow_runs(client, StateType.CRASHED, end_time={"after_": datetime.now(UTC) - GIVEN_UP_WITHIN})
    given_up = [run for run in crashed if run.state is not None and run.state.message == NO_HEARTBEAT]
    lost = [run for run in given_up if _has_lost_its_process(run)]
    for run in _flow_runs(client, StateType.PENDING, *ALIVE):
        if run.state_name == SUSPENDED:
            continue
        # A pending one may still say the process of its last attempt: it is lost only with the worker that had it.
        is_pending = run.state_type == StateType.PENDING
        if workers_are_up if is_pending else not _has_lost_its_process(run):
            continue
        if run.state_type == StateType.CANCELLING:
            client.set_flow_run_state(run.id, Cancelled(message=LOST), force=True)
        else:
            lost.append(run)
    for run in lost:
        state: State[object] = Scheduled(scheduled_time=datetime.now(UTC), name="AwaitingRetry", message=LOST)
        client.set_flow_run_state(run.id, state, force=True)
    return [run.name for run in lost]


def _has_lost_its_process(run: FlowRun) -> bool:
    """Whether the process `<host>:<pid>` that a worker noted is gone. Another one may have its id by now: that was not
    started for this flow run."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if not pid.isdigit() or host not in ("", socket.gethostname()):
        return False
    try:
        return psutil.Process(int(pid)).environ().get(FLOW_RUN) != str(run.id)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # another user's
        return True


def _flow_runs(client: SyncPrefectClient, *kinds: StateType, **more: object) -> list[FlowRun]:
    wanted = FlowRunFilter.model_validate({"state": {"type": {"any_": kinds}}, **more})
    return client.read_flow_runs(flow_run_filter=wanted, work_pool_filter=OUR_POOL)


if __name__ == "__main__":
    try:
        main()
    except MillraceError as error:
        sys.exit(str(error))
