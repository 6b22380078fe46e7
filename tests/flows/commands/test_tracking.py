"""`millrace compare`, `sync`, `ui`, their flows, and what MLflow's own pages show of a real run."""

import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from flows.cli import app, exit_code
from flows.stack import state
from flows.stack.services import free_port, start_mlflow, stop_server, wait_until_ready
from flows.stack.state import MLFLOW_DATABASE, Service, StackState, mlflow_login_environment, root_login, write_stack
from flows.work.open_run import open_run
from flows.work.runs import sync
from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import TrackingError
from rlcore.evaluation.result import ValidationResult
from rlcore.storage.locks import start_time_of
from rlcore.tracking.attempts import ATTEMPTS_FILE
from rlcore.tracking.connection import explain_error, mlflow_name
from rlcore.tracking.delivery import read_state
from rlcore.tracking.journal import RunJournal, read_journal
from rlcore.tracking.mlflow_store import MlflowStore, compare_url
from rlcore.tracking.models import models_of
from tests.flows.conftest import SMALL, WAIT_S, Finished, Millrace, Reference, basic, changed, start
from tests.helpers.attempts import Attempt
from tests.helpers.chromium import Tab, open_tab
from tests.helpers.reports import write_run
from tests.helpers.serving import serving

pytestmark = pytest.mark.prefect

SECOND = "second-s2-0a1b2c3d"


