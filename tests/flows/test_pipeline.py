"""The debug experiment as a pipeline, with a real Prefect server and trainer."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.evaluation.result import ValidationResult
from rlcore.run.watchdog import read_failures
from rlcore.tracking.journal import load_journal
from tests.flows import conftest
from tests.flows.conftest import SMALL, Api, Millrace, Reference, ended, journal, mlflow_rows, numbers, wait_until
from tests.helpers.harmful import HARM
from tests.storage.small_disk import fill, mounted

pytestmark = pytest.mark.prefect

PIPELINE = {"name": {"any_": ["pipeline"]}}
OF_RUNS = "select status from runs where name not like 'warm-start-%'"
"""Runs except the separate ones of warm starts, which other runs may share."""
UNTRACKED = (*SMALL, "tracking.enabled=false")
"""Settings of tests without MLflow, whose import and requests take 10 s of a core."""
ENDLESS = (*(word for word in SMALL if "total_steps" not in word), "trainer.total_steps=100000")
"""A run of the same steps that ends only by a stop, however late on a busy machine."""
STAGE_WORDS = ("dataset:", "filter:", "warm start:", "train:", "validation:", "weights:", "report:")


def trainer_of(process: "subprocess.Popen[str]") -> psutil.Process:
    return next(child for child in psutil.Process(process.pid).children() if "rlcore.run.process" in child.cmdline())


def own_run(run_dir: Path) -> str:
    """Query the MLflow run, apart from that of its warm start."""
    return f"select run_uuid from tags where key = 'millrace.run_id' and value = '{run_dir.name}'"


@pytest.fixture
def first(api: Api, reference: Reference) -> dict[str, Any]:
    named = {"name": {"any_": [reference.run_dir.name]}}
    return api.filter("flow_runs", flow_runs=named, sort="START_TIME_ASC", limit=1)[0]


def test_stages_and_chunks_are_tasks(first, api, reference):
    assert first["state_type"] == "COMPLETED"
    assert re.fullmatch(r"mean_at_2 0\.\d{3} -> 0\.\d{3}, 60 steps, \d+ s", first["state"]["message"])
    assert {"debug", "countdown"} <= {*first["tags"]}
    tasks = api.filter("task_runs", flow_runs={"id": {"any_": [first["id"]]}}, sort="EXPECTED_START_TIME_ASC")
    assert [task["name"] for task in tasks] == [
        "dataset countdown", "filter to 32 tokens", "warm-start debug", "train debug step 0-20",
        "train debug step 20-40", "train debug step 40-60", "export debug", "validate debug before",
        "validate debug after", "export debug best", "report debug",
    ]  # fmt: skip
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}
    reward = numbers(reference.run_dir)[40]["critic/score/mean"]
    message = f"train: step 20-40, reward at step 40: {reward:.3f}"
    assert tasks[4]["state"]["message"] == message
    assert message in reference.done.out.split("\n")


def test_prefect_shows_progress_validation_checkpoints_report_and_link(first, api, reference):
    shown = api.filter("artifacts", artifacts={"flow_run_id": {"any_": [first["id"]]}})
    keys = {str(one["key"]) for one in shown}
    of_the_run = f"{reference.run_dir.name}-"
    assert {key for key in keys if not key.startswith(of_the_run)} == set()
    newest_last = sorted(shown, key=lambda one: str(one["created"]))
    artifacts = {str(one["key"]).removeprefix(of_the_run): one["data"] for one in newest_last}
    assert all(str(one["description"]).startswith(reference.run_dir.name) or "progress" in one["key"] for one in shown)
    assert "mlflow" not in artifacts, "a link to a server that does not run"
    assert "`millrace ui --root " in artifacts["summary"]
    assert artifacts["progress-train"] == artifacts["progress-warm-start"] == 100.0
    measured, reward = numbers(reference.run_dir), "val-core/countdown/reward/mean_at_2"
    figures = {row["metric"]: row for row in json.loads(artifacts["validation"])}
    assert set(figures["val-core/countdown/reward/greedy"]) == {"metric", "before", "after"}
    latest = {row["metric"]: row for row in json.loads(artifacts["latest-validation"])}
    is_reward = ["/reward/" in metric for metric in latest]
    assert is_reward == sorted(is_reward, reverse=True), "the reward is first"
    for step in (0, 20, 40, 60):
        low, high = (measured[step][f"{reward}/{end}"] for end in ("ci_low", "ci_high"))
        assert latest[reward][f"step {step}"] == f"{measured[step][reward]:.3f} [{low:.3f}, {high:.3f}]"
    assert figures[reward]["after"] == latest[reward]["step 60"]
    checkpoints = json.loads(artifacts["checkpoints"])
    on_disk = sorted((reference.run_dir / "checkpoints").glob("step-*"))
    assert [row["path"] for row in checkpoints] == [str(path) for path in on_disk]
    assert [row["score"] for row in checkpoints] == [round(measured[row["step"]][reward], 3) for row in checkpoints]
    assert checkpoints[-1]["step"] == 60
    assert all(row["MB"] > 0 for row in checkpoints)
    assert artifacts["report-page"].endswith(f"({(reference.run_dir / 'report/report.html').as_uri()})")
    summary = artifacts["summary"]
    assert summary.startswith(f"## {reference.run_dir.name}")
    assert "train: step 60/60" in summary
    of_the_summary = [one for one in shown if str(one["key"]).endswith("-summary")]
    assert len(of_the_summary) == 1, "the summary is updated, not created again"
    assert str(reference.run_dir / "report") in artifacts["report"]
    assert f"{measured[60][reward]:.3f}" in artifacts["report"]
    assert "&#" not in artifacts["report"]


def test_dataset_model_and_report_are_assets(api, reference):
    own = f"millrace://{reference.run_dir.name}"
    (dataset,) = (reference.millrace.root / "datasets").iterdir()

    def read_assets() -> dict[str, set[str]]:
        chosen = {"event": {"name": ["prefect.asset.materialization.succeeded"]}}
        found = api.ask("events/filter", {"filter": {**chosen, "resource": {"id_prefix": ["millrace://"]}}})["events"]
        related = {one["resource"]["prefect.resource.id"]: one["related"] for one in found}
        ids = {key: {two["prefect.resource.id"] for two in value} for key, value in related.items()}
        return {key: {one for one in value if one.startswith("millrace:")} for key, value in ids.items()}

    wait_until(lambda: f"{own}/report" in read_assets(), "the report's event")
    data = f"millrace://datasets/{dataset.name}"
    expected = {data: set(), f"{own}/model": {data}, f"{own}/report": {data, f"{own}/model"}}
    assert {key: value for key, value in read_assets().items() if key in expected} == expected


def test_mlflow_has_settings_datasets_report_and_weights(first, reference):
    root, own = reference.millrace.root, own_run(reference.run_dir)
    tags = dict(mlflow_rows(root, f"select key, value from tags where run_uuid in ({own})"))
    assert tags["prefect.flow_run_id"] == first["id"]
    assert tags["millrace.run_id"] == reference.run_dir.name
    assert mlflow_rows(root, f"select status from runs where run_uuid in ({own})") == [("FINISHED",)]
    assert ("60",) in mlflow_rows(root, "select value from params where key = 'trainer.total_steps'")
    datasets = {name for (name,) in mlflow_rows(root, "select name from datasets")}
    assert datasets == {"countdown", "countdown filtered", "countdown held-out"}
    names = {path.name for path in (root / "mlartifacts").rglob("*")}
    assert {"report.html", "settings.yaml", "after.json", "model.safetensors"} <= names
    assert "run.json" in names
    assert tags["mlflow.note.content"].startswith("# debug")
    assert tags["env.python"]
    lineage = json.loads((reference.run_dir / "run.json").read_text())
    assert [stage["name"] for stage in lineage["stages"]] == ["code", "dataset", "filtered", "tokenizer", "start model"]
    assert lineage["command"][:2] == ["millrace", "run"]
    assert lineage["environment"]["torch"]
    models = mlflow_rows(root, "select name from logged_models")
    checkpoints = {int(path.name.removeprefix("step-")) for path in (reference.run_dir / "checkpoints").glob("step-*")}
    expected = {*(f"step-{step}" for step in checkpoints), "weights-60"}
    assert {f"{name}-{reference.run_dir.name}" for name in expected} <= {name for (name,) in models}
    evaluated = "select count(*) from logged_model_metrics where metric_name like 'val-core/%mean_at_2'"
    assert int(mlflow_rows(root, evaluated)[0][0]) >= len(checkpoints) + 1, "scores are linked to models"


def test_trainer_logs_each_model_once_and_no_lines_of_libraries(reference):
    lines = (reference.run_dir / "logs" / "trainer-1.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\S+ \S+ (INFO|WARNING) rlcore\.", line) for line in lines), lines
    loaded = [line.partition(": CausalPolicy ")[2] for line in lines if ": CausalPolicy " in line]
    assert len(loaded) == len({*loaded}) == 2, "the model before the warm start, and after it"


def test_mlflow_begins_with_the_reward_and_has_the_responses(reference):
    client = MlflowClient(f"sqlite:///{reference.millrace.root}/mlflow.db")
    ((own,),) = mlflow_rows(reference.millrace.root, own_run(reference.run_dir))
    run = client.get_run(own)
    assert next(iter(run.data.metrics)) == "val/reward"
    last = journal(reference.run_dir)[-1]["metrics"]
    assert run.data.metrics["reward"] == last["reward"] == last["critic/score/mean"]
    assert run.data.metrics["val/reward"] == last["val/reward"] == last["val-core/countdown/reward/mean_at_2"]
    assert run.data.metrics.keys() <= {name for record in journal(reference.run_dir) for name in record["metrics"]}
    children = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{own}'")
    assert [child.data.tags["stage"] for child in children] == ["warm-start"]
    after = ValidationResult.read(reference.run_dir / "validation" / "after.json")
    table = json.loads(Path(client.download_artifacts(own, "responses.json")).read_text())
    assert table["columns"] == ["prompt", "response", "reward", "sample"]
    sampled = [reward for _, _, reward, sample in table["data"] if sample != "greedy"]
    assert len(sampled) == len(after.problems) * after.num_samples
    assert sum(sampled) / len(sampled) == pytest.approx(last["val/reward"])
    assert {row[0] for row in table["data"]} == {problem.prompt_text for problem in after.problems}
    linked = "select distinct dataset_name from logged_model_metrics where metric_name = 'val/reward'"
    assert mlflow_rows(reference.millrace.root, linked) == [("countdown held-out",)]


def test_checkpoints_and_alarms_are_events(api, reference):
    def saved() -> list[dict[str, Any]]:
        return api.events(reference.run_dir.name, "checkpoint.saved")

    wait_until(lambda: len(saved()) >= 3, "three events")
    assert [one["step"] for one in saved()[:3]] == [20, 40, 60]
    assert saved()[2]["path"] == str(reference.run_dir / "checkpoints" / "step-000060")
    message = [event for event in load_journal(reference.run_dir / "metrics.jsonl").events if event.name == "alarm"]
    assert message
    run_id = reference.run_dir.name
    wait_until(lambda: len(api.events(run_id, "alarm")) >= len(message), "Prefect's events")
    assert {str(event.data["text"]) for event in message} <= {one["text"] for one in api.events(run_id, "alarm")}
    query = f"select value from tags where key = 'events.alarm' and run_uuid in ({own_run(reference.run_dir)})"
    assert mlflow_rows(reference.millrace.root, query) == [(f"step {message[-1].step}",)]


def test_second_run_repeats_no_finished_work(api, reference):
    run_dir = reference.run_dir
    logs, before = sorted((run_dir / "logs").iterdir()), (run_dir / "metrics.jsonl").read_bytes()
    files = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    nowhere = {"PREFECT_API_URL": "http://127.0.0.1:1/api"}
    unchanged = Millrace(reference.millrace.root, nowhere)("run", *SMALL, code=0)
    assert f"run {run_dir.name} in {run_dir}: finished, there is nothing to do" in unchanged.out
    assert str(run_dir / "report" / "report.html") in unchanged.out
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == files
    (run_dir / "recorded.json").unlink()
    again = reference.millrace("run", *SMALL, code=0)
    stages = [line for line in again.out.splitlines() if line.startswith(STAGE_WORDS)]
    assert len(stages) == 10
    (second,) = api.filter("flow_runs", flow_runs={"name": {"any_": [run_dir.name]}}, sort="START_TIME_DESC", limit=1)
    chosen: dict[str, Any] = {"flow_runs": {"id": {"any_": [second["id"]]}}}
    wait_until(lambda: len(api.filter("task_runs", **chosen)) == 11, "the events of eleven tasks")
    assert {task["state_name"] for task in api.filter("task_runs", **chosen)} == {"Cached"}
    assert all("skipped" in line for line in stages), again.out
    assert sorted((run_dir / "logs").iterdir()) == logs, "a trainer was started"
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.lengthy
def test_hang_without_prefect_is_detected_and_retried(millrace, reference, tmp_path):
    hangs_once = ("algo.policy_loss=tests.helpers.harmful:hangs", "runtime.deadlines.update_s=20")
    done = Millrace(millrace.root, {HARM: str(tmp_path)})("train", *UNTRACKED, *hangs_once, code=0)
    assert "hang in update_actor after step" in done.out
    assert "trying again from the last checkpoint (1 of 2)" in done.out
    assert numbers(millrace.run_dir()) == numbers(reference.run_dir)


@pytest.mark.lengthy
def test_run_fails_after_last_retry_and_can_resume(millrace, reference, tmp_path):
    settings = (*UNTRACKED, "algo.policy_loss=tests.helpers.harmful:kills", "runtime.max_chunk_retries=1")
    command = Millrace(millrace.root, {HARM: str(tmp_path)})
    failed = command("train", *settings)
    assert failed.code == 1
    assert failed.out.count("trying again from the last checkpoint (1 of 1)") == 1
    assert "signal SIGKILL" in failed.err
    command("train", *settings, code=0)
    assert numbers(millrace.run_dir()) == numbers(reference.run_dir)
    assert [str(failure.kind) for failure in read_failures(millrace.run_dir())] == ["lost worker", "lost worker"]
    steps = [record["metrics"] for record in journal(millrace.run_dir()) if record["step"]]
    assert {metrics.get("fault/num_retries") for metrics in steps} == {2.0}


def test_killed_trainer_restarts_with_equal_numbers(millrace, api, reference, tmp_path):
    updating, exporting = files = tmp_path / "updating", tmp_path / "exporting"
    hold = {"HOLD_PHASE": "update_actor,export", "HOLD_FILE": ",".join(map(str, files))}
    hold |= {"HOLD_AFTER": "24,0", "PYTHONPATH": str(conftest.HELD)}  # step 25 is in the second chunk
    process = replace(millrace, environment=millrace.environment | hold).start("run", *UNTRACKED)
    wait_until(lambda: updating.exists() or process.poll() is not None, "an update in the second chunk")
    for _ in ("in a chunk", "in the export"):
        trainer_of(process).kill()
        wait_until(lambda: exporting.exists() or process.poll() is not None, "the export")
    done = ended(process, 0)
    assert done.out.count("signal SIGKILL") == 2
    assert done.out.count("trying again from the last checkpoint (1 of 2)") == 2
    assert numbers(millrace.run_dir()) == numbers(reference.run_dir)
    # Prefect sends states of tasks as events, which arrive later.
    root = f"paths.root={millrace.root}"
    (run,) = (one for one in api.filter("flow_runs") if root in one["parameters"].get("overrides", ()))
    second: dict[str, Any] = {
        "flow_runs": {"id": {"any_": [run["id"]]}},
        "task_runs": {"name": {"any_": ["train debug step 20-40"]}, "state": {"type": {"any_": ["COMPLETED"]}}},
    }
    wait_until(lambda: bool(api.filter("task_runs", **second)), "the end of the second chunk")
    (chunk,) = api.filter("task_runs", **second)
    assert chunk["run_count"] == 1
    assert "resuming from step" in wait_for_event(api, millrace, "resumed")["text"]
    wait_for_event(api, millrace, "alarm")
    alarms = [one["text"] for one in api.events(millrace.run_dir().name, "alarm") if one["alarm"] == "entropy"]
    assert alarms
    assert all("alarms.entropy_below is 50" in text for text in alarms)


def wait_for_event(api: Api, millrace: Millrace, name: str) -> dict[str, Any]:
    """Wait for an event of that name and return the last one."""
    run_id = millrace.run_dir().name
    wait_until(lambda: bool(api.events(run_id, name)), f"an event {name}")
    return api.events(run_id, name)[-1]


def test_signal_saves_and_same_command_resumes(millrace, api, reference):
    calm, step = numbers(reference.run_dir), 22
    for number, more in ((signal.SIGINT, ("tracking.enabled=false",)), (signal.SIGTERM, ())):
        process = millrace.start("run", *ENDLESS, *more)
        millrace.wait_for_step(step)
        process.send_signal(number)
        stopped = ended(process, 75)
        assert "is saved" in stopped.out
        assert "Traceback" not in stopped.err
        names = [path.name for path in (millrace.run_dir() / "checkpoints").glob("step-*")]
        saved = max(int(name.removeprefix("step-")) for name in names)
        assert saved >= step
        step = saved + 2
        (run,) = api.filter("flow_runs", sort="START_TIME_DESC", limit=1)
        assert (run["name"], run["state_type"]) == (millrace.run_dir().name, "CANCELLED")
        tasks = api.filter("task_runs", flow_runs={"id": {"any_": [run["id"]]}}, sort="EXPECTED_START_TIME_ASC")
        *before, last = tasks
        assert {task["state_type"] for task in before} == {"COMPLETED"}
        # The next chunk is trained before its task begins: a stop there finds the last chunk saved.
        is_saved = int(last["name"].rpartition("-")[2]) <= saved
        assert last["state_type"] == "CANCELLED" or (last["state_type"] == "COMPLETED" and is_saved), last["name"]
    assert set(mlflow_rows(millrace.root, OF_RUNS)) == {("KILLED",)}
    assert "step 0-20, skipped" in stopped.out
    measured = numbers(millrace.run_dir())
    assert list(measured) == list(range(saved + 1))
    both = measured.keys() & calm.keys()
    assert {step: measured[step] for step in both} == {step: calm[step] for step in both}


@pytest.mark.lengthy
def test_cancellation_reaches_run_without_worker(millrace, api):
    process = millrace.start("run", *ENDLESS)
    millrace.wait_for_step(2)
    (run,) = api.filter("flow_runs", flow_runs={"state": {"type": {"any_": ["RUNNING"]}}}, flows=PIPELINE)
    api.ask(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    stopped = ended(process, 75)
    assert "is saved" in stopped.out
    (run,) = api.filter("flow_runs", flow_runs={"id": {"any_": [run["id"]]}})
    assert run["state_type"] == "CANCELLED"


@pytest.mark.lengthy  # also in test_stack and test_trainer
def test_killed_flow_ends_its_trainer_and_run_resumes(millrace, reference):
    process = millrace.start("run", *UNTRACKED)
    millrace.wait_for_step(22)
    trainer = trainer_of(process)
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)
    database = millrace.root / "mlflow.db"
    shutil.copy(reference.millrace.root / "mlflow.db", database)
    with sqlite3.connect(database) as store:
        store.execute("update alembic_version set version_num = 'ffffffffffff'")
    store.close()
    done = Millrace(millrace.root, {})("train", *SMALL)  # immediately: the trainer may still be saving
    assert done.code == 0, done.err
    assert not trainer.is_running()
    assert numbers(millrace.run_dir()) == numbers(reference.run_dir)
    assert "the store has another MLflow version" in done.err
    assert "The training is not affected; repeat the command to send the rest" in done.err
    database.unlink()
    late = Millrace(millrace.root, {})("sync", "--root", str(millrace.root))
    assert "bytes of the journal delivered; the run is FINISHED" in late.out, late.err


def make_demo(millrace: Millrace) -> "subprocess.Popen[str]":
    """Run `make demo` with the installed packages (`-o`: without installing them)."""
    set_by_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    words = ["make", "-o", ".venv/.installed", "demo", f"BIN={Path(sys.executable).parent}"]
    environment = {name: value for name, value in os.environ.items() if name not in set_by_make}
    return conftest.start([*words, f"ARGS=paths.root={millrace.root}"], environment | dict(millrace.environment))


def test_make_demo_twice_concurrently(millrace):
    first = make_demo(millrace)
    wait_until(lambda: bool(list(millrace.root.glob("runs/countdown_demo-*/run.json"))), "the first demo's run")
    family = {child.pid for child in psutil.Process(first.pid).children(recursive=True)}
    second = ended(make_demo(millrace))
    assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    ended(first)
    assert second.code == 2
    message, *_ = re.findall(r"run countdown_demo-\S+ is in use by process (\d+) on (\S+) since 20", second.err)
    assert (int(message[0]) in family, message[1]) == (True, socket.gethostname())


def test_full_disk_within_chunk_ends_a_resumable_run(millrace, reference):
    runs = millrace.root / "runs"
    with mounted(runs, size_mib=32):
        process = millrace.start("run", *UNTRACKED)
        millrace.wait_for_step(2)
        ballast = fill(runs)
        stopped = ended(process, 75)
        assert str(runs) in stopped.err
        ballast.unlink()
        ended(millrace.start("run", *UNTRACKED), 0)
        assert numbers(millrace.run_dir()) == numbers(reference.run_dir)


def test_full_disk_pauses_the_flow_run(millrace, api, reference):
    runs = millrace.root / "runs"
    with mounted(runs, size_mib=32):
        process = millrace.start("run", *UNTRACKED)
        millrace.wait_for_step(2)
        ballast = fill(runs, leave_bytes=1 << 20)  # space for the journal, not for a checkpoint

        def paused() -> list[dict[str, Any]]:
            known = api.filter("flow_runs", flow_runs={"state": {"type": {"any_": ["PAUSED"]}}})
            return [run for run in known if run["name"] == reference.run_dir.name]

        wait_until(lambda: bool(paused()) or process.poll() is not None, "a flow run in state Paused")
        found = paused()
        assert process.poll() is None
        for run in found:
            assert "B are missing" in run["state"]["message"]
            assert str(runs) in run["state"]["message"]
        ballast.unlink()
        done = ended(process, 0)
        assert "there is room again" in done.out
        states = api.filter("flow_runs", flow_runs={"id": {"any_": [run["id"] for run in found]}})
        assert {run["state_type"] for run in states} == {"COMPLETED"}
        assert str(runs) in wait_for_event(api, millrace, "paused_for_disk")["text"]
        assert "there is room again" in wait_for_event(api, millrace, "disk_room")["text"]
        assert numbers(millrace.run_dir()) == numbers(reference.run_dir)


SFT = (
    "experiment=debug", "warm_start.max_steps=8", "warm_start.steps_per_chunk=4", "warm_start.check_every=4",
    "warm_start.stop_at_reward=null", "runtime.stop_deadline_s=200",
    "validation.suites=[{name:sums,data:{task:countdown,train_size:8,validation_size:8,min_numbers:3,max_numbers:3,"
    "number_high:20,target_high:40,operations:[+,-],template:bare},seed:9}]",
)  # fmt: skip


def test_sft_evaluates_exports_and_reports(prefect_server, artifacts_root, api):
    millrace = conftest.under(prefect_server, artifacts_root)
    done = millrace("sft", *SFT, code=0)
    run_dir = millrace.run_dir()
    flow_run = next(run for run in api.flow_runs(["pipeline"]) if run["name"] == run_dir.name)
    changed_loss = r"held-out loss \d\.\d\d -> \d\.\d\d, 8 steps"
    rewards = r"countdown mean_at_2 0\.\d{3} -> 0\.\d{3}, sums mean_at_4 0\.\d{3} -> 0\.\d{3}"
    assert re.fullmatch(rf"{rewards}, {changed_loss}, \d+ s", flow_run["state"]["message"])
    assert re.search(changed_loss, done.out)
    tasks = api.filter("task_runs", flow_runs={"id": {"any_": [flow_run["id"]]}}, sort="EXPECTED_START_TIME_ASC")
    assert [task["name"] for task in tasks] == [
        "dataset countdown", "suite sums", "filter to 32 tokens", "validate debug before", "warm-start debug",
        "validate debug after", "export debug", "export debug best", "report debug",
    ]  # fmt: skip
    for name in ("before", "after"):
        assert ValidationResult.read(run_dir / "suites" / "sums" / f"{name}.json").problems
    report = json.loads((run_dir / "report" / "report.json").read_text())
    assert (report["state"], report["missing"]) == ("8 supervised steps", [])
    assert {"supervised", "accuracy"} <= {file.stem for file in (run_dir / "report" / "figures").glob("*.svg")}
    own = own_run(run_dir)
    assert mlflow_rows(millrace.root, f"select status from runs where run_uuid in ({own})") == [("FINISHED",)]
    sent = mlflow_rows(millrace.root, f"select key, step from metrics where run_uuid in ({own})")
    assert {("sft/loss", 8), ("sft/held_out_loss", 0), ("sft/held_out_loss", 8)} <= {*sent}
    suite = {step for key, step in sent if key == "val-core/sums/reward/mean_at_4"}
    assert suite == {0, 8}
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(run_dir / "model"))
    again = millrace("sft", *SFT, code=0)
    assert "finished, there is nothing to do" in again.out
    forked = millrace("sft", *SFT[:-1], "name=more", "--fork", run_dir.name, "--cfg", "job", code=0)
    assert f"path: {run_dir / 'model'}" in forked.out


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ("trainer.total_steps=5", 2, r"trainer\.total_steps: is given more than once, .*got 5 and 0"),
        ("pass_rates.samples=2", 2, r"trainer\.total_steps: must be 1 or more with pass rates"),
        ("-m seed=1,2", 2, r"trainer\.total_steps: must be 1 or more in a sweep"),
        ("warm_start.demonstrations=absent.jsonl", 2, r"warm_start\.demonstrations: must be a file that exists"),
        ("warm_start.demonstrations=talks.jsonl", 1, r"talks\.jsonl must have rows, and is empty"),
        ("data=mapped data.source=. data.question=q data.answer=a data.scorer=data.math:score model.path=owner/name "
         "reward.num_processes=1 filter.max_prompt_tokens=56",
         2, r"^warm_start\.enabled: must be false without demonstrations"),
    ],
)  # fmt: skip
def test_sft_refuses_wrong_settings_before_a_start(artifacts_root, tmp_path, monkeypatch, capsys, words, code, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.jsonl").touch()
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"q": f"What is 1 and 1, {split}?", "a": "2"}))
    done = conftest.in_this_process(capsys, "sft", "experiment=debug", *words.split(), f"paths.root={artifacts_root}")
    assert (done.code, bool(re.search(problem, done.err))) == (code, True), done
    assert not (artifacts_root / "runs").exists()
