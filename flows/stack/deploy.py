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
import yaml
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, State, StateType, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.actions import CallWebhook, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Scheduled
from prefect.types import SecretDict
from pydantic import SecretStr

from flows import SOURCE_FOLDER
from flows.server.watch import CONSOLE_GONE, NO_HEARTBEAT
from flows.stack.control import NOTIFY_BLOCK, NOTIFY_URL, SAID, WORKERS_ARE_UP
from flows.stack.recipes import POOL
from flows.work.slots import Slots
from rlcore.config.compose import experiment_names
from rlcore.errors import MillraceError
from rlcore.storage.locks import BIRTH_TOLERANCE_S

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
JOB: dict[str, Any] = {
    # The worker's folder; else a temporary one, which a killed worker leaves.
    "job_configuration": {"working_dir": "."},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""How the worker starts a flow run: by Prefect's own command, in its own environment. A job variable is refused: by
default one may name another command, other variables of the environment or another folder."""
QUEUES: dict[str, int | None] = {"training": 1, "control": None}
"""Flow runs at a time. One training, as long as the root has no slots: with slots each run waits for its own."""
LOST_AFTER = timedelta(seconds=90)
"""Three heartbeats."""
OUR_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
OWN = "own"
"""Tag of deployments that `millrace deploy` has made, and no file lists."""
MODEL = "pipeline/debug"
"""They are like this one but for name, parameters and schedule."""
HEARTBEAT_LOST = "millrace: a flow run without a heartbeat has crashed"


def main() -> None:
    """Set it all up, and say what is worth saying."""
    wanted = _deployments()
    with get_client(sync_client=True) as client:
        pool = _ensure_pool(client)
        has_slots = bool(Slots(Path(os.environ["MILLRACE_ROOT"])).devices())
        for name, limit in QUEUES.items():
            _ensure_queue(client, name, limit, has_slots=has_slots)
        _ensure_automation(client)
        notify(client, os.environ.get(NOTIFY_URL), os.environ.get(NOTIFY_BLOCK))
        recovered = recover_lost_runs(client, workers_are_up=WORKERS_ARE_UP in sys.argv)
        before = known_deployments(client, OUR_POOL)
    _deploy()
    with get_client(sync_client=True) as client:
        put_back(client, OUR_POOL, before)
        ease_forms(client, OUR_POOL)
        strangers = _strangers(client, wanted)
    for name in recovered:
        _say(f"flow run {name} had lost its process; it is scheduled again")
    for name in strangers:
        _say(f"deployment {name} is in {DEPLOYMENTS.name} no more; `prefect deployment delete '{name}'` takes it away")
    _say(f"deployments are up to date in work pool {pool.name}")


def _say(text: str) -> None:
    print(f"{SAID}{text}", flush=True)


def _deployments() -> list[dict[str, Any]]:
    """What the file lists.

    Raises:
        MillraceError: a deployment's experiment is not in `conf/experiment`.
    """
    listed: list[dict[str, Any]] = yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]
    known = experiment_names()
    for one in listed:
        experiment = one.get("parameters", {}).get("experiment")
        if experiment is not None and experiment not in known:
            raise MillraceError(
                f"{DEPLOYMENTS}: deployment {one['name']!r} of {one['entrypoint']}: experiment={experiment} is no file "
                f"in conf/experiment; there is {', '.join(known)}. Take the deployment out, or bring the file back."
            )
    return listed


def _strangers(client: SyncPrefectClient, wanted: list[dict[str, Any]]) -> list[str]:
    """Deployments of our files that were applied once and are listed no more: they still start runs."""
    listed = {(one["entrypoint"], one["name"]) for one in wanted}
    files = {one["entrypoint"].partition(":")[0] for one in wanted}
    found = []
    for one in client.read_deployments(work_pool_filter=OUR_POOL):
        entrypoint = one.entrypoint or ""
        if OWN not in one.tags and entrypoint.partition(":")[0] in files and (entrypoint, one.name) not in listed:
            found.append(f"{client.read_flow(one.flow_id).name}/{one.name}")
    return sorted(found)


def _ensure_pool(client: SyncPrefectClient) -> WorkPool:
    """A pool of processes on this host."""
    try:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=JOB))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=JOB))
    return client.read_work_pool(POOL)


def _ensure_queue(client: SyncPrefectClient, name: str, limit: int | None, *, has_slots: bool) -> None:
    """A queue with its first limit, which goes where slots hold runs back; another one that people have set stays."""
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


def _deploy() -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(DEPLOYMENTS)]
    subprocess.run(command, cwd=SOURCE_FOLDER, check=True)


NOTHING = {"type": "null"}


def ease_forms(client: SyncPrefectClient, pool: WorkPoolFilter) -> None:
    """Ask for the values themselves. `prefect deploy` writes forms that ask for a value's type first, then for it.

    The form of people's own deployments becomes that of the present version.
    """
    newest = client.read_deployment_by_name(MODEL).parameter_openapi_schema
    for deployment in client.read_deployments(deployment_filter=DeploymentFilter(), work_pool_filter=pool):
        schema = newest if OWN in deployment.tags else deployment.parameter_openapi_schema
        if schema:
            eased = eased_schema(schema)
            if eased != deployment.parameter_openapi_schema:
                client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=eased))


def eased_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Each value that may be left out, as its own type. A value without a default may be left empty, in Prefect's eyes.

    >>> eased_schema({"properties": {"seed": {"anyOf": [{"type": "integer"}, NOTHING], "default": None}}})
    {'properties': {'seed': {'type': 'integer'}}}
    """
    return {**schema, "properties": {name: _eased(one) for name, one in schema["properties"].items()}}


def _eased(one: Mapping[str, Any]) -> dict[str, Any]:
    kinds = one.get("anyOf", [])
    if len(kinds) != 2 or NOTHING not in kinds or one.get("default", ...) is not None:
        return dict(one)
    (kind,) = (kind for kind in kinds if kind != NOTHING)
    return {**{key: value for key, value in one.items() if key not in ("anyOf", "default")}, **kind}


Known = Mapping[UUID, DeploymentResponse]


def known_deployments(client: SyncPrefectClient, pool: WorkPoolFilter) -> Known:
    """The deployments as they are now."""
    return {one.id: one for one in client.read_deployments(work_pool_filter=pool)}


def put_back(client: SyncPrefectClient, pool: WorkPoolFilter, before: Known) -> None:
    """Schedules that were on are on, those that were added are there, and what was paused is paused."""
    for now in known_deployments(client, pool).values():
        was = before.get(now.id)
        if was is None:
            continue
        if now.paused != was.paused:
            client.update_deployment(now.id, DeploymentUpdate(paused=was.paused))
        for schedule in was.schedules:
            same = _same(schedule, now.schedules)
            if same is None:
                client.create_deployment_schedules(now.id, [copied(schedule)])
            elif same.active != schedule.active:
                # Without its parameters Prefect 3.7 forgets them.
                client.update_deployment_schedule(now.id, same.id, active=schedule.active, parameters=same.parameters)


def _same(schedule: DeploymentSchedule, among: list[DeploymentSchedule]) -> DeploymentSchedule | None:
    """The file's schedules have slugs, by which they are known again; those that people add have none as a rule."""
    return next((one for one in among if one.id == schedule.id or (one.slug and one.slug == schedule.slug)), None)


def copied(schedule: DeploymentSchedule) -> DeploymentScheduleCreate:
    """The same, to be made again."""
    return DeploymentScheduleCreate(
        schedule=schedule.schedule,
        active=schedule.active,
        max_scheduled_runs=schedule.max_scheduled_runs,
        parameters=schedule.parameters,
        slug=schedule.slug,
    )


BLOCK = "millrace-notify"
ENDED_BADLY = "millrace: tell of a run that failed or waits"
SHORT_OF_ROOM = "millrace: tell of a run that waits for room on the disk"
REGRESSED = "millrace: tell of a night that is not as the ones before"
BAD_ENDS = ("Failed", "Crashed", "TimedOut", "Suspended")
"""Without Paused: our flow runs are Paused only while they wait for room. That is told by the other automation, with
all that is known, and of runs that no deployment has started too."""
TOLD_NIGHTS = ("broken", "worse", "slower", "better")
"""Verdicts of a regression that people are told; better too, since nobody may have meant it."""
ANY_RUN = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
STARTED_AS_DEPLOYMENT = ResourceSpecification(
    {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"}
)
"""Flows nested in a run fail with it; it is told once."""
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
    """Call `url`, and have a notification block tell people, from now on. What is None is left out; where both are,
    what is set up already stays.

    The server keeps the address as a secret, and those of the block where its type does.

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
    nights = at_once(expect={f"millrace.regression.{word}" for word in TOLD_NIGHTS})
    for name, trigger, document, (subject, body) in (
        (ENDED_BADLY, runs, OF_A_FLOW_RUN, WORDS_OF_A_FLOW_RUN),
        (SHORT_OF_ROOM, room, OF_A_RUN, WORDS_OF_A_RUN),
        (REGRESSED, nights, OF_A_RUN, WORDS_OF_A_RUN),
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
    """Make it, or bring it up to date."""
    known = client.read_automations_by_name(wanted.name)
    if known:
        client.update_automation(known[0].id, wanted)
    else:
        client.create_automation(wanted)


LOST = "Its process is gone."
GIVEN_UP_WITHIN = timedelta(days=1)
"""A run that was given up longer ago stays as it is."""
ALIVE = (StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED)
"""States of a run that has a process; while it waits for room on a disk it is Paused."""
SUSPENDED = "Suspended"
"""Of the type Paused too, but without a process: it goes on only when it is resumed."""


def recover_lost_runs(client: SyncPrefectClient, *, workers_are_up: bool) -> list[str]:
    """Schedule them again, so that they go on from their last checkpoint; the names of those runs.

    A run that was being cancelled is cancelled. Only runs of processes on this host are judged: the true guard against
    two processes on one run is the run's lock. Where no worker is up, a run that waits to be started has lost the
    worker that was about to start it.
    """
    recovered = []
    for run in _given_up(client):
        if _has_lost_its_process(client, run):
            _schedule_again(client, run)
            recovered.append(run.name)
    for run in client.read_flow_runs(flow_run_filter=_running(), work_pool_filter=OUR_POOL):
        if run.state_name == SUSPENDED:
            continue
        # A pending one may still say the process of its last attempt: it is lost only with the worker that had it.
        is_pending = run.state_type == StateType.PENDING
        if workers_are_up if is_pending else not _has_lost_its_process(client, run):
            continue
        if run.state_type == StateType.CANCELLING:
            client.set_flow_run_state(run.id, Cancelled(message=LOST), force=True)
            continue
        _schedule_again(client, run)
        recovered.append(run.name)
    return recovered


def _schedule_again(client: SyncPrefectClient, run: FlowRun) -> None:
    state: State[object] = Scheduled(scheduled_time=datetime.now(UTC), name="AwaitingRetry", message=LOST)
    client.set_flow_run_state(run.id, state, force=True)


def _given_up(client: SyncPrefectClient) -> list[FlowRun]:
    """Runs that have lost worker or process, and are Crashed by that since they were last recovered."""
    since = FlowRunFilterEndTime.model_validate({"after_": datetime.now(UTC) - GIVEN_UP_WITHIN})
    crashed = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=crashed, end_time=since), work_pool_filter=OUR_POOL
    )
    return [run for run in found if run.state is not None and run.state.message in (NO_HEARTBEAT, CONSOLE_GONE)]


def _has_lost_its_process(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Prefect's process worker notes `<host>:<pid>`. Another process has the number by now if it was born later than
    the run last began.
    """
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if not pid.isdigit() or host not in ("", socket.gethostname()):
        return False
    try:
        process = psutil.Process(int(pid))
        began = _last_began(client, run)
        is_older = began is None or process.create_time() <= began.timestamp() + BIRTH_TOLERANCE_S
        return not is_older or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _last_began(client: SyncPrefectClient, run: FlowRun) -> datetime | None:
    """Its `start_time` is that of its first attempt; each attempt has a process of its own."""
    times = [state.timestamp for state in client.read_flow_run_states(run.id) if state.is_running()]
    return max(times, default=run.start_time)


def _running() -> FlowRunFilter:
    kinds = [StateType.PENDING, *ALIVE]
    return FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)))


if __name__ == "__main__":
    try:
        main()
    except MillraceError as error:
        sys.exit(str(error))
