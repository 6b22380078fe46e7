"""Our objects in a Prefect server: the work pool, the queues, the automations and the deployments.

    python -m flows.stack.deploy

The command creates or updates these objects. PREFECT_API_URL is the address of the server, and MILLRACE_STACK is the
folder of the stack.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Scheduled

from flows import SOURCE_FOLDER
from flows.parameters import RunSettings
from flows.server.watch import CANCELLED
from flows.stack.services import FLOW_COMMAND, NOTIFY_BLOCK, POOL
from flows.stack.state import FLOW_RUN_ID, STACK_ROOT, read_stack
from flows.work.slots import Slots
from rlcore.config.problems import Problem, settings_error
from rlcore.errors import MillraceError

DEPLOYMENTS = Path("conf", "prefect.yaml")
JOB_TEMPLATE: dict[str, Any] = {
    # The folder of the worker. A temporary folder would remain after a killed worker.
    "job_configuration": {"working_dir": ".", "command": FLOW_COMMAND, "stream_output": False},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""The template of the process that a worker starts for a flow run. It refuses job variables, because
a job variable could set another command, environment or folder.
"""
QUEUES: dict[str, int | None] = {"training": 1, "control": None}
"""The default limit of concurrent flow runs in each work queue. None means no limit."""
POOL_FILTER = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})


def main() -> None:
    """Update our work pool, automations and deployments in the Prefect server, and reschedule lost runs."""
    root = Path(os.environ[STACK_ROOT])
    with get_client(sync_client=True) as client:
        ensure_pool(client, has_slots=bool(Slots(root).devices()))
        keep_automation(client, CANCELLED_RUNS)
        if block := os.environ.get(NOTIFY_BLOCK):
            set_up_notifications(client, block)
        are_up = any(service.is_worker for service in read_stack(root).running())
        for name in recover_lost_runs(client, workers_are_up=are_up):
            print(f"flow run {name} had lost its process; it is scheduled again")
        paused = {one.id for one in client.read_deployments(work_pool_filter=POOL_FILTER) if one.paused}
        apply_deployments()
        for one in client.read_deployments(work_pool_filter=POOL_FILTER):
            simplify_form(client, one, paused=one.id in paused)
            name_limit(client, one)
    print(f"deployments are up to date in work pool {POOL}")


def ensure_pool(client: SyncPrefectClient, *, has_slots: bool = False) -> None:
    """Create or update the work pool, and create its queues. Limits that users have set are kept.

    With `has_slots`, the default limit of a queue is removed, because the runs themselves then wait for trainer slots.
    """
    try:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=JOB_TEMPLATE))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=JOB_TEMPLATE))
    for name, limit in QUEUES.items():
        try:
            queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
        except ObjectNotFound:
            queue = client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)
        if has_slots and limit is not None and queue.concurrency_limit == limit:
            client.update_work_queue(queue.id, concurrency_limit=None)


def apply_deployments() -> None:
    """Apply `conf/prefect.yaml` by `prefect deploy --all`, which keeps schedules but resumes paused deployments."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(DEPLOYMENTS)]
    done = subprocess.run(command, cwd=SOURCE_FOLDER, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MillraceError(f"{DEPLOYMENTS}: Prefect refuses it:\n{(done.stdout + done.stderr).strip()[-3_000:]}")


NULL_TYPE = {"type": "null"}


def simplify_form(client: SyncPrefectClient, deployment: DeploymentResponse, *, paused: bool) -> None:
    """Let users clear the optional fields of a deployment's form. Also set whether the deployment is paused."""
    schema = without_null_types(deployment.parameter_openapi_schema or {})
    client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=schema, paused=paused))


def name_limit(client: SyncPrefectClient, deployment: DeploymentResponse) -> None:
    """Rename a deployment's concurrency limit, which Prefect names by the deployment's id. Other names are kept."""
    limit = deployment.global_concurrency_limit
    if limit is not None and limit.name == f"deployment:{deployment.id}":
        name = f"deployment {client.read_flow(deployment.flow_id).name} {deployment.name}"  # a slash is not permitted
        client.update_global_concurrency_limit(limit.name, GlobalConcurrencyLimitUpdate(name=name))


