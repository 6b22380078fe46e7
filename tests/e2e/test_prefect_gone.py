"""A command whose Prefect server is gone saves its run, and ends as its work ends."""

import os
import signal
import sys
from pathlib import Path

import pytest

from flows.server.api import LocalServer
from tests.flows.conftest import ended, start, under, wait_until

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@pytest.mark.lengthy
def test_a_run_without_its_server_saves_and_ends_at_sigterm(artifacts_root: Path, tmp_path: Path) -> None:
    server = LocalServer(tmp_path)
    server.wait()
    millrace = under(server, artifacts_root)
    endless = ("trainer.total_steps=100000", "trainer.steps_per_chunk=50000", "validation.every_steps=0")
    process = millrace.start("run", "experiment=debug", *endless)
    wait_until(lambda: any(artifacts_root.glob("runs/*/metrics.jsonl")) and len(millrace.steps()) > 3, "a few steps")
    server._process.kill()
    process.send_signal(signal.SIGTERM)
    stopped = ended(process)
    assert stopped.code == 75, stopped.err
    assert "the end was not reported to Prefect: no server answers" in stopped.err
    assert "Traceback" not in stopped.err
    (saved,) = (millrace.run_dir() / "checkpoints").glob("step-*")
    assert saved.name == f"step-{max(millrace.steps()):06d}"


RUNS = """
import os, sys
from pathlib import Path
from flows.cli import run_and_exit
from flows.server.api import command_flow, start_prefect

def command():
    server = start_prefect(Path(sys.argv[1]))
    from prefect import flow
    from flows.server.watch import watch_flow_run
    from flows.pipeline import call_flow, keep_outcome, run_task
    from rlcore.errors import MillraceError

    def work():
        server._process.kill()
        if sys.argv[2] == "fails":
            raise MillraceError("our own error")
        return "its result"

    def stages():
        with watch_flow_run():
            return run_task("stage", "stage", work, str)

    @flow
    def chain():
        return keep_outcome(stages)

    with command_flow(server, verbose=False):
        print(call_flow(None, chain), flush=True)

run_and_exit(command)
"""


@pytest.mark.parametrize(
    ("how", "code", "out", "err"),
    [pytest.param("succeeds", 0, "its result\n", "", marks=pytest.mark.lengthy), ("fails", 1, "", "our own error\n")],
)
def test_a_flow_without_its_server_ends_as_its_work(how: str, code: int, out: str, err: str, tmp_path: Path) -> None:
    environment = os.environ | {"PREFECT_CLIENT_MAX_RETRIES": "1"}
    done = ended(start([sys.executable, "-c", RUNS, str(tmp_path), how], environment))
    assert done.code == code, done.err
    assert done.out.endswith(out)
    assert "Traceback" not in done.err
    reported = [line for line in done.err.splitlines(keepends=True) if not line.startswith("the end was not reported")]
    assert "".join(reported) == err
