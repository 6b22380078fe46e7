"""The local stack: real servers, a real worker, runs started as deployments."""

import json
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.types import SecretDict

from flows.commands.runs import stop
from flows.server.watch import CANCELLED
from flows.stack.control import service_states, up
from flows.stack.deploy import set_up_notifications
from flows.stack.state import read_stack
from rlcore.errors import MillraceError
from tests.flows.conftest import numbers, wait_until
from tests.helpers.attempts import Attempt, responses_to_page
from tests.helpers.chromium import open_tab
from tests.helpers.serving import serving
from tests.helpers.small_run import prepare
from tests.helpers.stack import RETRY, SUSPEND, Stack, stack_up
from tests.storage.small_disk import fill, mounted

LONG = ("trainer.total_steps=60", "trainer.steps_per_chunk=20", "validation.every_steps=20")
ENDLESS = ("trainer.total_steps=100000", "trainer.steps_per_chunk=10", "validation.every_steps=0")
"""Longer than any test."""

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

SECRET = "s3cret-token"
RESOURCE = {"prefect.resource.id": "millrace.run.x", "prefect.resource.name": "x"}


@dataclass
class Hook:
    url: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    answer: int = 200

    def heard(self, title: str, words: str = "") -> bool:
        return any(title in one["title"] and words in one["message"] for one in self.messages)


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == f"/{SECRET}"
            hook.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(hook.answer)
            self.end_headers()

    with serving(Handler) as hook.url:
        yield hook


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, hook: Hook, empty_store: Path) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stack")
    shutil.copy(empty_store, root / "mlflow.db")
    prepare(root)
    with stack_up(root) as stack:
        with stack.client() as client:
            CustomWebhookNotificationBlock(
                name="hook",
                url=f"{hook.url}/{{{{token}}}}",
                json_data={"title": "{{subject}}", "message": "{{body}}"},
                secrets=SecretDict({"token": SECRET}),
            ).save("hook")
            set_up_notifications(client, "custom-webhook/hook")
        yield stack


def test_a_block_that_is_not_there_is_refused_with_those_that_are(stack: Stack) -> None:
    with stack.client() as client, pytest.raises(MillraceError) as refused:
        set_up_notifications(client, "slack-webhook/absent")
    assert "as TYPE/NAME; got slack-webhook/absent, and there is custom-webhook/hook" in str(refused.value)


