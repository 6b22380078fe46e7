"""MlflowStore against a real sqlite store: what it writes, and what it says when something is wrong."""

import json
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import TrackingError
from rlcore.tracking import mlflow_store
from rlcore.tracking.connection import (
    CLIENT_ENVIRONMENT,
    connect,
    explain,
    has_store,
    resolve_uri,
)
from rlcore.tracking.delivery import ensure_mlflow_run, read_state
from rlcore.tracking.lineage import code_diff, code_revision, environment_facts, first_gpu, gpu_facts, lineage_tags
from rlcore.tracking.mlflow_store import PARENT_TAG, MlflowStore, compare_url, search_run_ids
from rlcore.tracking.models import (
    Garbage,
    find_garbage,
    log_model,
    model_of,
    models_of,
    name_models,
    remove_garbage,
)
from tests.forked import fork_module, run_module
from tests.tracking.reading import client_of, main_runs, points


@pytest.fixture
def store(config: RunConfig, root: Path) -> MlflowStore:
    return MlflowStore(config.tracking, root)


@pytest.fixture
def run_id(store: MlflowStore) -> str:
    return store.create_run("run-1", {"millrace.run_id": "run-1", "stage": "train"})


def test_the_store_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(TrackingConfig(), Path("artifacts")) == f"sqlite:///{tmp_path}/artifacts/mlflow.db"
    assert resolve_uri(TrackingConfig(uri="sqlite:///my.db"), tmp_path) == f"sqlite:///{tmp_path}/my.db"
    assert resolve_uri(TrackingConfig(uri="http://127.0.0.1:5000/"), tmp_path) == "http://127.0.0.1:5000"


def test_a_store_is_there_before_it_is_made_only_where_a_server_has_it(tmp_path: Path):
    assert not has_store(f"sqlite:///{tmp_path}/mlflow.db")
    assert not has_store(f"sqlite:///{tmp_path}"), "a folder is no store"
    assert has_store("http://127.0.0.1:1")


def test_mlflow_is_told_before_its_first_use_unless_the_user_says_otherwise(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in CLIENT_ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    connect(f"sqlite:///{root}/mlflow.db")
    told = {name: os.environ.get(name) for name in CLIENT_ENVIRONMENT}
    assert told == CLIENT_ENVIRONMENT | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "7"}


def test_a_server_is_not_asked_before_the_first_use_and_its_failed_tries_are_not_logged(
    monkeypatch: pytest.MonkeyPatch,
):
    tries = logging.getLogger("urllib3.connectionpool")
    monkeypatch.setattr(tries, "level", logging.NOTSET)
    assert connect("http://127.0.0.1:1").tracking_uri == "http://127.0.0.1:1"
    assert tries.level == logging.ERROR


def test_a_root_of_any_name_holds_its_store(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("why?", "50%41", "#1 ?a=b&c#d"):
        root = tmp_path / name
        root.mkdir()
        shutil.copy(empty_store, root / "mlflow.db")
        store = MlflowStore(TrackingConfig(), root)
        assert resolve_uri(TrackingConfig(uri=store.uri), tmp_path) == store.uri
        assert has_store(store.uri)
        store.client.log_text(store.create_run("r", {"millrace.run_id": "r"}), "text", "a.txt")
        with closing(sqlite3.connect(root / "mlflow.db")) as database:
            assert database.execute("select count(*) from runs").fetchone() == (1,)
        assert [file.read_text() for file in root.rglob("a.txt")] == ["text"]
    assert {file.name for file in tmp_path.iterdir()} == {"why?", "50%41", "#1 ?a=b&c#d"}


def test_artifacts_lie_under_the_root(store: MlflowStore, run_id: str, root: Path, tmp_path: Path):
    (tmp_path / "report.md").write_text("# Report")
    store.client.log_artifact(run_id, str(tmp_path / "report.md"), "report")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "a.txt").write_text("a")
    store.client.log_artifacts(run_id, str(tmp_path / "samples"), "samples")
    store.client.log_text(run_id, "seed: 1\n", "config/settings.yaml")
    (folder,) = (root / "mlartifacts").glob("*/artifacts")
    found = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert found == {"report/report.md": "# Report", "samples/a.txt": "a", "config/settings.yaml": "seed: 1\n"}