@pytest.fixture(scope="module")
def root(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reference run with its store, and a second run that is not yet in MLflow."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(reference.millrace.root / "mlflow.db", folder)
    shutil.copytree(reference.run_dir, folder / "runs" / reference.run_dir.name)
    settings = ("trainer.total_steps=12", "validation.every_steps=6", f"paths.root={folder}")
    write_finished(folder / "runs" / SECOND, *settings, num_steps=12)
    return folder


def write_finished(run_dir: Path, *settings: str, num_steps: int = 2) -> None:
    """Write a finished run whose journal was not sent to MLflow."""
    config = write_run(run_dir, experiment="debug", overrides=settings, num_steps=num_steps, seed=2, num_problems=20)
    tracker = RunJournal(run_dir, changed(config, "tracking", enabled=False), tags={})
    tracker.append_event("resume", num_steps, {})
    tracker.finish("FINISHED")


def millrace(root: Path, *words: str) -> Finished:
    """Run a command in this process, which has imported MLflow, without the login of a test's own client."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as environment, redirect_stdout(out), redirect_stderr(errors):
        for name in os.environ.keys() - without_login().keys():
            environment.delenv(name)
        code = exit_code(lambda: app([*words, "--root", str(root)]))
    return Finished(code, out.getvalue(), errors.getvalue())


def without_login() -> dict[str, str]:
    """Return the environment without the login of a test's own MLflow client."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING_")}


def client_of(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root}/mlflow.db")


def run_of(root: Path, run_id: str) -> Run:
    store = MlflowStore(TrackingConfig(), root)
    return store.find_runs({"millrace.run_id": run_id})[0]


@pytest.fixture(scope="module")
def synced(root: Path) -> Path:
    done = millrace(root, "sync", SECOND)
    assert done.code == 0, done.err
    assert re.search(r"[\d,]+ bytes of the journal delivered; the run is FINISHED", done.out), done.out
    return root


def test_sync_delivers_each_value_once_however_often(synced):
    assert "nothing was missing; the run is FINISHED" in millrace(synced, "sync", "second").out
    run, client = run_of(synced, SECOND), client_of(synced)
    records = read_journal(synced / "runs" / SECOND / "metrics.jsonl")
    for name in ("critic/score/mean", "val-core/countdown/reward/mean_at_2"):
        wanted = [(record.step, record.metrics[name]) for record in records if name in record.metrics]
        found = client.get_metric_history(run.info.run_id, mlflow_name(name))
        assert sorted((metric.step, metric.value) for metric in found) == wanted
    assert run.info.status == "FINISHED"


def test_a_moved_run_is_delivered_to_its_new_root(tmp_path):
    node, here = tmp_path / "node", tmp_path / "here"
    write_finished(node / "runs" / SECOND, f"paths.root={node}", "tracking.enabled=false")
    node.rename(here)
    reported = sync(here / "runs" / SECOND, None)
    assert run_of(here, SECOND).info.run_id in reported
    assert run_of(here, SECOND).info.artifact_uri.startswith((here / "mlartifacts").as_uri())
    assert not node.exists()
    node.symlink_to(here)
    sync(here / "runs" / SECOND, None)
    assert read_state(here / "runs" / SECOND).uri == f"sqlite:///{node}/mlflow.db", "it is the same file"
    node.unlink()
    (here / "mlflow.db").write_text("no database")
    with pytest.raises(TrackingError, match="DatabaseError"):
        sync(here / "runs" / SECOND, None)


def test_a_comparison_has_the_numbers_that_mlflow_has(synced, reference):
    first, second = reference.run_dir.name, SECOND
    tags = {"millrace.run_id": "warm-start-0a1b", "seed": "2", "stage": "warm-start"}
    MlflowStore(TrackingConfig(), synced).create_run("a warm start is none to compare", tags, start_time_s=0.0)
    done = millrace(synced, "compare", first, "--search", "tags.seed = '2'")
    assert done.code == 0, done.err
    assert done.out.startswith(f"2 runs: {first}, {second}\n")
    written, *_ = re.findall(r"JSON +(\S+)", done.out)
    table = json.loads(Path(written).read_text())["tables"]["metrics"]
    runs = {run_id: run_of(synced, run_id) for run_id in (first, second)}
    for place, run in enumerate(runs.values(), start=1):
        shown = {mlflow_name(row[0]): row[place] for row in table["rows"] if row[place] is not None}
        assert shown == run.data.metrics
    page = re.findall(r"MLflow +(\S+)", done.out)[0]
    assert all(run.info.run_id in page for run in runs.values())
    (port,) = re.findall(rf"millrace ui --root {synced} --port ([0-9]+)\n", done.out)  # no server has that page yet
    assert done.out.count(f"http://127.0.0.1:{port}/#/") == 2
    assert re.search(rf"Table +http://127.0.0.1:{port}/\S+/runs\?\S+&viewStateShareKey=millrace\n", done.out)
    for run in runs.values():
        (folder,) = client_of(synced).list_artifacts(run.info.run_id, "comparisons")
        names = {Path(file.path).name for file in client_of(synced).list_artifacts(run.info.run_id, folder.path)}
        assert names == {"comparison.html", "comparison.json"}


def test_wrong_searches_and_roots_are_reported(synced, tmp_path):
    for root, words, code, said in (
        (synced, ["compare", "absent", SECOND], 2, "absent: is neither the folder nor the id of a run"),
        (synced, ["compare", "--search", "nonsense ~ 3"], 1, 'MLflow rejects it.*Example: "params'),
        (tmp_path / "typo", ["ui"], 2, "holds no MLflow store"),
        (tmp_path / "typo", ["compare", "--search", "x"], 1, "there is no MLflow store"),
    ):
        done = millrace(root, *words)
        assert (done.code, bool(re.search(said, done.err, re.DOTALL))) == (code, True), done
    assert not (tmp_path / "typo").exists()


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, MlflowClient]]:
    """Return a root whose stack keeps metrics in a separate database, and a client of its server."""
    root, database = tmp_path / "root", f"sqlite:///{tmp_path / 'own.db'}"
    root.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MLFLOW_DATABASE, database)
        server = start_mlflow(root, free_port(), StackState())
    for name, value in mlflow_login_environment(root_login(root)).items():
        monkeypatch.setenv(name, value)
    try:
        write_stack(root, StackState(mlflow_database=database, services=(server,)))
        wait_until_ready(server)
        yield root, MlflowClient(server.url, server.url)
    finally:
        if (process := server.process()) is not None:
            stop_server(process)


def test_sync_uses_the_stacks_own_database(own_store, monkeypatch):
    root, client = own_store
    write_finished(root / "runs" / SECOND, "trainer.total_steps=2", f"paths.root={root}")
    assert "bytes of the journal delivered; the run is FINISHED" in millrace(root, "sync").out
    store = MlflowStore(TrackingConfig(uri=client.tracking_uri), root)
    (run,) = store.find_runs({"millrace.run_id": SECOND})
    assert (run.info.status, run.data.params["trainer.total_steps"]) == ("FINISHED", "2")
    assert client.get_metric_history(run.info.run_id, "critic/score/mean")[-1].step == 2
    assert "nothing was missing" in millrace(root, "sync").out
    assert "nothing was missing" in millrace(root, "sync", "--uri", client.tracking_uri).out
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    with pytest.raises(MlflowException) as refused:
        client.search_experiments()
    assert "stack-secret" in explain_error(refused.value, client.tracking_uri)
    assert not (root / "mlflow.db").exists(), "something looked into the file that this root does not have"
    for attempt in (
        Attempt("GET", "/", status=401),
        Attempt("PUT", "/api/2.0/mlflow-artifacts/artifacts/x", status=401),
        Attempt("GET", "/", login=root_login(root), host="10.evil.example", status=403),
        Attempt("POST", "/api/2.0/mlflow/runs/search", login=root_login(root), origin="http://localhost:9", status=403),
        Attempt("GET", "/", login=root_login(root), status=200),
    ):
        attempt.try_at(client.tracking_uri)


