"""Prefect's notification blocks, as `millrace up` sets them up, on a real server."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.flows.conftest import wait_until
from tests.flows.serving import serving
from tests.flows.stack import Stack, prefect_up

SECRET = "s3cret-token"
BLOCKS = f"""
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import get_client
from prefect.types import SecretDict
from pydantic import SecretStr
from flows.stack.deploy import notify
from rlcore.errors import MillraceError
port = sys.argv[1]
SlackWebhook(url=SecretStr(f"json://127.0.0.1:{{port}}/{SECRET}")).save("team")
CustomWebhookNotificationBlock(
    name="team",
    url=f"http://127.0.0.1:{{port}}/{{{{{{{{token}}}}}}}}",
    json_data={{"title": "{{{{subject}}}}", "message": "{{{{body}}}}"}},
    secrets=SecretDict({{"token": "{SECRET}"}}),
).save("failing")
with get_client(sync_client=True) as client:
    try:
        notify(client, None, "slack-webhook/taem")
    except MillraceError as error:
        print(error)
"""
EVENT = """
import sys
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from flows.stack.deploy import notify
with get_client(sync_client=True) as client:
    notify(client, None, sys.argv[1])
resource = {"prefect.resource.id": "millrace.run.x", "prefect.resource.name": "x"}
for word in ("disk_room", "paused_for_disk"):
    emit_event(f"millrace.{word}", resource=resource, payload={"text": "3 GB are missing"})
"""


def in_prefect(stack: Stack, code: str, *words: str) -> str:
    """Python that talks to the stack's Prefect; what it prints."""
    done = stack.python("-c", code, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stdout


@pytest.mark.prefect
@pytest.mark.slow
def test_an_event_is_sent_to_the_block_that_a_setting_names_and_a_failing_block_is_logged(tmp_path: Path) -> None:
    received: list[dict[str, str]] = []
    answers = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == f"/{SECRET}"
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers[-1])
            self.end_headers()

    with serving(Handler) as server, prefect_up(tmp_path) as stack:
        printed = in_prefect(stack, BLOCKS, server.rpartition(":")[2])
        assert "got slack-webhook/taem, and there is custom-webhook/failing, slack-webhook/team" in printed
        for block in ("slack-webhook/team", "custom-webhook/failing"):
            in_prefect(stack, EVENT, block)
            wait_until(lambda: received, "the block is called")
            assert {(one["title"], one["message"]) for one in received} == {
                ("x: millrace.paused_for_disk", "3 GB are missing")
            }, "of the other event there is no message"
            received.clear()
            answers.append(500)
        wait_until(lambda: "HTTPStatusError 500" in stack.log("prefect"), "the server's log names the failure")
        stack.assert_hidden(SECRET)