def test_a_sweeps_run_is_below_its_parent(store: MlflowStore, run_id: str):
    child = store.create_run("child", {"millrace.run_id": "child", PARENT_TAG: run_id}, start_time_s=12.5)
    run = store.client.get_run(child)
    assert run.data.tags["mlflow.parentRunId"] == run_id
    assert run.info.start_time == 12_500


def test_settings_become_parameters_and_long_ones_say_that_they_are_cut(store: MlflowStore, run_id: str):
    settings = {f"key{i}": i for i in range(250)} | {"nested": {"deep": [1, 2], "none": None, "yes": True}}
    store.log_params(run_id, settings | {"long": "x" * 20_000, "uri": "http://me:SECRET@host"})
    params, tags = store.client.get_run(run_id).data.params, store.client.get_run(run_id).data.tags
    assert not [key for key in tags if key.startswith("changed.")]
    assert len(params) == 255
    assert params["uri"] == "http://me:***@host"
    assert (params["nested.deep"], params["nested.none"], params["nested.yes"]) == ("[1, 2]", "null", "true")
    assert len(params["long"]) == 6_000
    assert params["long"].endswith("... [cut: 20000 characters]")


def test_settings_that_changed_are_told_by_a_tag(store: MlflowStore, run_id: str):
    store.log_params(run_id, {"trainer": {"total_steps": 100}, "seed": 1})
    store.log_params(run_id, {"trainer": {"total_steps": 200}, "seed": 1, "new": "x"})
    run = store.client.get_run(run_id)
    assert [key for key in run.data.tags if key.startswith("changed.")] == ["changed.trainer.total_steps"]
    assert run.data.params == {"trainer.total_steps": "100", "seed": "1", "new": "x"}
    assert run.data.tags["changed.trainer.total_steps"] == "200"


def test_a_tag_that_mlflow_refuses_is_left_out_and_told(store: MlflowStore, caplog: pytest.LogCaptureFixture):
    tags = {"a//b": "1", "größe": "2", "owner": "me"}
    run = store.create_run("run", tags)
    store.set_tags(run, tags)
    store.log_params(run, {"seed": 1, "tags": tags})
    data = store.client.get_run(run).data
    assert {key: value for key, value in data.tags.items() if not key.startswith("mlflow.")} == {"owner": "me"}
    assert data.params == {"seed": "1", "tags.owner": "me"}
    assert any("'a//b'" in line for line in caplog.messages)


def test_a_long_tag_is_cut_with_a_mark(store: MlflowStore, run_id: str):
    longest = "z" * 8_000
    store.set_tags(
        run_id, {"mlflow.note.content": "y" * 9_000, "long": longest, **{f"tag{i}": "1" for i in range(150)}}
    )
    tags = store.client.get_run(run_id).data.tags
    assert len(tags["mlflow.note.content"]) == 8_000
    assert tags["mlflow.note.content"].endswith("... [cut: 9000 characters]")
    assert tags["long"] == longest, "one of just that length stays whole"
    assert tags["tag149"] == "1"


def test_a_dataset_is_found_by_our_fingerprint(store: MlflowStore, run_id: str):
    fingerprint = "0123456789abcdef"
    for _ in range(2):  # a retried stage does it again
        store.log_dataset(
            run_id,
            name="countdown",
            fingerprint=fingerprint,
            source="/data/train.parquet",
            schema={"prompt": "list<struct>", "ability": "string"},
            counts={"train": 100, "validation": 10},
            context="training",
        )
    (found,) = store.client.search_runs([store.experiment_id], f"dataset.digest = '{fingerprint}'")
    (given,) = found.inputs.dataset_inputs
    assert given.dataset.name == "countdown"
    assert json.loads(given.dataset.profile) == {"train": 100, "validation": 10}
    assert json.loads(given.dataset.schema)["mlflow_colspec"][1] == {"name": "ability", "type": "string"}
    tags = {tag.key: tag.value for tag in given.tags}
    assert tags == {"mlflow.data.context": "training", "fingerprint": fingerprint}


def test_metrics_of_a_stage_without_a_journal(store: MlflowStore, run_id: str):
    store.log_metrics(run_id, 40, {"val-core/x/reward/mean@4": 0.5}, 3.25)
    (metric,) = store.client.get_metric_history(run_id, "val-core/x/reward/mean_at_4")
    assert (metric.step, metric.value, metric.timestamp) == (40, 0.5, 3_250)


