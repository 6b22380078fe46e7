"""Start, status and end of a stack: what is refused, which processes are ended, records, and profiles."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_PROFILES_PATH, temporary_settings

from flows.stack import state
from flows.stack.control import down, keep_profile, remove_profile, service_states, status, up
from flows.stack.services import is_ready, kill, start_mlflow, stop_flows, stop_server
from flows.stack.state import Service, StackState, read_stack, write_stack
from rlcore.errors import MillraceError
from rlcore.storage.locks import start_time_of
from tests.helpers.serving import serving
from tests.helpers.stack import prefect_home

WAITING = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


def service(name: str, pid: int | None = None, port: int = 1, url: str = "http://here") -> Service:
    """Return the recorded service of this process, or of another live process."""
    process = psutil.Process(pid)
    return Service(name, process.pid, start_time_of(process), port, url, "", "", version(name))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("text", ['{"services": "x"}', '{"format_version": 1}', "{"])
def test_another_record_is_refused_with_its_remedy(tmp_path, text):
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(MillraceError, match=r"stack\.json: is no record of a stack of this Millrace .*millrace down"):
        read_stack(tmp_path)


def test_a_copied_or_moved_root_has_no_stack(tmp_path, capsys):
    root, copy, moved = (tmp_path / name for name in ("root", "copy", "moved"))
    root.mkdir()
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as server:
        mlflow = service("mlflow", server.pid)
        write_stack(root, StackState(mlflow_database=state.default_mlflow_database(root), services=(mlflow,)))
        shutil.copytree(root, copy)
        assert [one for one, _ in service_states(root)] == [mlflow]
        assert (service_states(copy), state.stack_tracking_uri(copy)) == ([], None)
        down(copy)
        assert "nothing is up under" in capsys.readouterr().out
        assert server.poll() is None
        link = tmp_path / "link"
        link.symlink_to(root)
        down(link)
        assert server.wait() is not None
    root.rename(moved)
    assert (service_states(moved), state.stack_tracking_uri(moved)) == ([], None)


def test_status_has_rows_and_in_a_terminal_the_line_for_a_new_shell(tmp_path, capsys, monkeypatch):
    def show_status() -> list[str]:
        with pytest.raises(SystemExit):
            status(tmp_path)
        return capsys.readouterr().out.splitlines()

    write_stack(tmp_path, StackState(services=(service("prefect"),)))
    (row,) = show_status()
    assert row.split("\t")[:3] == ["prefect", "does not answer", "http://here"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    login = f'"$(cat {tmp_path.resolve()}/stack-secret)"'
    assert show_status()[-1] == f"export PREFECT_API_URL=http://here/api PREFECT_API_AUTH_STRING={login}"


@pytest.mark.parametrize(
    ("recorded", "port", "reported"),
    [
        ("3.0.0", None, r"(?s)mlflow is up at http://here in version 3\.0\.0.*millrace down"),
        (version("mlflow"), 5001, "--mlflow-port 5001: mlflow is up already at http://here"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(tmp_path, recorded, port, reported):
    write_stack(tmp_path, StackState(services=(replace(service("mlflow"), version=recorded),)))
    with pytest.raises(MillraceError, match=reported):
        up(tmp_path, mlflow_port=port)


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_requested_port_in_use_is_refused_before_a_start(tmp_path, busy_port, name):
    with pytest.raises(MillraceError, match=rf"--{name}-port: port {busy_port} is in use"):
        up(tmp_path, **{f"{name}_port": busy_port})
    assert service_states(tmp_path) == []


def test_a_recorded_port_in_use_is_replaced(tmp_path, busy_port, capsys):
    gone = replace(service("mlflow", port=busy_port), born=1.0)
    started = start_mlflow(tmp_path, None, StackState(services=(gone,)))
    process = started.process()
    kill([process, *process.children(recursive=True)])
    assert started.port != busy_port
    assert f"port {busy_port} is in use" in capsys.readouterr().out


def test_another_process_at_its_port_is_not_the_service():
    """Another user may listen first, and must not receive our login."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with serving(Page) as url, subprocess.Popen(WAITING, stdin=subprocess.PIPE) as other:
        mine = replace(service("mlflow", port=int(url.rpartition(":")[2])), ready_url=url)
        assert is_ready(mine)
        assert not is_ready(replace(mine, pid=other.pid, born=start_time_of(psutil.Process(other.pid))))


@pytest.mark.prefect
def test_an_up_that_fails_takes_down_what_it_has_started(tmp_path, capsys):
    prefect_home(tmp_path / "prefect")
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(MillraceError, match="must be a file of sqlite"):
        up(tmp_path)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("has ended")] == [
        "prefect"
    ]
    assert {state for _, state in service_states(tmp_path)} == {"not running"}


