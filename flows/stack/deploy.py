"""Everything that Millrace has in a Prefect server: work pool, queues, automations, deployments.

    python -m flows.stack.deploy [--workers-are-up]

Talks to the server of `PREFECT_API_URL`. What is there already is brought up to date, so it may run again and again.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import StateType, WorkPool, WorkQueue
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.server.watch import NO_HEARTBEAT
from flows.stack.by_hand import known_deployments, put_back
from flows.stack.control import NOTIFY_URL, SAID, WORKERS_ARE_UP
from flows.stack.forms import ease_forms
from flows.stack.notify import keep_automation, notify
from flows.stack.recipes import POOL
from flows.stack.recover import recover_lost_runs
from flows.trainer.client import SOURCE_FOLDER
from rlcore.config.compose import experiment_names
from rlcore.errors import MillraceError

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
JOB: dict[str, Any] = {
    # The worker's folder; else a temporary one, which a killed worker leaves.
    "job_configuration": {"working_dir": "."},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""How the worker starts a flow run: by Prefect's own command, in its own environment. A job variable is refused: by
default one may name another command, other variables of the environment or another folder."""
QUEUES: dict[str, int | None] = {"training": 1, "control": None}
"""Flow runs at a time. One training for each group of GPUs that this host has; raise it with `prefect work-queue`."""
LOST_AFTER = timedelta(seconds=90)
"""Three heartbeats."""
OUR_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
HEARTBEAT_LOST = "millrace: a flow run without a heartbeat has crashed"


def main() -> None:
    """Set it all up, and say what is worth saying."""
    wanted = _deployments()
    with get_client(sync_client=True) as client:
        pool = _ensure_pool(client)
        for name, limit in QUEUES.items():
            _ensure_queue(client, name, limit)
        _ensure_automation(client)
        if NOTIFY_URL in os.environ:
            notify(client, os.environ[NOTIFY_URL])
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
        if entrypoint.partition(":")[0] in files and (entrypoint, one.name) not in listed:
            found.append(f"{client.read_flow(one.flow_id).name}/{one.name}")
    return sorted(found)


def _ensure_pool(client: SyncPrefectClient) -> WorkPool:
    """A pool of processes on this host."""
    try:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=JOB))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=JOB))
    return client.read_work_pool(POOL)


def _ensure_queue(client: SyncPrefectClient, name: str, limit: int | None) -> WorkQueue:
    """A queue with its first limit; a limit that people have set since stays."""
    try:
        return client.read_work_queue_by_name(name, work_pool_name=POOL)
    except ObjectNotFound:
        return client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)


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


if __name__ == "__main__":
    try:
        main()
    except MillraceError as error:
        sys.exit(str(error))