def test_where_to_look(store: MlflowStore, run_id: str, root: Path):
    experiment = store.experiment_id
    page, view = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs", "workflowType=machine_learning"
    assert store.run_url(run_id) == f"{page}/{run_id}?{view}"
    assert store.runs_url() == f"{page}?{view}"
    assert store.ui_command() == f"mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db"
    compared = f"#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D&experiments=%5B%22{experiment}%22%5D&{view}"
    assert compare_url(store, ["a", "b"]) == f"http://127.0.0.1:5000/{compared}"
    assert compare_url(store, ["a", "b"], "http://me:7000") == f"http://me:7000/{compared}"
    served = MlflowStore(TrackingConfig(uri="http://me:SECRET@127.0.0.1:1"), root)
    assert served.ui_command() is None
    assert served.page_root("http://127.0.0.1:5000") == "http://me:***@127.0.0.1:1"


def test_a_flow_and_the_trainer_share_one_run(
    config: RunConfig, root: Path, run_dir: Path, tmp_path: Path, empty_store: Path
):
    first = ensure_mlflow_run(run_dir, config, {"stage": "train"})
    assert ensure_mlflow_run(run_dir, config, {}) == first
    assert read_state(run_dir).mlflow_run_id == first
    assert len(main_runs(client_of(root))) == 1
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    address = f"sqlite:///{tmp_path}/other/mlflow.db"
    moved = RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"uri": address}))
    other = ensure_mlflow_run(run_dir, moved, {})
    assert other != first, "another store has a run of its own"
    assert (read_state(run_dir).uri, read_state(run_dir).mlflow_run_id) == (address, other)


def test_tags_of_lineage(config: RunConfig):
    prefect = {"flow_run_id": "abc", "deployment": ""}
    tags = lineage_tags(config, stage="train", run_id="run-1", prefect=prefect)
    assert tags["millrace.run_id"] == "run-1"
    shape = config.model.scratch
    assert (tags["model"], tags["host"]) == (f"scratch-{shape.num_layers}x{shape.hidden_size}", socket.gethostname())
    commit, dirty = code_revision()
    of_git = {"git_commit": commit, "git_dirty": "true" if dirty else "false", "mlflow.source.git.commit": commit}
    assert {key: value for key, value in tags.items() if "git" in key} == (of_git if commit else {})
    assert (tags["stage"], tags["task"], tags["algorithm"], tags["seed"]) == ("train", "countdown", "grpo", "1")
    assert (tags["settings_fingerprint"], tags["prefect.flow_run_id"]) == (settings_fingerprint(config), "abc")
    assert "prefect.deployment" not in tags
    mine = RunConfig(tags={"stage": "mine"})
    assert lineage_tags(mine, stage="train", run_id="run-1")["stage"] == "mine"


def test_the_code_revision_is_gits(tmp_path: Path):
    assert code_revision(tmp_path) == ("", False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    source = tmp_path / "rlcore" / "a.py"
    source.parent.mkdir()
    source.write_text("one\n")
    for command in (["init", "-q"], ["add", "rlcore"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit, dirty = code_revision(tmp_path)
    assert (len(commit), dirty, code_diff(tmp_path)) == (40, False, "")
    source.write_text("two\n")
    assert code_revision(tmp_path) == (commit, True)
    assert "+two" in code_diff(tmp_path)
    # An edit in the second of the commit, of the same length: git looks into a file that is as young as its index.
    second = (1_700_000_000, 1_700_000_000)
    source.write_text("one\n")
    os.utime(source, second)
    for command in (["config", "core.trustctime", "false"], ["add", "rlcore"]):
        subprocess.run([*git, *command], check=True)
    source.write_text("six\n")
    for file in (source, tmp_path / ".git" / "index"):
        os.utime(file, second)
    assert "+six" in code_diff(tmp_path)
    installed = tmp_path / ".venv" / "site-packages"
    (installed / "rlcore").mkdir(parents=True)
    (installed / "rlcore" / "a.py").write_text("one\n")
    assert (code_revision(installed), code_diff(installed)) == (("", False), ""), "that is another project's repository"


def test_facts_of_the_environment():
    facts = environment_facts()
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "mlflow", "host"} <= facts.keys()


def test_a_gpu_without_memory_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch):
    """NVML as it answers for a GPU whose memory is the host's: this machine has none."""

    class NVMLError(Exception):
        pass

    def memory(gpu: int) -> SimpleNamespace:
        if gpu == 0:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=85_520_809_984)

    answers: dict[str, object] = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda gpu: ("NVIDIA GB10", "NVIDIA H100 80GB HBM3")[gpu],
        "nvmlDeviceGetMemoryInfo": memory,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **answers))  # type: ignore[arg-type]
    described = {"nvidia_driver": "580.1", "gpu_0": "NVIDIA GB10", "gpu_1": "NVIDIA H100 80GB HBM3, 85.5 GB"}
    assert gpu_facts() == described
    assert described.items() <= environment_facts().items()
    assert first_gpu() == ("NVIDIA GB10", None)
    answers["nvmlDeviceGetHandleByIndex"] = lambda index: index + 1
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **answers))  # type: ignore[arg-type]
    assert first_gpu() == ("NVIDIA H100 80GB HBM3", 85_520_809_984)