@pytest.mark.prefect
def test_an_unusable_database_is_reported_without_its_password(tmp_path, empty_store, monkeypatch):
    (tmp_path / "prefect").mkdir()
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        database.execute("create table alembic_version (version_num varchar(32) not null)")
        database.execute("insert into alembic_version values ('ffffffffffff')")  # of a newer Prefect
        database.commit()
    with pytest.raises(MillraceError, match=r"(?s)has ended instead of starting.*written by a newer version"):
        up(tmp_path)
    monkeypatch.setenv(state.PREFECT_DATABASE, "postgresql+asyncpg://me:s3cret@127.0.0.1:9/prefect")
    with pytest.raises(MillraceError, match=r"(?s)has ended instead of starting.*database does not answer") as caught:
        up(tmp_path)
    assert "s3cret" not in str(caught.value)


def test_down_ends_flow_runs_of_killed_workers_of_its_root(tmp_path, capsys):
    def flow_run(root: Path) -> "subprocess.Popen[bytes]":
        home = {"PREFECT_HOME": str(root / "prefect")}
        return subprocess.Popen([*WAITING, "-m", "prefect.engine"], stdin=subprocess.PIPE, env=os.environ | home)

    with flow_run(tmp_path) as ours, flow_run(tmp_path / "other") as other:
        down(tmp_path)
        assert capsys.readouterr().out == f"a flow run (process {ours.pid}) has ended\n"
        assert not psutil.pid_exists(ours.pid)
        assert other.poll() is None
        down(tmp_path)
        assert "nothing is up under" in capsys.readouterr().out


def test_stopping_an_ended_process_is_allowed():
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process = psutil.Process(ended.pid)
    ended.wait()
    stop_server(process)
    stop_flows([process])
    kill([process])


OURS, GONE = "http://127.0.0.1:1/api", "http://127.0.0.1:2/api"
LOGIN = "millrace:s3cret"


@pytest.fixture
def profiles(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "home" / "profiles.toml"
    with temporary_settings({PREFECT_PROFILES_PATH: path}):
        yield path


def address_in(profiles: Path) -> str:
    """Return the address of the active profile."""
    found = tomllib.loads(profiles.read_text())
    return found["profiles"][found["active"]]["PREFECT_API_URL"]


def test_the_profile_is_used_in_a_new_shell_until_it_is_removed(profiles):
    def seen_by_prefect() -> list[str]:
        script = "from prefect.settings import get_current_settings as now; print(now().api.url, now().api.auth_string)"
        environment = {"PREFECT_PROFILES_PATH": str(profiles)}
        found = subprocess.check_output([sys.executable, "-c", script], env=environment, cwd=profiles.parent, text=True)
        return found.replace("**********", "secret").split()

    line = f"millrace in {profiles}, which Prefect's commands use in every new shell"
    assert keep_profile(OURS, LOGIN) == (True, line)
    assert profiles.stat().st_mode & 0o777 == 0o600
    assert seen_by_prefect() == [OURS, "secret"]
    assert remove_profile(GONE) == "", "the profile of another stack"
    assert "is removed" in remove_profile(OURS)
    assert remove_profile(OURS) == ""
    assert seen_by_prefect() == ["None", "None"]
    assert LOGIN not in profiles.read_text()


def test_the_profile_of_an_ended_stack_is_replaced_and_of_a_running_one_kept(profiles, prefect_server):
    keep_profile(GONE, "millrace:old")
    keep_profile(prefect_server.url, LOGIN)
    assert address_in(profiles) == prefect_server.url
    before = profiles.read_bytes()
    line = f"millrace in {profiles} stays the one of the running stack at {prefect_server.url}"
    assert keep_profile(OURS, "millrace:new") == (False, line)
    assert profiles.read_bytes() == before


def test_what_the_user_has_chosen_stays(profiles, monkeypatch):
    profiles.parent.mkdir()
    profiles.write_text('active = "team"\n\n[profiles.team]\nPREFECT_API_URL = "http://team/api"\n')
    profiles.chmod(0o644)
    is_used, line = keep_profile(OURS, LOGIN)
    assert (is_used, line.partition("; ")[2]) == (False, "team stays active until `prefect profile use millrace`")
    assert profiles.stat().st_mode & 0o777 == 0o600
    assert address_in(profiles) == "http://team/api"
    remove_profile(OURS)
    assert address_in(profiles) == "http://team/api"
    profiles.unlink()
    monkeypatch.setenv("PREFECT_API_URL", "http://team/api")
    assert not keep_profile(OURS, LOGIN)[0]


def test_an_unusable_file_is_reported(profiles):
    profiles.parent.mkdir()
    profiles.write_text("active = ")
    assert keep_profile(OURS, LOGIN)[1].startswith(f"is not written to {profiles}: ")
    assert remove_profile(OURS).startswith("the Prefect profile millrace is not removed: ")
    profiles.unlink()
    profiles.mkdir()
    assert keep_profile(OURS, LOGIN)[1].startswith(f"is not written to {profiles}: ")
