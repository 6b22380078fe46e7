"""The local stack: real servers, a real worker, runs started as deployments."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from shlex import quote
from typing import Any

import psutil
import pytest

from flows.commands.runs import stop
from flows.commands.stack import down as down_command
from flows.commands.stack import status as status_command
from flows.commands.stack import up as up_command
from flows.server.api import require_same_series
from flows.server.database import PREFECT_DATABASE
from flows.stack.control import Wishes, down, status, up
from flows.stack.services import end_server, end_worker, listener, mlflow_recipe, prefect_recipe
from flows.stack.state import Databases, Service, StackState, read_stack, stack_store, write_stack
from rlcore.errors import MillraceError
from rlcore.storage.locks import birth_of
from tests.flows.attempts import Attempt, told_to_a_page
from tests.flows.conftest import REPOSITORY, WAIT_S, numbers, wait_until
from tests.flows.serving import serving
from tests.flows.stack import RETRY, SUSPEND, Stack, stack_up
from tests.report.chromium import open_tab
from tests.small_run import prepare
from tests.storage.small_disk import fill, mounted

LONG = ("trainer.total_steps=60", "trainer.steps_per_chunk=20", "validation.every_steps=20")
ENDLESS = ("trainer.total_steps=100000", "trainer.steps_per_chunk=10", "validation.every_steps=0")
"""Longer than any test."""
MODIFIED_BY_A_NEWER_PREFECT = "ffffffffffff"


def test_a_process_with_another_birth_is_another_process() -> None:
    """A stale record whose process id somebody else has by now."""
    mine = Service("prefect", os.getpid(), birth_of(psutil.Process()), 1, "", "", "")
    assert mine.process() is not None
    assert replace(mine, born=mine.born - 100).process() is None


def test_a_damaged_record_is_told_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text('{"format_version": "x"}')
    with pytest.raises(MillraceError, match=r"stack\.json: is no record of a stack"):
        read_stack(tmp_path)


def test_a_record_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    write_stack(tmp_path, StackState(format_version=99))
    with pytest.raises(MillraceError, match="format_version must be 1, got 99"):
        read_stack(tmp_path)


def test_nothing_is_recorded_where_nothing_was_started(tmp_path: Path) -> None:
    assert status(tmp_path) == []
    down(tmp_path)


def test_down_ends_what_a_killed_worker_has_left_under_its_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, "-c", "import sys; sys.stdin.read()", "-m", "prefect.engine"]
    with ExitStack() as ends:
        ours, other = (
            ends.enter_context(
                subprocess.Popen(words, stdin=subprocess.PIPE, env=os.environ | {"PREFECT_HOME": str(root / "prefect")})
            )
            for root in (tmp_path, tmp_path / "other")
        )
        down_command(tmp_path)
        assert capsys.readouterr().out == f"a flow run whose worker was gone (process {ours.pid}) has ended\n"
        assert not psutil.pid_exists(ours.pid)
        assert other.poll() is None
        down_command(tmp_path)
        assert "nothing is up under" in capsys.readouterr().out


def test_a_copied_or_moved_root_has_none_of_the_stack_that_the_record_tells_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, copy, moved = (tmp_path / name for name in ("root", "copy", "moved"))
    root.mkdir()
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        born = birth_of(psutil.Process(server.pid))
        service = Service("mlflow", server.pid, born, 1, "http://here", "", "")
        database = Databases.chosen(root, {}).mlflow
        write_stack(root, StackState(mlflow_database=database, mlflow_url="http://here", services=(service,)))
        shutil.copytree(root, copy)
        assert [one for one, _ in status(root)] == [service]
        assert (status(copy), stack_store(copy)) == ([], None)
        down_command(copy)
        assert "nothing is up under" in capsys.readouterr().out
        down(copy)
        assert server.poll() is None
        link = tmp_path / "link"
        link.symlink_to(root)
        down(link)
        assert server.wait() is not None
    root.rename(moved)
    assert (status(moved), stack_store(moved)) == ([], None)


def test_status_has_the_line_for_a_new_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    me = psutil.Process()
    service = Service("prefect", me.pid, me.create_time(), 1, "http://here", "", "")
    write_stack(tmp_path, StackState(prefect_api_url="http://here/api", services=(service,)))
    with pytest.raises(SystemExit):
        status_command(tmp_path)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == (
        f'export PREFECT_API_URL=http://here/api PREFECT_API_AUTH_STRING="$(cat {tmp_path.resolve()}/stack-secret)"'
    )


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_was_asked_for_and_is_taken_is_refused_by_name(tmp_path: Path, busy_port: int) -> None:
    wishes = Wishes(prefect_port=busy_port)
    with pytest.raises(MillraceError, match=rf"--prefect-port: port {busy_port} is in use by process {os.getpid()}"):
        up(tmp_path, wishes=wishes)
    assert status(tmp_path) == []


@pytest.mark.prefect
def test_an_up_that_fails_takes_down_what_it_has_started(
    tmp_path: Path, busy_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MillraceError, match=f"--mlflow-port: port {busy_port} is in use"):
        up(tmp_path, wishes=Wishes(mlflow_port=busy_port))
    said = capsys.readouterr().out.splitlines()
    assert [text.split()[0] for text in said if text.endswith("has ended")] == ["prefect"]
    assert {state for _, state in status(tmp_path)} == {"gone"}


def test_a_server_takes_no_module_from_the_folder_that_its_command_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('somebody else\\'s uvicorn.py')\n")
    for recipe in (prefect_recipe, mlflow_recipe):
        made = recipe(tmp_path, Databases.chosen(tmp_path), None, StackState())
        command = [*made.command[: made.command.index("-m")], "-c", "import flows, uvicorn; print(flows.__file__)"]
        environment = os.environ | made.environment
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout == f"{REPOSITORY / 'flows' / '__init__.py'}\n", done.stderr


def test_a_recorded_port_that_somebody_else_has_by_now_is_left_to_them(
    tmp_path: Path, busy_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Service("prefect", 1, 1.0, busy_port, "", "", "")
    recipe = prefect_recipe(tmp_path, Databases.chosen(tmp_path, {}), None, StackState(services=(gone,)))
    assert recipe.port != busy_port
    assert f"port {busy_port} is in use by process {os.getpid()}" in capsys.readouterr().out


def test_who_listens_on_another_address_has_not_our_port() -> None:
    with socket.socket() as other, socket.socket() as ours:
        other.bind(("127.0.0.2", 0))
        other.listen()
        port = other.getsockname()[1]
        assert listener(port) is None
        ours.bind(("127.0.0.1", port))
        ours.listen()
        assert listener(port) == psutil.Process()


def test_a_service_that_ends_by_itself_meanwhile_is_no_error() -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process = psutil.Process(ended.pid)
    ended.wait()
    end_server(process)
    end_worker(process)


def test_a_server_of_another_version_is_told(tmp_path: Path) -> None:
    mine = Service("prefect", os.getpid(), birth_of(psutil.Process()), 1, "http://here", "", "")
    write_stack(tmp_path, StackState(prefect_version="3.0.0", services=(mine,)))
    with pytest.raises(MillraceError, match=r"(?s)prefect is up at http://here in version 3\.0\.0.*millrace down"):
        up(tmp_path)
    with pytest.raises(MillraceError, match=r"PREFECT_API_URL is Prefect 2\.20\.1, and 3\.7\.7 is installed"):
        require_same_series("2.20.1", "3.7.7", "PREFECT_API_URL")
    require_same_series("3.7.9", "3.7.7", "PREFECT_API_URL")


def test_a_port_asked_for_is_not_passed_over_where_the_server_is_up_at_another(tmp_path: Path) -> None:
    mine = Service("mlflow", os.getpid(), birth_of(psutil.Process()), 1, "http://here", "", "")
    write_stack(tmp_path, StackState(services=(mine,)))
    with pytest.raises(MillraceError, match="--mlflow-port 5001: mlflow is up already at http://here"):
        up(tmp_path, wishes=Wishes(mlflow_port=5001))


@pytest.mark.prefect
def test_the_password_of_a_database_that_cannot_be_used_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFECT_DATABASE, "postgresql+asyncpg://me:s3cret@127.0.0.1:9/prefect")
    with pytest.raises(MillraceError, match=r"prefect has ended instead of starting") as caught:
        up(tmp_path)
    assert "s3cret" not in str(caught.value)
    down(tmp_path)


@pytest.mark.prefect
def test_a_database_of_a_newer_prefect_is_told_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        database.execute("create table alembic_version (version_num varchar(32) not null)")
        database.execute("insert into alembic_version values (?)", (MODIFIED_BY_A_NEWER_PREFECT,))
        database.commit()
    with pytest.raises(MillraceError, match=r"(?s)has ended instead of starting.*written by a newer version"):
        up(tmp_path)
    down(tmp_path)


# ---------------------------------------------------------------------- one stack for all that follows


@dataclass
class Hook:
    """A server outside, as a webhook calls it; what it was told."""

    url: str
    told: list[dict[str, str]] = field(default_factory=list)

    def heard(self, event: str, words: str = "") -> bool:
        return any(one["event"] == event and words in one["message"] for one in self.told)


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with serving(Handler) as server:
        hook = Hook(f"{server}/run-told")
        yield hook


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, hook: Hook, empty_store: Path) -> Iterator[Stack]:
    """A stack that is up, on a root with data, start model and an empty MLflow store."""
    root = tmp_path_factory.mktemp("stack")
    shutil.copy(empty_store, root / "mlflow.db")
    prepare(root)
    with stack_up(root, Wishes(notify_url=hook.url)) as stack:
        yield stack


def added_by_hand(stack: Stack) -> dict[str, Any]:
    """A schedule that is added as docs/stack.md says, and a deployment that is paused."""
    deployment = stack.deployment("sweep/countdown-lr")
    assert deployment["schedules"] == []
    added = {"active": True, "schedule": {"cron": "0 3 1 1 *", "timezone": "UTC"}}
    (mine,) = stack.ask(f"deployments/{deployment['id']}/schedules", [added])
    stack.ask(f"deployments/{stack.deployment('pipeline/dataset')['id']}", {"paused": True}, "PATCH")
    assert isinstance(mine, dict)
    return mine


@pytest.mark.prefect
@pytest.mark.slow
def test_a_second_up_starts_nothing_again_and_leaves_what_people_have_switched(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_stack(stack.root)
    with pytest.raises(MillraceError, match="must name a notification block"):
        up(stack.root, Wishes(notify_block="slack-webhook/nobody"))
    capsys.readouterr()
    mine = added_by_hand(stack)
    up_command(stack.root)
    said = capsys.readouterr().out.splitlines()
    assert stack.deployment("pipeline/dataset")["paused"] is True
    # Prefect's own command applies the same file, and leaves schedules too.
    applied = stack.prefect("deploy", "--all")
    assert applied.returncode == 0, applied.stdout + applied.stderr
    changed = stack.deployment("sweep/countdown-lr")
    (kept,) = changed["schedules"]
    assert (kept["id"], kept["active"], kept["schedule"]["cron"]) == (mine["id"], True, mine["schedule"]["cron"])
    assert (changed["work_queue_name"], changed["concurrency_options"]["collision_strategy"]) == ("control", "ENQUEUE")
    stack.ask(f"deployments/{changed['id']}/schedules/{mine['id']}", method="DELETE")
    up_command(stack.root)  # its forms list the experiments, Prefect's own do not
    assert read_stack(stack.root) == before
    assert len([line for line in said if "is up already" in line]) == 3
    assert [state for _, state in status(stack.root)] == ["up"] * 3
    assert all(Path(service.log).stat().st_mode & 0o077 == 0 for service in before.services)

    # The one line for a shell is enough for Prefect's own commands, and says no secret.
    (line,) = (line for line in said if line.startswith("export "))
    assert stack.login not in "".join(said)
    listed = [line, f"exec {quote(sys.executable)} -m prefect deployment inspect pipeline/debug"]
    done = subprocess.run(["sh", "-c", "; ".join(listed)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert stack.deployment("pipeline/debug")["id"] in done.stdout


@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.program("chromium")
def test_no_web_page_commands_the_stack(stack: Stack, tmp_path: Path) -> None:
    """A page of a stranger, and one whose own name resolves to this machine meanwhile (DNS rebinding)."""

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
        assert set(told_to_a_page(tab, stack, command)) <= {"refused", "opaque 0"}

        prefect = stack.url.removesuffix("/api").replace("127.0.0.1", "evil.example")
        tab.call("Page.navigate", url=prefect)
        tab.wait(f"location.origin === {json.dumps(prefect)} && document.readyState === 'complete'")
        answers = told_to_a_page(tab, stack, command, through="evil.example")
        assert set(answers) <= {"basic 403", "refused", "opaque 0"}, answers
        assert "basic 403" in answers, "the browser takes it for the page's own server"
    assert stack.api.filter("flow_runs") == runs
    made = Attempt("GET", "/api/2.0/mlflow/experiments/get-by-name?experiment_name=evil", login=stack.login, status=404)
    made.try_at(read_stack(stack.root).mlflow_url)
    assert not proof.exists()
    stack.assert_hidden(stack.login, stack.login.partition(":")[2])


@pytest.mark.lengthy  # without a browser: the two tests below that start such runs
@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.program("chromium")
def test_the_form_refuses_a_negative_learning_rate_and_runs_a_file_of_ones_own(stack: Stack, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [debug, _self_]\nname: own\n")
    with open_tab(tmp_path / "profile") as tab:

        def fill_in(name: str, text: str) -> None:
            """Type into the field of a parameter, over what it holds, and leave it."""
            label = f"[...document.querySelectorAll('.p-label')].find((one) => one.innerText.startsWith('{name} '))"
            tab.value(f"{label}.querySelector('input, textarea').select()")
            tab.type(text)
            tab.value("document.activeElement.blur()")

        def press(selector: str, text: str) -> None:
            """Press the last button with this text, once it is there."""
            buttons = f"[...document.querySelectorAll('{selector}')].filter((one) => one.innerText.trim() === '{text}')"
            tab.wait(f"{buttons}.length > 0")
            tab.value(f"{buttons}.at(-1).click()")

        def submit() -> None:
            tab.value("document.querySelector('button[type=submit]').click()")

        stack.log_in(tab, f"/deployments/deployment/{stack.deployment('pipeline/debug')['id']}/run")
        tab.wait("document.body && document.body.innerText.includes('Answers to each prompt')")
        assert tab.value("document.querySelector('select').value") == "debug"
        press("button", "File")
        fill_in("experiment", str(own))
        fill_in("total_steps", "1")
        fill_in("learning_rate", "-1")
        submit()
        tab.wait("document.body.innerText.includes('-1 is less than or equal to the minimum of 0')")
        assert stack.api.filter("flow_runs") == []
        fill_in("learning_rate", "0.001")
        submit()
        wait_until(lambda: bool(stack.api.filter("flow_runs")), "a run of the form")
        (made,) = stack.api.filter("flow_runs", deployments={"name": {"any_": ["debug"]}})
        assert made["parameters"]["experiment"] == str(own)
        assert (made["parameters"]["learning_rate"], made["parameters"]["total_steps"]) == (0.001, 1)
        assert stack.wait(made["id"], "COMPLETED")["name"] == "pipeline/own"
        assert sorted(numbers(stack.run_dir("own"))) == [0, 1]


@pytest.mark.prefect
@pytest.mark.slow
def test_a_wrong_override_fails_the_flow_run_with_the_command_lines_message_and_is_told_outside(
    stack: Stack, hook: Hook
) -> None:
    run = stack.start("pipeline/debug", overrides=["trainer.totl_steps=5"])
    assert "Did you mean trainer.total_steps?" in stack.wait(run, "FAILED")["state"]["message"]
    wait_until(lambda: hook.heard("prefect.flow-run.Failed", "trainer.totl_steps"), "the hook hears of the failure")


@pytest.mark.prefect
@pytest.mark.slow
def test_a_wrong_value_is_refused_before_there_is_a_run(stack: Stack) -> None:
    for wrong, told in (({"learning_rate": -1}, "learning_rate"), ({"experiment": "debg"}, "countdown_demo")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            stack.start("pipeline/debug", **wrong)
        assert refused.value.code == 409
        assert told in refused.value.read().decode()


@pytest.mark.prefect
@pytest.mark.slow
def test_a_cancelled_run_has_saved(stack: Stack) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=cancelled"])
    stack.wait_for_step("cancelled", 3)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")
    assert stack.steps_saved("cancelled")[-1] == max(numbers(stack.run_dir("cancelled"))) > 0
    assert stack.mlflow_status("cancelled") == "KILLED"


@pytest.mark.lengthy  # what stop says: test_run_commands.py; a cancellation: test_a_cancelled_run_has_saved
@pytest.mark.prefect
@pytest.mark.slow
def test_a_run_that_millrace_stop_has_ended_is_cancelled_and_goes_on_by_retry(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=told"])
    stack.wait_for_step("told", 3)
    process = stack.process_of(run)
    stop([str(stack.run_dir("told"))])
    saved = stack.steps_saved("told")[-1]
    assert f"step {saved} is saved; `prefect flow-run retry {run}` goes on" in capsys.readouterr().out
    stack.wait(run, "CANCELLED")
    wait_until(lambda: not process.is_running(), "the flow's process has ended")
    assert stack.mlflow_status("told") == "KILLED"
    done = stack.prefect("flow-run", "retry", run)
    assert done.returncode == 0, done.stderr
    stack.wait_for_step("told", saved + 1)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")


@pytest.mark.prefect
@pytest.mark.slow
def test_a_completed_run_that_is_tried_again_is_completed_again(stack: Stack, tmp_path: Path) -> None:
    """Of an experiment's file, as the form sends it."""
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [debug, _self_]\nname: again\n")
    run = stack.start("pipeline/debug", experiment=str(own), total_steps=1, learning_rate=0.001)
    assert stack.wait(run, "COMPLETED")["name"] == "pipeline/own"
    with suppress(psutil.NoSuchProcess):
        stack.process_of(run).wait()
    stack.set_state(run, RETRY)
    wait_until(lambda: stack.run(run)["run_count"] == 2, "it has begun again")
    stack.wait(run, "COMPLETED")
    assert sorted(numbers(stack.run_dir("again"))) == [0, 1], "no step was done again"