def test_an_experiment_that_another_process_has_just_made_is_taken(store: MlflowStore, root: Path):
    made = store.experiment_id
    assert store._create_experiment().experiment_id == made
    with pytest.raises(Exception, match="maximum length"):
        assert MlflowStore(TrackingConfig(experiment="x" * 501), root).experiment_id


def test_files_of_a_deleted_run_are_counted_and_removed_where_their_place_is_its_own(
    store: MlflowStore, run_id: str, root: Path
):
    for name, text in (("a.txt", "12345"), ("config/b.txt", "678")):
        store.client.log_text(run_id, text, name)
    other = store.create_run("other", {})
    store.client.log_text(other, "stays", "c.txt")
    store.client.delete_run(run_id)
    (found,) = find_garbage(store.uri)
    location = store.client.get_run(run_id).info.artifact_uri
    assert found == Garbage(run_id, "run-1", "", location, num_files=2, num_bytes=8, kept="")
    remove_garbage(store.uri, replace(found, kept="it is in use"))
    assert find_garbage(store.uri) == [found]
    remove_garbage(store.uri, found)
    assert find_garbage(store.uri) == []
    assert [file.name for file in (root / "mlartifacts").rglob("*") if file.is_file()] == ["c.txt"]


def test_files_of_a_deleted_run_stay_where_their_place_is_not_its_own(store: MlflowStore, run_id: str, root: Path):
    store.client.log_text(run_id, "text", "a.txt")
    store.client.delete_run(run_id)
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        database.execute("update runs set artifact_uri = ?", ((root / "mlartifacts").as_uri(),))
        database.commit()
    (found,) = find_garbage(store.uri)
    assert found.kept == f"its place {(root / 'mlartifacts').as_uri()} does not name {run_id}"


def test_a_search_says_when_it_ends_early(
    store: MlflowStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in ("one", "two"):
        store.create_run(name, {"millrace.run_id": name, "stage": "train"})
    assert search_run_ids(store, "") == ["one", "two"]
    monkeypatch.setattr(mlflow_store, "MOST_RUNS", 1)
    assert search_run_ids(store, "") == ["one"]
    assert "more than 1 runs are found" in caplog.text


def test_the_files_of_all_models_of_a_deleted_run_are_found(store: MlflowStore, run_id: str, tmp_path: Path):
    experiment, weights = store.experiment_id, tmp_path / "weights"
    weights.write_text("weights")
    for step in range(101):  # a page has 100, the newest first
        model = store.client.create_logged_model(experiment, name=f"step-{step}", source_run_id=run_id)
        if step == 0:
            store.client.log_model_artifact(model.model_id, str(weights))
            first = str(model.model_id)
    store.client.delete_run(run_id)
    assert [found.model_id for found in find_garbage(store.uri)] == [first]


# ------------------------------------------------------------------ bad input


def test_a_deleted_experiment_is_told(store: MlflowStore, root: Path):
    experiment = store.experiment_id
    store.client.delete_experiment(experiment)
    with pytest.raises(
        TrackingError, match=r"tracking\.experiment 'millrace': was deleted .*`mlflow experiments restore"
    ):
        assert MlflowStore(TrackingConfig(), root).experiment_id


def test_a_run_in_a_deleted_experiment_is_told(store: MlflowStore, run_id: str):
    store.client.delete_run(run_id)
    with pytest.raises(Exception, match="active") as caught:
        store.log_metrics(run_id, 1, {"a": 1.0}, 1.0)
    assert "was deleted there" in explain(caught.value, store.uri)
    assert "mlflow runs restore" in explain(caught.value, store.uri)


def test_a_store_of_another_version_is_told(root: Path):
    with sqlite3.connect(root / "mlflow.db") as database:
        database.execute("update alembic_version set version_num = 'ffffffffffff'")
    database.close()
    store = MlflowStore(TrackingConfig(), root)
    with pytest.raises(Exception, match="schema") as caught:
        assert store.experiment_id
    assert "made by another MLflow version" in explain(caught.value, store.uri)
    assert "if newer, use the MLflow that made it" in explain(caught.value, store.uri)


def test_a_file_that_is_no_database_is_told(artifacts_root: Path):
    (artifacts_root / "mlflow.db").write_text("no database, long enough to be read as one" * 50)
    store = MlflowStore(TrackingConfig(), artifacts_root)
    with pytest.raises(Exception, match="not a database") as caught:
        assert store.experiment_id
    assert "not a database" in explain(caught.value, store.uri)
    assert "SECRET" not in explain(OSError("no http://me:SECRET@host"), "http://me:SECRET@host")


# ------------------------------------------------------------------ models


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, "1": 2, "+": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), eos_token="<eos>", pad_token="<pad>"
    )
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=4, num_hidden_layers=1, **shape))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


