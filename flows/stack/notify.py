"""Failures and pauses told outside: a webhook block in the Prefect server, and two automations that call it."""

from datetime import timedelta
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.types import SecretDict
from pydantic import SecretStr

BLOCK = "millrace-notify"
ENDED_BADLY = "millrace: tell of a run that failed or waits"
SHORT_OF_ROOM = "millrace: tell of a run that waits for room on the disk"
BAD_ENDS = ("Failed", "Crashed", "TimedOut", "Suspended")
"""Without Paused: our flow runs are Paused only while they wait for room. That is told by the other automation, with
all that is known, and of runs that no deployment has started too."""
ANY_RUN = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
STARTED_AS_DEPLOYMENT = ResourceSpecification(
    {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"}
)
"""Flows nested in a run fail with it; it is told once."""
OF_A_FLOW_RUN = (
    '{"event": {{ event.event | tojson }}, "run": {{ flow_run.name | tojson }}, '
    '"message": {{ (flow_run.state.message or "") | tojson }}, "page": {{ (flow_run | ui_url) | tojson }}}'
)
OF_A_TRAINER = (
    '{"event": {{ event.event | tojson }}, "run": {{ event.resource.name | tojson }}, '
    '"message": {{ event.payload.text | tojson }}}'
)
"""Bodies of the request: JSON, filled in by the server."""


def notify(client: SyncPrefectClient, url: str) -> None:
    """Call `url` from now on. The server keeps it as a secret."""
    block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    saved = block.save(BLOCK, overwrite=True)
    assert isinstance(saved, UUID)  # no event loop runs here, so it was saved before the call returned
    runs = EventTrigger(
        expect={f"prefect.flow-run.{end}" for end in BAD_ENDS},
        match=ANY_RUN,
        match_related=STARTED_AS_DEPLOYMENT,
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    room = EventTrigger(
        expect={"millrace.paused_for_disk"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    for name, trigger, body in ((ENDED_BADLY, runs, OF_A_FLOW_RUN), (SHORT_OF_ROOM, room, OF_A_TRAINER)):
        call = CallWebhook(block_document_id=saved, payload=body)
        keep_automation(client, AutomationCore(name=name, trigger=trigger, actions=[call]))


def keep_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Make it, or bring it up to date."""
    known = client.read_automations_by_name(wanted.name)
    if known:
        client.update_automation(known[0].id, wanted)
    else:
        client.create_automation(wanted)
