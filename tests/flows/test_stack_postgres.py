"""The stack on PostgreSQL, with a Ray head: the real database of the distribution, in a folder of its own."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from flows.server.database import PREFECT_DATABASE
from flows.stack.control import Wishes, status, up
from flows.stack.state import MLFLOW_DATABASE, read_stack
from rlcore.errors import MillraceError
from tests.flows.conftest import numbers, wait_until
from tests.flows.stack import Stack, stack_up
from tests.programs import POSTGRES

PASSWORD = "not-to-be-shown"

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.needs_ray,
    pytest.mark.slow,
    pytest.mark.lengthy,
    pytest.mark.program("postgres"),
]


@dataclass(frozen=True)
class Postgres:
    """A server on loopback."""

    port: int

    def address(self, driver: str, database: str) -> str:
        return f"postgresql+{driver}://millrace:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def query(self, database: str, query: str) -> list[tuple[object, ...]]:
        where = f"host=127.0.0.1 port={self.port} user=millrace password={PASSWORD} dbname={database}"
        with psycopg.connect(where, autocommit=True) as connection:
            found = connection.execute(query)
            return found.fetchall() if found.description else []


def other_user() -> dict[str, int]:
    """PostgreSQL refuses to run as root."""
    if os.getuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A database of its own, in a folder that its user can reach."""
    assert POSTGRES is not None
    user = other_user()
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/postgres-XXXXXX"], text=True).strip())
    if user:
        os.chown(folder, user["user"], user["group"])
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    data = str(folder / "data")
    made = [str(POSTGRES / "initdb"), "-D", data, "-U", "millrace", "-A", "scram-sha-256", "--no-sync"]
    subprocess.run([*made, f"--pwfile={folder / 'password'}"], check=True, stdout=subprocess.DEVNULL, cwd="/", **user)
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [str(POSTGRES / "postgres"), "-D", data, "-p", str(port), "-k", str(folder), "-h", "127.0.0.1", "-F"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", **user)
    try:
        found = Postgres(port)
        wait_until(lambda: answers(found), "PostgreSQL answers")
        for name in ("prefect", "mlflow"):
            found.query("postgres", f"create database {name}")
        yield found
    finally:
        server.terminate()
        server.wait(60)
        shutil.rmtree(folder)


def answers(postgres: Postgres) -> bool:
    try:
        return postgres.query("postgres", "select 1") == [(1,)]
    except psycopg.OperationalError:
        return False


@pytest.fixture(scope="module")
def stack(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("postgres")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PREFECT_DATABASE, postgres.address("asyncpg", "prefect"))
        environment.setenv(MLFLOW_DATABASE, postgres.address("psycopg", "mlflow"))
        with stack_up(root, Wishes(ray=True)) as stack:
            yield stack


def test_a_run_on_postgres_under_the_ray_head_completes_and_no_file_says_a_password(
    stack: Stack, postgres: Postgres
) -> None:
    assert {state for _, state in status(stack.root)} == {"up"}
    head = read_stack(stack.root).service("ray")
    assert head is not None
    overrides = f'overrides=["trainer.total_steps=1", "runtime.backend=ray", "runtime.ray_address={head.url}"]'
    done = stack.prefect("deployment", "run", "pipeline/debug", "--watch", "-p", overrides)
    assert done.returncode == 0, done.stdout + stack.newest()["state"]["message"]
    run_dir = stack.run_dir("debug")
    assert sorted(numbers(run_dir)) == [0, 1]

    assert not list(stack.root.glob("**/*.db")), "nothing went to a file"
    assert postgres.query("prefect", "select count(*) from flow_run where name = 'pipeline/debug'") == [(1,)]
    assert ("FINISHED",) in postgres.query("mlflow", "select distinct status from runs")
    assert {(0,), (1,)} <= set(postgres.query("mlflow", "select distinct step from metrics"))
    stack.assert_hidden(PASSWORD, stack.login, stack.login.partition(":")[2])


def test_another_database_is_refused_while_the_stack_remembers_its_own(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PREFECT_DATABASE, raising=False)
    with pytest.raises(MillraceError, match=rf"{PREFECT_DATABASE}: must name.*millrace:\*\*\*@127") as caught:
        up(stack.root)
    assert PASSWORD not in str(caught.value)
