"""A sweep's runs on workers: what becomes of one whose request or record is lost in Prefect."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Failed, Running

from flows.parameters import RunSettings
from flows.server.api import LocalServer
from flows.sweep.drive import Task
from flows.sweep.flow import DEPLOYMENT, OnWorkers
from flows.sweep.record import Member, PointRecord
from rlcore.config import RunConfig
from tests.helpers.serving import serving

pytestmark = pytest.mark.prefect


@contextmanager
def losing_an_answer(url: str) -> Iterator[tuple[str, list[str]]]:
    """The same server, behind a connection that breaks once: after a flow run was made, before that is said."""
    lost: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            target = http.client.HTTPConnection(urlsplit(url).netloc)
            headers = {"content-type": "application/json", "authorization": self.headers["authorization"]}
            target.request(self.command, self.path, body, headers)
            answer = target.getresponse()
            content = answer.read()
            target.close()
            if self.path.endswith("/create_flow_run") and not lost:
                lost.append(self.path)
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

    with serving(Handler) as server:
        yield f"{server}/api", lost


def test_a_lost_answer_makes_no_second_run_and_a_deleted_run_is_a_failed_one_and_a_stopped_one_goes_on(
    prefect_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        losing_an_answer(prefect_server.url) as (url, lost),
        temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: prefect_server.login}),
        get_client(sync_client=True) as client,
    ):
        flow, _, name = DEPLOYMENT.partition("/")
        deployment = client.create_deployment(client.create_flow_from_name(flow), name)
        children = OnWorkers(None, tmp_path)
        member = Member(1, RunSettings(RunConfig(), (), "debug"))
        child = Task(PointRecord(7, {}, [member]), member, 1)
        try:
            made = children._submit(child)
            assert lost
            of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
            assert [run.id for run in client.read_flow_runs(flow_run_filter=of_it)] == [made.id]

            # A sweep that is killed leaves it to its worker: another process finds it, until it has ended.
            assert OnWorkers(None, tmp_path)._submit(child).id == made.id
            client.set_flow_run_state(made.id, Failed(), force=True)
            further = OnWorkers(None, tmp_path)._submit(child)
            assert further.id != made.id
            assert children._submit(child).id == further.id
            assert children._submit(replace(child, to_step=2)).id not in (made.id, further.id)

            def deleted_meanwhile() -> Iterator[Task]:
                yield child
                for run in client.read_flow_runs(flow_run_filter=of_it):
                    client.delete_flow_run(run.id)

            ((ended, error),) = children.work(deleted_meanwhile())
            assert ended is child
            assert "was deleted in Prefect" in error

            # One that an earlier call has told to stop saves first; then its run goes on.
            stopped = children._submit(child)
            for state in (Running(), Cancelling()):
                client.set_flow_run_state(stopped.id, state, force=True)
            assert client.read_flow_run(stopped.id).state_type == StateType.CANCELLING
            states = iter([(stopped.id, Cancelled()), (None, Completed())])

            def meanwhile() -> None:
                told, state = next(states)
                client.set_flow_run_state(told or children._submit(child).id, state, force=True)

            monkeypatch.setattr("flows.sweep.flow.pause", meanwhile)
            assert list(children.work(iter([child]))) == [(child, "")]
            assert not [*states]
        finally:
            client.delete_deployment(deployment)