KEEP = """
import sys
from pathlib import Path
from rlcore.config import TrackingConfig
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.tracking.models import log_model
root, run_id, model = sys.argv[1:]
store = MlflowStore(TrackingConfig(), Path(root))
print(log_model(store, run_id, Path(model), kind="transformers", name="last", step=20, metrics={}, time_s=1.0, tags={}))
assert "torch" not in sys.modules
"""


@pytest.mark.filterwarnings("ignore")  # MLflow and transformers warn of each other's plans
def test_a_model_directory_is_kept_once_with_its_scores(store: MlflowStore, run_id: str, model_directory: Path):
    store.log_metrics(run_id, 20, {"val-core/x/reward/mean@4": 0.5}, 3.25)
    num_bytes = sum(file.stat().st_size for file in model_directory.iterdir())

    def keep() -> str:
        return log_model(
            store,
            run_id,
            model_directory,
            kind="transformers",
            name="best",
            step=20,
            metrics={"val-core/x/reward/mean@4": 0.5},
            time_s=3.25,
            tags={"checkpoint": "step-000020"},
            max_bytes=num_bytes,
        )

    model_id = keep()
    assert keep() == model_id, "a retried stage keeps it once"
    model = store.client.get_logged_model(model_id)
    assert (model.name, model.source_run_id, model.tags["step"]) == ("best", run_id, "20")
    assert (model.tags["size_bytes"], "mlflow.model.isExternal" in model.tags) == (str(num_bytes), False)
    assert {file.path for file in store.client.list_logged_model_artifacts(model_id)} >= {"MLmodel", "model"}
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [
        ("val-core/x/reward/mean_at_4", 0.5, 20)
    ]
    run = store.client.get_run(run_id)
    assert points(store.client, run, "val-core/x/reward/mean_at_4") == [(20, 0.5)], "the run's curve has it once"
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model_id, 20)]


