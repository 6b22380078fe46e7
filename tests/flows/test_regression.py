"""Nights of `millrace regression`, by hand and as a flow, and who is told of them by notification blocks."""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from flows.commands import regression
from flows.work.trainer import kept_between_runs
from rlcore.config import TrackingConfig
from rlcore.errors import ConfigError, DataError
from rlcore.report.nights import read_nights, write_nights
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.user_code import Code, kept_code
from tests.flows.conftest import wait_until
from tests.flows.serving import serving
from tests.flows.stack import Stack, prefect_up
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
    """Nights by hand share a process."""
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


DIES_ONCE = """
import os, sys
from pathlib import Path
died = Path(__file__).with_name("died")
if "rlcore.run.process" in sys.orig_argv and not died.exists():
    died.touch()
    os._exit(1)
"""
"""Python runs a file `sitecustomize.py` of its path at its start."""


@pytest.mark.lengthy  # test_pipeline kills a trainer of `millrace run`
def test_a_lost_trainer_is_started_again_in_a_night_that_is_told_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = by_hand(tmp_path / "root", *LEARNING, UNTRACKED, "trainer.total_steps=2", "warm_start.max_steps=2")
    assert (tmp_path / "died").exists()
    assert told["verdict"] == "first", told["text"]


def test_code_that_fails_in_its_trial_is_a_broken_night_and_a_wrong_setting_is_none(tmp_path: Path) -> None:
    for number, key in enumerate(("data.scorer", "algo.policy_loss"), start=1):
        broken = by_hand(tmp_path, f"{key}=tests.share_of_digits:raises", UNTRACKED, code=1)
        assert (broken["verdict"], broken["number"]) == ("broken", number)
        assert broken["text"].startswith(f"the run cannot begin: {key}: must ")
    for wrong in ("data.scorer=tests.share_of_digits:nobody", "algo.policy_loss_options={nobody: 1}"):
        with pytest.raises(ConfigError, match="nobody"):
            by_hand(tmp_path, wrong, UNTRACKED)
    assert len(read_nights(tmp_path / "regressions" / "debug")) == 2


def test_a_night_begun_with_other_code_and_a_good_night_that_is_gone_do_not_end_the_series(
    first_night: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(first_night, root)
    folder = root / "regressions" / "debug"
    (first,) = read_nights(folder)
    second = root / "runs" / first.run_id.replace("0001", "0002")
    shutil.copytree(root / "runs" / first.run_id, second)
    code = kept_code(second / "code")
    assert code is not None
    edited = {
        name: tuple(replace(one, content=b"# before an edit\n") for one in sources)
        for name, sources in code.by_function.items()
    }
    Code(edited).keep(second / "code")
    broken = by_hand(root, *LEARNING, UNTRACKED, code=1)
    assert (broken["verdict"], broken["run_id"], broken["reference"]) == ("broken", second.name, first.run_id)
    assert "the run cannot begin" in broken["text"]
    assert "has begun with other code" in broken["text"]
    slow = replace(first, run_id="slow", step_s=1e6)
    write_nights(folder, (first, slow, first))
    shutil.rmtree(root / "runs" / first.run_id)
    alone = by_hand(root, *LEARNING, UNTRACKED, code=1)
    assert (alone["verdict"], alone["number"], alone["reference"]) == ("broken", 4, first.run_id)
    assert f"it cannot be held against {first.run_id}: " in alone["text"]
    assert "it cannot be held against slow: " in alone["text"]
    assert by_hand(root, *LEARNING, take=True)["accepted"]
    good = read_nights(folder)[-1]
    there = regression._judged(5, root / "runs" / good.run_id, good, slow, slower_by=0.1)
    assert (there.score, there.speed, there.reference) == ("same", "not known", good.run_id)
    assert there.text.endswith("name the folder of a run, as artifacts/runs/<id>")


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
for word in ("same", "slower"):
    emit_event(f"millrace.regression.{{word}}", resource=resource, payload={{"text": "a step takes longer"}})
"""
NIGHT = """
import json, sys
from prefect.client.orchestration import get_client
from flows.maintain import regression
from flows.stack.deploy import notify
with get_client(sync_client=True) as client:
    notify(client, None, "custom-webhook/failing")
regression("debug", json.loads(sys.argv[2]), root=sys.argv[1])
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
    first_night: Path, tmp_path: Path
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
    with serving(Handler) as server, prefect_up(root) as stack:
        said = in_prefect(stack, BLOCKS, server.rpartition(":")[2])
        assert "got slack-webhook/taem, and there is custom-webhook/failing, slack-webhook/team" in said
        wait_until(lambda: len(told) == 1, "the block tells of an event")
        assert (told[0]["title"], told[0]["message"]) == ("x: millrace.regression.slower", "a step takes longer")
        answers.append(500)
        in_prefect(stack, NIGHT, str(root), json.dumps([*HALVED, UNTRACKED]))
        wait_until(lambda: len(told) > 1, "the block is asked to tell of the night")
        assert told[1]["title"] == "debug: millrace.regression.worse", "nobody is told of one that is as before"
        assert told[1]["message"].startswith("debug, night 2: worse; held-out reward")
        run = stack.newest("regression")
        assert (run["state_type"], run["state_name"]) == ("COMPLETED", "Worse")
        wait_until(lambda: "HTTPStatusError 500" in stack.log("prefect"), "the server says that the block has failed")
        stack.assert_hidden(SECRET)
