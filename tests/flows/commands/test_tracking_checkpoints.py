"""`millrace checkpoints` and `--fork` on a real run."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from flows.evaluation import evaluation_settings
from flows.work.runs import find_run
from flows.work.weights import compose_fork, export_to
from rlcore.config.compose import load_config
from rlcore.errors import CheckpointError, DataError, ModelError
from rlcore.storage.locks import RunLock
from tests.flows.conftest import in_this_process
from tests.helpers.hub_server import HUB_ID, cache_of
from tests.helpers.published import flip
from tests.helpers.sessions import run_to_the_end, session_of
from tests.helpers.small_run import SmallRun, prepare

OVERRIDES = (
    "trainer.total_steps=4", "validation.every_steps=2", "checkpoint.keep_last=4", "tracking.enabled=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    made = prepare(tmp_path_factory.mktemp("artifacts"), *OVERRIDES)
    run_to_the_end(made)
    return made


def test_the_list_for_people_and_for_machines(run, capsys):
    folder, root = str(run.layout.run_dir), run.config.paths.root
    shown = in_this_process(capsys, "checkpoints", folder, code=0)
    assert ("last" in shown.out, "best" in shown.out) == (True, True)
    by_settings = ("experiment=debug", *OVERRIDES, f"paths.root={root}")
    for words in ((folder,), (run.layout.run_dir.name, "--root", root), by_settings):
        listed = json.loads(in_this_process(capsys, "checkpoints", *words, "--verify", "--json", code=0).out)
        assert listed["run_id"] == run.layout.run_dir.name
        assert [one["step"] for one in listed["checkpoints"]] == [1, 2, 3, 4]
        assert {one["verdict"] for one in listed["checkpoints"]} == {"verified"}
        assert "last" in listed["checkpoints"][-1]["marks"]
        assert listed["checkpoints"][1]["metrics"]["critic/score/mean"] >= 0


def test_a_fork_has_the_weights_and_its_own_settings(run, tmp_path, capsys):
    folder, root = str(run.layout.run_dir), Path(run.config.paths.root)
    given = ["experiment=debug", "optim.lr=1e-4", "tracking.enabled=false"]
    before, words = sorted(root.rglob("*")), (*given, f"paths.root={root}", "--fork", folder, "--dry-run", "--json")
    dry = in_this_process(capsys, "train", *words, code=0)
    assert sorted(root.rglob("*")) == before, "a dry run writes nothing"
    settings = list(compose_fork(given, f"{folder}@4").overrides)
    assert settings == list(compose_fork(given, folder).overrides), "the same checkpoint is exported once"
    again = in_this_process(capsys, "train", *words, code=0)
    planned, there = (json.loads(done.out) for done in (dry, again))
    for plan in (planned, there):
        plan["disk"] = plan["disk"]["checkpoint_bytes"]  # what is free differs from moment to moment
    assert planned == there
    config = load_config(settings)
    assert config.tags["forked_from"] == f"{run.layout.run_dir.name}@step-000004"
    start, known = (
        load_file(folder / "model.safetensors") for folder in (Path(config.model.path), run.layout.exported_model)
    )
    assert all(start[name].equal(known[name]) for name in known)
    (tmp_path / "of@us").symlink_to(folder)
    assert settings == list(compose_fork(given, str(tmp_path / "of@us")).overrides)
    assert settings == list(compose_fork(given, str(tmp_path / "of@us@4")).overrides)
    fork = prepare(tmp_path, *settings[1:])
    with session_of(fork) as session:
        assert session.train(1)["step"] == 1
    assert fork.layout.run_dir.name != run.layout.run_dir.name
    with pytest.raises(CheckpointError, match=r"no checkpoint '9'; there are: step-000001"):
        compose_fork(given, f"{folder}@9")
    with pytest.raises(DataError, match="absent: is neither the folder nor the id of a run"):
        compose_fork(given, "absent")


def test_a_run_of_a_hub_model_is_exported_forked_and_evaluated(run, tmp_path, monkeypatch):
    cache_of(run.model_directory, tmp_path / "hf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    root = tmp_path / "root"
    shutil.copytree(run.config.paths.root, root, ignore=shutil.ignore_patterns("fork-*"))
    (folder,) = (root / "runs").iterdir()
    record = json.loads((folder / "run.json").read_text())
    settings = record["settings"]
    settings["paths"]["root"] = str(root)
    settings["model"]["path"], settings["warm_start"]["enabled"] = HUB_ID, False
    (folder / "run.json").write_text(json.dumps(record))
    config, layout = find_run([str(folder)], None)
    exported = load_file(export_to(config, layout, "last", tmp_path / "out") / "model.safetensors")
    known = load_file(run.layout.exported_model / "model.safetensors")
    assert all(exported[name].equal(known[name]) for name in known)
    given = ["experiment=debug", "tracking.enabled=false", f"paths.root={root}"]
    start = compose_fork(given, f"{folder}@start").config.model.path
    planned = compose_fork(given, str(folder), dry_run=True).planning_config
    assert start == planned.model.path == HUB_ID
    evaluated = evaluation_settings(f"{folder}@start", ["countdown"], [], None)
    assert evaluated.model.path == HUB_ID
    monkeypatch.chdir(tmp_path)
    assert evaluation_settings(f"{folder}@start", ["countdown"], [], None).run_id == evaluated.run_id
    assert evaluation_settings(f"{folder}@best", ["countdown"], [], None).run_id != evaluated.run_id
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ModelError, match=f"model.path: {HUB_ID} is not a directory here, it is not in the hub's cache"):
        compose_fork(given, f"{folder}@start")


def test_broken_ones_are_named_and_the_rest_is_pruned(run, capsys):
    """This test is the last in the file, because it damages the run."""
    folder = str(run.layout.run_dir)
    record = json.loads(run.layout.run_json.read_text())
    settings = record["settings"]
    settings["checkpoint"] |= {"keep_last": 1, "keep_best": 0}
    run.layout.run_json.write_text(json.dumps(record))
    flip(next((run.layout.checkpoints / "step-000002" / "policy").glob("*.safetensors")), 500)
    done = in_this_process(capsys, "checkpoints", folder, "--verify", code=1)
    assert "1 of 4 checkpoints are broken" in done.err
    assert "step-000002/policy/rank-00000-of-00001-0000.safetensors: hash must be" in done.err
    with RunLock(run.layout.run_dir):
        assert "is in use by process" in in_this_process(capsys, "checkpoints", folder, "--prune", code=1).err
    pruned = in_this_process(capsys, "checkpoints", folder, "--prune", "--json", code=0)
    assert json.loads(pruned.out)["deleted"] == ["step-000001", "step-000002", "step-000003"]
    in_this_process(capsys, "checkpoints", "absent", code=2)