@pytest.mark.lengthy
@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_run_goes_on_by_retry_and_a_paused_one_by_resume(stack: Stack, hook: Hook) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=story"])
    stack.wait_for_step("story", 3)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")
    saved = stack.steps_saved("story")[-1]

    # Tried again, it goes on; suspended, it ends its chunk and its process, and tells the hook.
    stack.retry_cancelled(run)
    stack.wait_for_step("story", saved + 1)
    process, trainer = stack.process_of(run), stack.trainer("story")
    stack.set_state(run, SUSPEND)
    wait_until(lambda: not process.is_running(), "the flow's process has ended")
    assert not trainer.is_running()
    wait_until(lambda: hook.heard("prefect.flow-run.Suspended"), "the hook hears of the pause")
    assert stack.run(run)["state_type"] == "PAUSED"
    reached = max(numbers(stack.run_dir("story")))
    assert reached >= 10
    assert stack.steps_saved("story")[-1] == reached  # steps of the next chunk too

    # Its last heartbeat is not its last event: else it would be given up as lost.
    events = stack.ask("events/filter", {"filter": {"any_resource": {"id": [f"prefect.flow-run.{run}"]}}, "limit": 5})
    assert events["events"][0]["event"] != "prefect.flow-run.heartbeat"

    # Resumed, it goes on; cancelled a second time, it ends a second time.
    stack.ask(f"flow_runs/{run}/resume", {})
    stack.wait_for_step("story", reached + 1)
    stack.set_state(run, {"type": "CANCELLING"})
    assert stack.wait(run, "CANCELLED")["run_count"] == 2  # to resume is not to start anew
    assert stack.steps_saved("story")[-1] > reached