def without_null_types(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the null type and the default None of its optional fields. A second call changes nothing.

    >>> without_null_types({"properties": {"seed": {"anyOf": [{"type": "integer"}, NULL_TYPE], "default": None}}})
    {'properties': {'seed': {'type': 'integer'}}}
    """
    properties = {}
    for name, field in schema.get("properties", {}).items():
        kinds = [kind for kind in field.get("anyOf", []) if kind != NULL_TYPE]
        if len(kinds) == 1 and NULL_TYPE in field["anyOf"] and field.get("default", ...) is None:
            field = {key: value for key, value in field.items() if key not in ("anyOf", "default")} | kinds[0]
        properties[name] = field
    return {**schema, "properties": properties}


FAILURE_EVENTS = ("Failed", "Crashed", "TimedOut", "Suspended")
"""The flow-run states that cause a notification.

Paused is not among them, because a paused run waits for disk space or slots and then continues without a user.
"""
_IMMEDIATELY = partial(EventTrigger, posture=Posture.Reactive, threshold=1, within=timedelta(0))
_DEPLOYED = ResourceSpecification(
    {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"}
)
NOTIFICATIONS = (
    (
        "millrace: notify of a run that failed or waits",
        _IMMEDIATELY(
            expect={f"prefect.flow-run.{end}" for end in FAILURE_EVENTS},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=_DEPLOYED,  # nested flows fail with their parent and send no second message
        ),
        "{{ flow_run.name }}: {{ flow_run.state.name }}",
        '{{ flow_run.state.message or "" }}\n{{ flow_run | ui_url }}',
    ),
    (
        "millrace: notify of a run that waits for disk space",  # also for a run without a deployment
        _IMMEDIATELY(expect={"millrace.paused_for_disk"}),
        "{{ event.resource.name }}: {{ event.event }}",
        "{{ event.payload.text }}",
    ),
)
"""The name, trigger, subject and text of each notification. Subject and text are templates of the Prefect server."""
CANCELLED_RUNS = AutomationCore(
    name="millrace: show what a cancelled run has saved",
    trigger=_IMMEDIATELY(
        expect={"prefect.flow-run.Cancelled"},
        match=ResourceSpecification(
            {
                "prefect.resource.id": "prefect.flow-run.*",
                "prefect.state-message": "Flow run was cancelled successfully.",
            }
        ),
        match_related=ResourceSpecification(
            {"prefect.resource.role": "work-pool", "prefect.resource.name": POOL},
        ),
    ),
    actions=[ChangeFlowRunState(state=StateType.CANCELLED, name="Cancelled", message=CANCELLED, force=False)],
)
"""The automation that replaces the message that Prefect's worker writes for a cancelled flow run.

The new message says that finished work is saved and that a retry resumes it.
"""


def set_up_notifications(client: SyncPrefectClient, block: str) -> None:
    """Create or update the automations that notify users through the notification block `block`."""
    block_id = _notification_block(client, block)
    for name, trigger, subject, body in NOTIFICATIONS:
        action = SendNotification(block_document_id=block_id, subject=subject, body=body)
        keep_automation(client, AutomationCore(name=name, trigger=trigger, actions=[action]))


def keep_automation(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create an automation, or update the existing automation with the same name."""
    if known := client.read_automations_by_name(automation.name):
        client.update_automation(known[0].id, automation)
    else:
        client.create_automation(automation)


def _notification_block(client: SyncPrefectClient, name: str) -> UUID:
    """Return the id of the notification block `TYPE/NAME`, such as `slack-webhook/team`."""
    known = {
        f"{one.block_type.slug}/{one.name}": one.id
        for one in client.read_block_documents(include_secrets=False)
        if one.block_type and one.block_schema and "notify" in (one.block_schema.capabilities or ())
    }
    if name not in known:
        raise MillraceError(
            f"{NOTIFY_BLOCK}: must name a notification block in Prefect as TYPE/NAME; got {name}, and there is "
            f"{', '.join(sorted(known)) or 'none'}. Create it first, in the page (Blocks) or as in docs/stack.md, "
            "while the stack is up without this setting"
        )
    return known[name]


LOST_PROCESS = "Its process is gone."
SUSPENDED = "Suspended"  # a PAUSED state without a process, which only a resume ends


def recover_lost_runs(client: SyncPrefectClient, *, workers_are_up: bool) -> list[str]:
    """Reschedule the runs whose process is lost, and return their names. A lost run that was being cancelled is set to
    Cancelled instead. If no worker is up, a pending run counts as lost.
    """
    lost = []
    # A run that waits for disk space or slots is Paused and has its process.
    alive = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": alive}}}), work_pool_filter=POOL_FILTER
    )
    for run in runs:
        # A pending run may still name the process of its last attempt. It is lost only if its worker is.
        is_pending = run.state_type == StateType.PENDING
        if run.state_name == SUSPENDED or (workers_are_up if is_pending else not _is_lost(run)):
            continue
        state: State[object] = Cancelled(message=LOST_PROCESS)
        if run.state_type != StateType.CANCELLING:
            state = Scheduled(scheduled_time=datetime.now(UTC), name="AwaitingRetry", message=LOST_PROCESS)
            lost.append(run.name)
        client.set_flow_run_state(run.id, state, force=True)
    return lost