@pytest.mark.filterwarnings("ignore")  # MLflow and transformers warn of each other's plans
def test_weights_are_kept_without_torch_and_load_as_they_were(
    store: MlflowStore, root: Path, run_id: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    command = [sys.executable, "-W", "ignore", "-c", KEEP, str(root), run_id, str(model_directory)]
    kept = subprocess.run(command, capture_output=True, text=True)
    assert kept.returncode == 0, kept.stderr[-2000:]
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", store.uri)
    address = f"models:/{kept.stdout.strip()}"
    components = mlflow.transformers.load_model(address, return_type="components")
    folder = mlflow.artifacts.download_artifacts(address)
    plain = PreTrainedTokenizerFast.from_pretrained(model_directory)
    for text in ("1", "1 + 1"):
        assert components["tokenizer"](text)["input_ids"] == plain(text)["input_ids"], "another tokenizer"
    wanted = load_file(model_directory / "model.safetensors")
    for model in (components["model"], AutoModelForCausalLM.from_pretrained(f"{folder}/model")):
        state = model.state_dict()
        assert wanted
        assert all(torch.equal(state[name].float(), value) for name, value in wanted.items())


def test_of_a_model_over_the_limit_only_the_place_is_kept(store: MlflowStore, run_id: str, tmp_path: Path):
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text("{}")
    (tmp_path / "big" / "model.safetensors").write_bytes(b"0" * 1000)
    place = tmp_path / "big"
    model_id = log_model(store, run_id, place, kind="transformers", name="last", step=3, metrics={}, time_s=1.0,
                         tags={}, max_bytes=999)  # fmt: skip
    model = store.client.get_logged_model(model_id)
    assert model.tags["path"] == str(tmp_path / "big")
    assert model.tags["size_bytes"] == "1002"
    assert store.client.list_logged_model_artifacts(model_id) == []


def test_a_folder_that_is_no_model_is_refused(store: MlflowStore, run_id: str, tmp_path: Path):
    with pytest.raises(TrackingError, match=r"holds no config\.json"):
        log_model(store, run_id, tmp_path, kind="transformers", name="last", step=3, metrics={}, time_s=1.0, tags={})


def test_two_processes_may_make_the_store_at_the_same_moment_after_one_that_was_killed_at_it(tmp_path: Path):
    maker, address, said = "tests.tracking.makes_a_store", f"sqlite:///{tmp_path}/new/mlflow.db", tmp_path / "said"
    assert run_module(maker, [address, "killed"], output=said, timeout_s=120.0) == -9
    processes = [fork_module(maker, [address], output=said) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0], said.read_text()
    config = RunConfig(paths=PathsConfig(root=str(tmp_path / "new")))
    assert MlflowStore(config.tracking, tmp_path / "new").experiment_id
    shutil.rmtree(tmp_path / "new")


def test_checkpoints_and_weights_are_linked_to_their_scores_and_found_by_alias(
    store: MlflowStore, run_id: str, model_directory: Path, tmp_path: Path
):
    score = "val-core/x/reward/mean@4"
    for step, value in ((20, 0.5), (40, 0.25)):
        store.log_metrics(run_id, step, {score: value}, float(step))
        for _ in range(2):  # a retried stage
            log_model(store, run_id, tmp_path / f"step-0000{step}", kind="checkpoint", name=f"step-0000{step}",
                      step=step, metrics={score: value}, time_s=step + 0.5, tags={"size_bytes": "9"})  # fmt: skip
    weights = {
        step: log_model(store, run_id, model_directory, kind="transformers", name=f"weights-{step}", step=step,
                        metrics={score: value}, time_s=float(step), tags={}, max_bytes=1)
        for step, value in ((20, 0.5), (40, 0.25))
    }  # fmt: skip
    by_name = {model.name: model for model in store.client.search_logged_models([store.experiment_id])}
    assert sorted(by_name) == ["step-000020", "step-000040", "weights-20", "weights-40"]
    checkpoint = by_name["step-000020"]
    assert (checkpoint.model_type, checkpoint.tags["path"]) == ("checkpoint", str(tmp_path / "step-000020"))
    assert (checkpoint.tags["mlflow.model.isExternal"], checkpoint.tags["size_bytes"]) == ("true", "9")
    assert [(metric.value, metric.step) for metric in checkpoint.metrics] == [(0.5, 20)]
    assert points(store.client, store.client.get_run(run_id), "val-core/x/reward/mean_at_4") == [(20, 0.5), (40, 0.25)]
    before = mlflow.get_tracking_uri(), mlflow.is_tracking_uri_set()
    name_models(store, run_id, {"best": weights[20], "last": weights[20]}, "mine")
    for _ in range(2):
        name_models(store, run_id, {"best": weights[20], "last": weights[40]}, "mine")
    models = models_of(store.client, store.experiment_id, run_id)
    by_alias = {alias: [model.model_id for model in models if alias in model.tags] for alias in ("best", "last")}
    assert by_alias == {"best": [weights[20]], "last": [weights[40]]}
    assert (mlflow.get_tracking_uri(), mlflow.is_tracking_uri_set()) == before
    versions = {alias: store.client.get_model_version_by_alias("mine", alias) for alias in ("best", "last")}
    assert {alias: version.version for alias, version in versions.items()} == {"best": 1, "last": 2}
    assert (model_of(versions["best"]), versions["best"].run_id) == (weights[20], run_id)
    last, named = versions["last"], store.client.get_run(run_id).info.run_name
    assert last.tags == {"run": named, "step": "40", "val-core/x/reward/mean_at_4": "0.25"}
    assert last.description == f"Step 40 of {named}"
    assert len(store.client.search_model_versions("name = 'mine'")) == 2, "each model is there once"


def test_a_folder_in_the_place_of_the_store_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(TrackingError, match=r"^tracking.uri: must be a file of sqlite or a new one; got .*mlflow\.db"):
        connect(f"sqlite:///{tmp_path / 'mlflow.db'}")