@pytest.mark.lengthy
@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_is_told_once(stack: Stack, hook: Hook) -> None:
    before, runs = len(hook.told), stack.root / "runs"
    with mounted(runs, size_mib=32):
        run = stack.start("pipeline/debug", overrides=[*LONG[1:], "trainer.total_steps=200", "name=full"])
        stack.wait_for_step("full", 2)
        ballast = fill(runs, leave_bytes=1 << 20)
        wait_until(lambda: hook.heard("millrace.paused_for_disk", "B are missing"), "the hook hears of the pause")
        stack.wait(run, "PAUSED")
        ballast.unlink()
        stack.wait(run, "COMPLETED")
    assert [one["event"] for one in hook.told[before:]] == ["millrace.paused_for_disk"]


@pytest.mark.lengthy
@pytest.mark.prefect
@pytest.mark.slow
def test_a_lost_worker_and_flow_are_found_by_the_next_up_and_the_run_goes_on(stack: Stack) -> None:
    run = stack.start("pipeline/debug", overrides=[*LONG, "name=lost"])
    stack.wait_for_step("lost", 22)
    worker = read_stack(stack.root).service("worker-1")
    assert worker is not None
    process = worker.process()
    assert process is not None
    for member in [*process.children(), process]:
        member.send_signal(signal.SIGKILL)
    psutil.wait_procs([process])
    assert ("worker-1", "gone") in [(service.name, state) for service, state in status(stack.root)]
    up(stack.root)
    assert stack.wait(run, "COMPLETED")["run_count"] == 2
    assert sorted(numbers(stack.run_dir("lost"))) == list(range(61))