def test_the_stacks_login_goes_to_no_other_server(tmp_path, monkeypatch):
    heard: list[tuple[str, str | None]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (asked := (self.headers["Host"], self.headers["Authorization"])) not in heard:
                heard.append(asked)
            self.send_error(404)

    monkeypatch.setattr(state, "_user_login", {})  # of other tests of this process
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name, value in mlflow_login_environment("mine:own").items():
        monkeypatch.setenv(name, value)
    with serving(Refusing) as stack, serving(Refusing) as other:
        for name, uri in (("first", stack), ("second", other)):
            settings = (f"paths.root={tmp_path}", f"tracking.uri={uri}", "tracking.enabled=false")
            folder = tmp_path / "runs" / name
            config = write_run(folder, experiment="debug", overrides=settings, num_steps=2, num_problems=20)
            RunJournal(folder, config, tags={}).append_step(3, {"a": 1.0})
        server = Service("mlflow", os.getpid(), start_time_of(psutil.Process()), 1, stack, "", "")
        ended = replace(server, born=server.born - 100)
        record = StackState(mlflow_database="postgresql+psycopg://u@h/db")
        for service in (ended, server):  # another user may have the port of a server that has ended
            write_stack(tmp_path, replace(record, services=(service,)))
            for name in ("first", "second"):
                with pytest.raises(TrackingError):
                    sync(tmp_path / "runs" / name, None)
        with open_run(RunConfig.model_validate(config.model_dump() | {"tracking": {"uri": stack}})):
            assert os.environ["MLFLOW_TRACKING_PASSWORD"] in root_login(tmp_path), "it was composed before another"
        (tmp_path / "runs" / "second" / ATTEMPTS_FILE).write_text('{"torn')
        assert sync(tmp_path / "runs" / "second", None) == "has not begun"
    first, second = (uri.removeprefix("http://") for uri in (stack, other))
    own, ours = basic("mine:own"), basic(root_login(tmp_path))
    assert heard == [(first, own), (second, own), (first, ours)]


def test_best_weights_reach_their_score_in_another_process(reference, tmp_path, artifacts_root):
    store = MlflowStore(TrackingConfig(), reference.millrace.root)
    run_id = run_of(reference.millrace.root, reference.run_dir.name).info.run_id
    (model,) = [each for each in models_of(store.client, store.experiment_id, run_id) if "best" in each.tags]
    step = int(model.tags["step"])
    # As `mlflow.transformers` loads them: tests/tracking/test_models.py.
    kept = download_artifacts(model.artifact_location, dst_path=str(tmp_path))
    fresh = Millrace(artifacts_root, {})
    evaluated = fresh("validate", *SMALL, f"model.path={kept}/model", "warm_start.enabled=false", "--checkpoint=start")
    assert evaluated.code == 0, evaluated.err
    again = ValidationResult.read(fresh.run_dir() / "validation" / "before.json").metrics()
    logged = {record.step: record.metrics for record in read_journal(reference.run_dir / "metrics.jsonl")}
    scores = {name: value for name, value in logged[step].items() if name.startswith(("val/", "val-core/"))}
    assert dict(again) == scores
    linked = {metric.key: metric.value for metric in model.metrics or []}
    assert {mlflow_name(name): value for name, value in scores.items()} == linked
    reward = "val-core/countdown/reward/mean_at_2"
    assert scores[reward] == max(metrics[reward] for at, metrics in logged.items() if at and reward in metrics)


def test_validate_takes_a_run_by_its_id_or_folder(reference, tmp_path):
    run_id, validate = reference.run_dir.name, partial(reference.millrace, "validate")
    by_settings = validate(*SMALL, code=0)
    assert by_settings.out.endswith(f"responses: {reference.run_dir}/validation/after.json\n")
    for word in ("debug-s1", run_id):
        assert validate(word, f"--root={reference.millrace.root}", code=0).out == by_settings.out
    assert validate(str(reference.run_dir), code=0).out == by_settings.out
    moved = shutil.copytree(reference.millrace.root, tmp_path / "moved") / "runs" / run_id
    done = validate(str(moved), "--checkpoint", "40", code=0)
    assert done.out.endswith(f"responses: {moved}/validation/step-000040.json\n")
    assert "checkpoint=step-000077" in validate(str(moved), "--checkpoint", "77", code=1).err
    renamed = moved.rename(tmp_path / "renamed")
    done = validate(str(renamed), code=2)
    assert done.err == f"RUN: must be at WORKSPACE/runs/{run_id}; got {renamed}. Move it there\n"


def wait_for(tab: Tab, *texts: str) -> str:
    """Return the page's text as soon as it contains all these texts."""
    deadline = time.monotonic() + WAIT_S
    while True:
        shown: Any = tab.value("document.body ? document.body.innerText : ''")
        missing = [text for text in texts if text not in shown]
        if not missing:
            return str(shown)
        assert time.monotonic() < deadline, f"never on the page: {missing}; there is:\n{shown[:4_000]}"
        time.sleep(0.3)


HEADERS = """[...document.querySelectorAll('.ag-header-viewport .ag-header-cell')]
    .sort((one, other) => one.getBoundingClientRect().x - other.getBoundingClientRect().x)
    .map((cell) => cell.innerText.trim())"""
"""The columns that scroll, from left to right."""


@pytest.mark.program("chromium")
def test_mlflows_pages_show_the_run_and_the_comparison(synced, reference, tmp_path):
    first, second = run_of(synced, reference.run_dir.name), run_of(synced, SECOND)
    server = start([sys.executable, "-m", "flows.cli", "ui", "--root", str(synced)], without_login())
    try:
        lines = iter(server.stdout.readline, "")  # it may say first that its usual port is taken
        reported = next((found for line in lines if (found := re.search(r"(http://127\.0\.0\.1:\d+)\S*", line))), None)
        assert reported is not None, server.communicate(timeout=WAIT_S)
        with open_tab(tmp_path / "profile") as tab:
            tab.log_in(*root_login(synced).split(":"))
            tab.call("Page.navigate", url=reported[0])
            # the GenAI view has "Training runs" and traces
            wait_for(tab, "Runs", "Models", reference.run_dir.name, "Reward first", "val/reward")
            tab.wait(f"{HEADERS}.slice(0, 3).join() === 'reward,val/reward,seed'")
            tab.call("Page.navigate", url=f"{reported[0]}&compareRunsMode=CHART")
            shown = wait_for(tab, "Reward\n(2)", "val-core/countdown")
            assert shown.index("Reward\n(2)") < shown.index("val-core/countdown")
            tab.call("Page.navigate", url=f"{reported[0]}&compareRunsMode=ARTIFACT")
            wait_for(tab, "responses.json", "prompt", "response")
            run_page = f"{reported[1]}/#/experiments/{first.info.experiment_id}/runs/{first.info.run_id}"
            tab.call("Page.navigate", url=run_page)
            counted = (f"Parameters ({len(first.data.params)})", f"Metrics ({len(first.data.metrics)})", "countdown (")
            wait_for(tab, "Description", *counted, "Datasets", "Models", "Held-out reward")
            wait_for(tab, *(models := [f"{kind}-60-{reference.run_dir.name}" for kind in ("weights", "step")]))
            tab.call("Page.navigate", url=f"{reported[1]}/#/experiments/{first.info.experiment_id}/models")
            wait_for(tab, *models)
            tab.call("Page.navigate", url=f"{run_page}/model-metrics")
            wait_for(tab, "actor", "grad_norm", "Step")
            tab.call("Page.navigate", url=f"{run_page}/artifacts")
            wait_for(tab, "report", "validation", "lineage", "config")
            store = MlflowStore(TrackingConfig(), synced)
            tab.call("Page.navigate", url=compare_url(store, [first.info.run_id, second.info.run_id], reported[1]))
            norms = [f"{round(run.data.metrics['actor/grad_norm'], 3):g}" for run in (first, second)]
            wait_for(tab, "Comparing 2 Runs", "actor/grad_norm", "trainer.total_steps", *norms)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=WAIT_S)
    assert server.returncode == 0
