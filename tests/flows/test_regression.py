"""Nights of `millrace regression`, by hand and as a flow, and who is told of them by notification blocks."""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from flows.commands import regression
from flows.stack import control
from flows.stack.control import Wishes
from flows.work.trainer import kept_between_runs
from rlcore.config import TrackingConfig
from rlcore.errors import DataError
from rlcore.report.nights import read_nights
from rlcore.tracking.mlflow_store import MlflowStore
from tests.flows.conftest import wait_until
from tests.flows.serving import serving
from tests.flows.stack import Stack, stack_up
from tests.share_of_digits import LEARNING

UNTRACKED = "tracking.enabled=false"
HALVED = (LEARNING[0], "data.scorer=tests.share_of_digits:half")
"""A scorer that somebody has changed without meaning to."""
FAILING = ("alarms.grad_norm=stop", "alarms.grad_norm_above=1e-9")
"""The first step raises an alarm, which ends the run."""


def by_hand(root: Path, *overrides: str, code: int = 0, take: bool = False) -> dict[str, Any]:
    """The command in this process; what it prints as JSON."""
    out, found = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            regression.run("debug", list(overrides), slower_by=0.1, root=root, take=take, as_json=True)
        except SystemExit as exit:
            found = int(str(exit.code))
    assert found == code
    told: dict[str, Any] = json.loads(out.getvalue())
    return told


@pytest.fixture(scope="module", autouse=True)
def one_trainer() -> Iterator[None]:
    """For all nights by hand, as long as it does not fail."""
    with kept_between_runs():
        yield


@pytest.fixture(scope="module")
def first_night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one night."""
    root = tmp_path_factory.mktemp("nights")
    told = by_hand(root, *LEARNING, UNTRACKED)
    assert (told["verdict"], told["number"], told["reference"]) == ("first", 1, "")
    return root


def test_a_halved_reward_is_worse_until_it_is_accepted_and_a_failed_run_is_broken(
    first_night: Path, tmp_path: Path, empty_store: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(first_night, root)
    first = read_nights(root / "regressions" / "debug")[0]
    worse = by_hand(root, *HALVED, UNTRACKED, code=3)
    assert (worse["verdict"], worse["reference"]) == ("worse", first.run_id)
    assert first.held_out is not None
    assert worse["gain"]["value"] == pytest.approx(-first.held_out.value / 2, rel=0.2)
    assert by_hand(root, *HALVED, take=True)["accepted"]
    broken = by_hand(root, *HALVED, UNTRACKED, *FAILING, code=1)
    assert broken["verdict"] == "broken"
    assert "grad_norm" in broken["text"]
    assert broken["reference"] == worse["run_id"]
    with pytest.raises(DataError, match=r"night 3 has no score .*grad_norm"):
        by_hand(root, take=True)
    shutil.copy(empty_store, root / "mlflow.db")
    same = by_hand(root, *HALVED)
    assert (same["verdict"], same["reference"], same["gain"]["value"]) == ("same", worse["run_id"], 0.0)
    weights = [one.parent.name for one in root.glob("runs/*/checkpoints")]
    assert weights == [same["run_id"]], "of the nights before the last good one only the figures count"
    store = MlflowStore(TrackingConfig(), root)
    (series,) = store.find_runs({regression.SERIES_TAG: "debug"})
    kept = {
        point.step: point.value for point in store.client.get_metric_history(series.info.run_id, "regression/verdict")
    }
    assert kept == {1: 0.0, 2: -1.0, 3: -2.0, 4: 0.0}, "also the nights in which MLflow heard nothing"
    assert "regression/regression.html" in [
        one.path for one in store.client.list_artifacts(series.info.run_id, "regression")
    ]
    assert "worse" in series.data.tags["mlflow.note.content"]


# ------------------------------------------------------------------ told by a notification block

SECRET = "s3cret-token"
BLOCKS = f"""
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import get_client
from prefect.events import emit_event
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
    notify(client, None, "slack-webhook/team")
resource = {{"prefect.resource.id": "millrace.regression.x", "prefect.resource.name": "x"}}
emit_event("millrace.regression.slower", resource=resource, payload={{"text": "a step takes longer"}})
"""
NIGHTS = """
import json, sys
from prefect.client.orchestration import get_client
from flows.maintain import regression
from flows.stack.deploy import notify
from flows.work.trainer import kept_between_runs
root, *nights = sys.argv[1:]
with get_client(sync_client=True) as client:
    notify(client, None, "custom-webhook/failing")
with kept_between_runs():
    for overrides in nights:
        regression("debug", json.loads(overrides), root=root)
"""


def in_prefect(stack: Stack, code: str, *words: str) -> str:
    """Python that talks to the stack's Prefect; what it prints."""
    done = stack.python("-c", code, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stdout


@pytest.mark.prefect
@pytest.mark.slow
def test_a_worse_night_is_told_by_the_block_that_a_setting_names_and_a_failing_block_harms_nothing(
    first_night: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    answers = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == f"/{SECRET}"
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers[-1])
            self.end_headers()

    root = tmp_path / "root"
    shutil.copytree(first_night, root)
    monkeypatch.setattr(control, "_set_up_prefect", lambda *_: None)  # no deployment is run here: see test_stack.py
    with serving(Handler) as server, stack_up(root, Wishes(workers=0)) as stack:
        said = in_prefect(stack, BLOCKS, server.rpartition(":")[2])
        assert "got slack-webhook/taem, and there is custom-webhook/failing, slack-webhook/team" in said
        wait_until(lambda: len(told) == 1, "the block tells of an event")
        assert (told[0]["title"], told[0]["message"]) == ("x: millrace.regression.slower", "a step takes longer")
        answers.append(500)
        as_before, worse = (json.dumps([*words, UNTRACKED]) for words in (LEARNING, HALVED))
        in_prefect(stack, NIGHTS, str(root), as_before, worse)
        wait_until(lambda: len(told) > 1, "the block is asked to tell of the night")
        assert told[1]["title"] == "debug: millrace.regression.worse"
        assert told[1]["message"].startswith("debug, night 3: worse; held-out reward"), "night 2 was as before"
        run = stack.newest("regression")
        assert (run["state_type"], run["state_name"]) == ("COMPLETED", "Worse")
        wait_until(lambda: "HTTPStatusError 500" in stack.log("prefect"), "the server says that the block has failed")
        stack.assert_hidden(SECRET)