def test_a_second_up_leaves_processes_and_what_people_have_changed(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_stack(stack.root)
    deployment = stack.deployment("sweep/countdown-lr")
    added = {"active": True, "schedule": {"cron": "0 3 1 1 *", "timezone": "UTC"}}
    (mine,) = stack.ask(f"deployments/{deployment['id']}/schedules", [added])
    stack.ask(f"deployments/{stack.deployment('pipeline/dataset')['id']}", {"paused": True}, "PATCH")
    up(stack.root)
    said = capsys.readouterr().out.splitlines()
    assert stack.deployment("pipeline/dataset")["paused"] is True
    changed = stack.deployment("sweep/countdown-lr")
    (kept,) = changed["schedules"]
    assert (kept["id"], kept["active"], kept["schedule"]["cron"]) == (mine["id"], True, mine["schedule"]["cron"])
    assert (changed["work_queue_name"], changed["concurrency_options"]["collision_strategy"]) == ("control", "ENQUEUE")
    stack.ask(f"deployments/{changed['id']}/schedules/{mine['id']}", method="DELETE")
    assert changed["global_concurrency_limit"]["name"] == "deployment sweep countdown-lr"
    form = stack.deployment("pipeline/debug")["parameter_openapi_schema"]["properties"]
    assert form["total_steps"]["type"] == "integer", "the form may be left empty"
    assert read_stack(stack.root) == before
    assert len([line for line in said if "is up already" in line]) == 3
    assert [state for _, state in service_states(stack.root)] == ["up"] * 3
    assert all(Path(service.log).stat().st_mode & 0o077 == 0 for service in before.services)

    # Prefect's own commands find the stack in a new shell, and nothing printed has the login.
    assert stack.login not in "".join(said)
    prefect = [sys.executable, "-m", "prefect", "deployment", "inspect", "pipeline/debug"]
    assert "'name': 'debug'" in subprocess.check_output(prefect, text=True, cwd=stack.root)


def test_a_notification_that_fails_is_logged_without_its_address(stack: Stack, hook: Hook) -> None:
    hook.answer = 500
    events = [
        {"event": f"millrace.{word}", "resource": RESOURCE, "payload": {"text": "3 GB are missing"}}
        for word in ("disk_room", "paused_for_disk")
    ]
    stack.ask("events", [{**one, "id": str(uuid4()), "occurred": datetime.now(UTC).isoformat()} for one in events])
    wait_until(lambda: "HTTPStatusError 500" in stack.log("prefect"), "the server's log names the failure")
    hook.answer = 200
    reported = {(one["title"], one["message"]) for one in hook.messages}  # a set, because Prefect repeats what failed
    assert reported == {("x: millrace.paused_for_disk", "3 GB are missing")}, "of the other event there is no message"
    stack.assert_hidden(SECRET)


@pytest.mark.program("chromium")
def test_no_web_page_commands_the_stack(stack: Stack, tmp_path: Path) -> None:
    """One page is a stranger's. The other has a host name that now resolves to this machine (DNS rebinding)."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    proof, runs = tmp_path / "ran", stack.api.filter("flow_runs")
    command = f"touch {proof}"
    resolves = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with serving(Page) as server, open_tab(tmp_path / "profile", resolves) as tab:
        tab.call("Page.navigate", url=server.replace("127.0.0.1", "evil.example"))
        tab.wait("location.hostname === 'evil.example' && document.readyState === 'complete'")
        # Without CORS a browser hides the answer, which is "opaque 0" whatever it was.
        assert set(responses_to_page(tab, stack, command)) <= {"refused", "opaque 0"}

        prefect = stack.url.removesuffix("/api").replace("127.0.0.1", "evil.example")
        tab.call("Page.navigate", url=prefect)
        tab.wait(f"location.origin === {json.dumps(prefect)} && document.readyState === 'complete'")
        answers = responses_to_page(tab, stack, command, through="evil.example")
        assert set(answers) <= {"basic 403", "refused", "opaque 0"}, answers
        assert "basic 403" in answers, "the browser takes it for the page's own server"
    assert stack.api.filter("flow_runs") == runs
    made = Attempt("GET", "/api/2.0/mlflow/experiments/get-by-name?experiment_name=evil", login=stack.login, status=404)
    made.try_at(read_stack(stack.root).mlflow_url)
    assert not proof.exists()
    stack.assert_hidden(stack.login, stack.login.partition(":")[2])


def test_a_wrong_override_fails_the_run_and_is_notified(stack: Stack, hook: Hook) -> None:
    wrong = json.dumps(["trainer.totl_steps=5"])
    watched = stack.prefect(
        "deployment", "run", "pipeline/debug", "--watch", "--flow-run-name", "my-run", "-p", f"overrides={wrong}"
    )
    assert watched.returncode == 1
    assert "Did you mean trainer.total_steps?" in watched.stdout, "the reason is in the log"
    assert "Traceback" not in watched.stdout
    failed = stack.newest()
    assert failed["name"] == "my-run"
    assert "Did you mean trainer.total_steps?" in failed["state"]["message"]
    assert failed["run_count"] == 1, "trying again would not help"
    wait_until(lambda: hook.heard(": Failed", "trainer.totl_steps"), "the hook receives the failure")


def test_a_wrong_value_is_refused_before_there_is_a_run(stack: Stack) -> None:
    for wrong, reported in (({"learning_rate": -1}, "learning_rate"), ({"experiment": "debg"}, "countdown_demo")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            stack.start("pipeline/debug", **wrong)
        assert refused.value.code == 409
        assert reported in refused.value.read().decode()


def test_a_cancelled_run_has_saved(stack: Stack) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=cancelled"])
    stack.wait_for_step("cancelled", 3)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")

    def last_messages() -> list[str]:
        return [str(state["message"]) for state in stack.ask(f"flow_run_states/?flow_run_id={run}")][-2:]

    replaced = ["Flow run was cancelled successfully.", CANCELLED]
    wait_until(lambda: last_messages() == replaced, "the message of Prefect's worker is replaced by ours")
    assert stack.steps_saved("cancelled")[-1] == max(numbers(stack.run_dir("cancelled"))) > 0
    assert stack.mlflow_status("cancelled") == "KILLED"


def test_a_completed_run_that_is_tried_again_is_completed_again(stack: Stack, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [debug, _self_]\nname: again\n")
    parameters = {"experiment": str(own), "total_steps": 1, "learning_rate": 0.001}
    made = {"name": "my own name", "parameters": parameters}
    run = stack.ask(f"deployments/{stack.deployment('pipeline/debug')['id']}/create_flow_run", made)["id"]
    completed = stack.wait(run, "COMPLETED")
    assert completed["name"] == "my own name"
    assert stack.run_dir("again").name in completed["tags"]
    with suppress(psutil.NoSuchProcess):
        stack.process_of(run).wait()
    stack.set_state(run, RETRY)
    wait_until(lambda: stack.run(run)["run_count"] == 2, "it has begun again")
    again = stack.wait(run, "COMPLETED")
    assert [one["state"]["message"].endswith(" s in the last attempt") for one in (completed, again)] == [False, True]
    assert sorted(numbers(stack.run_dir("again"))) == [0, 1], "no step was done again"


@pytest.mark.lengthy
@pytest.mark.timeout(900)
def test_a_stopped_run_resumes_by_retry_and_a_suspended_one_by_resume(
    stack: Stack, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=story"])
    stack.wait_for_step("story", 3)
    process = stack.process_of(run)
    stop([str(stack.run_dir("story"))])
    saved = stack.steps_saved("story")[-1]
    assert f"step {saved} is saved; `prefect flow-run retry {run}`" in capsys.readouterr().out
    stack.wait(run, "CANCELLED")
    wait_until(lambda: not process.is_running(), "the flow's process has ended")
    assert stack.mlflow_status("story") == "KILLED"

    # Retried, it resumes; suspended, it ends its chunk and its process, and notifies the hook.
    done = stack.prefect("flow-run", "retry", run)
    assert done.returncode == 0, done.stderr
    stack.wait_for_step("story", saved + 1)
    process, trainer = stack.process_of(run), stack.trainer("story")
    stack.set_state(run, SUSPEND)
    wait_until(lambda: not process.is_running(), "the flow's process has ended")
    assert not trainer.is_running()
    wait_until(lambda: hook.heard(": Suspended"), "the hook receives the pause")
    assert stack.run(run)["state_type"] == "PAUSED"
    reached = max(numbers(stack.run_dir("story")))
    assert reached >= 10
    assert stack.steps_saved("story")[-1] == reached  # steps of the next chunk too

    # Resumed, it continues; cancelled a second time, it ends a second time.
    stack.ask(f"flow_runs/{run}/resume", {})
    stack.wait_for_step("story", reached + 1)
    stack.set_state(run, {"type": "CANCELLING"})
    assert stack.wait(run, "CANCELLED")["run_count"] == 2  # a resume is no new start
    assert stack.steps_saved("story")[-1] > reached


@pytest.mark.lengthy
@pytest.mark.timeout(900)
def test_full_disk_is_reported_once(stack: Stack, hook: Hook) -> None:
    before, runs = len(hook.messages), stack.root / "runs"
    with mounted(runs, size_mib=32):
        run = stack.start("pipeline/debug", overrides=[*LONG[1:], "trainer.total_steps=200", "name=full"])
        stack.wait_for_step("full", 2)
        ballast = fill(runs, leave_bytes=1 << 20)
        wait_until(lambda: hook.heard("millrace.paused_for_disk", "B are missing"), "the hook receives the pause")
        stack.wait(run, "PAUSED")
        ballast.unlink()
        stack.wait(run, "COMPLETED")
    assert [one["title"].rpartition(": ")[2] for one in hook.messages[before:]] == ["millrace.paused_for_disk"]


@pytest.mark.lengthy
def test_the_next_up_resumes_a_run_without_worker_and_flow(stack: Stack) -> None:
    run = stack.start("pipeline/debug", overrides=[*LONG, "name=lost"])
    stack.wait_for_step("lost", 22)
    stack.kill("worker-1", with_children=True)
    up(stack.root)
    assert stack.wait(run, "COMPLETED")["run_count"] == 2
    assert sorted(numbers(stack.run_dir("lost"))) == list(range(61))