def _is_lost(run: FlowRun) -> bool:
    """Return whether the process recorded for a flow run (`<host>:<pid>`) has ended or now belongs to another run."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if not pid.isdigit() or host not in ("", socket.gethostname()):
        return False
    try:
        return psutil.Process(int(pid)).environ().get(FLOW_RUN_ID) != str(run.id)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # the process of another user
        return True


SCHEDULE_SLUG = "deploy"  # of the schedule that `millrace deploy` sets and replaces
FLOW = "pipeline"
USER_TAG = "own"  # of the deployments that `millrace deploy` creates


def schedule_of(cron: str, timezone: str) -> DeploymentScheduleCreate:
    """Return the schedule of a deployment. Raises ConfigError if the schedule or the time zone is invalid."""
    try:
        return DeploymentScheduleCreate(
            schedule=CronSchedule(cron=cron, timezone=timezone), slug=SCHEDULE_SLUG, active=True
        )
    except ValueError as error:
        rule = "must be five fields of cron, and --timezone a known one"
        remedy = "--cron '0 3 * * *' is each day at 3:00"
        raise settings_error([Problem("--cron", rule, f"{cron!r} in {timezone}", remedy)]) from error


def apply_user_deployment(settings: RunSettings, name: str, schedule: DeploymentScheduleCreate | None) -> UUID:
    """Create or update the deployment `flow/name`, and return its id. Schedules that users have added are kept."""
    known = None
    with get_client(sync_client=True) as client:
        with suppress(ObjectNotFound):
            known = client.read_deployment_by_name(name)
        if known is not None and USER_TAG not in known.tags:
            raise MillraceError(f"{name}: is a deployment of Millrace's own. Give another name by --name.")
        ensure_pool(client)
        kept = [] if known is None else known.schedules
        schedules = [
            DeploymentScheduleCreate(schedule=one.schedule, active=one.active, parameters=one.parameters, slug=one.slug)
            for one in kept
            if schedule is None or one.slug != SCHEDULE_SLUG
        ]
        # No event loop runs here, so each of the three calls returns its result.
        flow = Flow.from_source(str(SOURCE_FOLDER), f"flows/pipeline.py:{FLOW}")
        assert isinstance(flow, Flow)
        deployment = flow.to_deployment(
            name.removeprefix(f"{FLOW}/"),
            description=f"`{settings.experiment}`, deployed by `millrace deploy`.",
            tags=[USER_TAG],
            parameters={
                "experiment": settings.experiment,
                "overrides": [text for text in settings.overrides if not text.startswith("paths.root=")],
            },
            work_pool_name=POOL,
            work_queue_name="training",
        )
        assert isinstance(deployment, RunnerDeployment)
        deployment.schedules = [*schedules, *([] if schedule is None else [schedule])]
        deployment_id = deployment.apply()
        assert isinstance(deployment_id, UUID)
        simplify_form(client, client.read_deployment(deployment_id), paused=known is not None and known.paused)
    return deployment_id


if __name__ == "__main__":
    try:
        main()
    except MillraceError as error:
        sys.exit(str(error))
