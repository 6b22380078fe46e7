"""What people have switched on and off, and added, in the deployments: `prefect deploy` sets it back to the file's."""

from collections.abc import Mapping
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import WorkPoolFilter
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse

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
                client.create_deployment_schedules(now.id, [_copy(schedule)])
            elif same.active != schedule.active:
                # Without its parameters Prefect 3.7 forgets them.
                client.update_deployment_schedule(now.id, same.id, active=schedule.active, parameters=same.parameters)


def _same(schedule: DeploymentSchedule, among: list[DeploymentSchedule]) -> DeploymentSchedule | None:
    """The file's schedules have slugs, by which they are known again; those that people add have none as a rule."""
    return next((one for one in among if one.id == schedule.id or (one.slug and one.slug == schedule.slug)), None)


def _copy(schedule: DeploymentSchedule) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=schedule.schedule,
        active=schedule.active,
        max_scheduled_runs=schedule.max_scheduled_runs,
        parameters=schedule.parameters,
        slug=schedule.slug,
    )
