"""The card of an export and its upload, with the real client against a hub on this machine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flows.work.weights import export_to, push, write_card
from rlcore.errors import CheckpointError
from rlcore.report.record import read_run
from tests.flows.conftest import Millrace, ended, in_this_process
from tests.helpers.hub_server import Hub, Repository, serving, use_hub
from tests.helpers.sessions import run_to_the_end
from tests.helpers.small_run import SmallRun, prepare

CLOSED_PORT = 9  # no server listens there
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
SUITE = (
    "name: held\ndata: {task: countdown, template: bare, train_size: 1, validation_size: 5, min_numbers: 3, "
    "max_numbers: 3, number_high: 20, target_high: 40}\nsamples_per_problem: 2\n"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    root = tmp_path_factory.mktemp("artifacts")
    (root / "held.yaml").write_text(SUITE)
    words = (f"validation.suites=[{root}/held.yaml]", "validation.every_steps=1", "tracking.enabled=false")
    made = prepare(root, "trainer.total_steps=2", *words)
    run_to_the_end(made)
    return made


@pytest.fixture
def hub() -> Iterator[Hub]:
    taken = Repository({"1" * 40: {".gitattributes": b"", "model.safetensors": b"theirs"}}, {"main": "1" * 40})
    empty = Repository({"2" * 40: {".gitattributes": b""}}, {"main": "2" * 40})
    with serving({"me/taken": taken, "me/empty": empty}) as server:
        server.writers[TOKEN] = "me"
        yield server


def test_push_uploads_a_private_model_with_its_card(run, hub, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    environment = {
        "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
    }  # fmt: skip
    words = ("checkpoints", str(run.layout.run_dir), "--export", str(folder), "--push", "me/small")
    done = ended(Millrace(Path(run.config.paths.root), environment).start(*words, spawned=True), 0)
    assert f"pushed to {hub.endpoint}/me/small, private" in done.out
    assert [(one["name"], one["visibility"]) for one in hub.created] == [("small", "private")]
    repository = hub.repositories["me/small"]
    files = repository.commits[repository.refs["main"]]
    assert files.keys() >= {"README.md", "model.safetensors", "config.json", "tokenizer.json"}
    assert "manifest.json" not in files
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert len(repository.commits) == 2, "one commit after the empty one"
    use_hub(monkeypatch, tmp_path, hub.port)
    model = AutoModelForCausalLM.from_pretrained("me/small")
    known = load_file(run.layout.exported_model / "model.safetensors")
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in known.items())
    text = files["README.md"].decode()
    assert not [word for word in (TOKEN, str(tmp_path), run.config.paths.root) if word in text]
    assert TOKEN not in done.out + done.err
    assert TOKEN not in "".join(file.read_text() for file in run.layout.run_dir.glob("*.json*"))


def test_card_has_the_scores_of_the_step_and_the_origin(run, tmp_path):
    export_to(run.config, run.layout, "1", tmp_path / "model")
    write_card(run.layout, tmp_path / "model", "me/small", tmp_path)
    card = ModelCard.load(tmp_path / "model" / "README.md")
    record = read_run(run.layout.run_dir)
    expected = record.validations["step-000001"]
    found = {(one.dataset_name, one.metric_type): one for one in card.data.eval_results}
    assert {name for name, _ in found} == {"countdown"}, "the suite was evaluated at the end only"
    assert found.keys() == {("countdown", name) for name in expected.intervals}
    for name, interval in expected.intervals.items():
        one = found["countdown", name]
        assert one.metric_value == pytest.approx(interval.value, abs=1e-6)
        assert (one.metric_args["low"], one.metric_args["high"]) == (interval.low, interval.high)
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.get("base_model") is None
    for text in (f"`{record.run_id}`", "| step | 1 of 2 |", "A randomly initialized model", "trainer.total_steps: 2"):
        assert text in card.text
    export_to(run.config, run.layout, "last", tmp_path / "last")
    write_card(run.layout, tmp_path / "last", "last", tmp_path)
    sets = {one.dataset_name for one in ModelCard.load(tmp_path / "last" / "README.md").data.eval_results}
    assert sets == {"countdown", "held"}


def test_card_has_evaluations_of_the_checkpoint(run, tmp_path, capsys):
    folder, suite = str(run.layout.run_dir), f"{run.config.paths.root}/held.yaml"
    done = in_this_process(capsys, "eval", f"{folder}@1", "--suite", suite, "--json")
    assert done.code == 0, done.err
    (evaluated,) = json.loads(done.out)["evaluations"]
    done = in_this_process(capsys, "checkpoints", folder, "--export", str(tmp_path / "model"), "--checkpoint", "1")
    assert done.code == 0, done.err
    card = ModelCard.load(tmp_path / "model" / "README.md")
    found = {one.metric_type: one.metric_value for one in card.data.eval_results if one.dataset_name == "held"}
    figures = evaluated["suites"]["held"]["figures"]
    assert found == {name: pytest.approx(one["value"], abs=1e-6) for name, one in figures.items()}


@pytest.fixture
def exported(run: SmallRun, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_hub(monkeypatch, tmp_path, hub.port)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shutil.copytree(run.layout.exported_model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("repository", "token", "message"),
    [
        ("you/small", TOKEN, r"--push you/small: the hub must accept the upload.*403.*the token's right to write"),
        ("me/small", "hf_wrong", r"--push me/small: the hub must accept the upload.*401"),
        ("me/taken", TOKEN, r"--push me/taken: must be a new repository, and this one has files"),
    ],
)
def test_refused_upload_is_one_error_and_the_folder_stays(hub, exported, monkeypatch, repository, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    before = sorted(exported.iterdir())
    with pytest.raises(CheckpointError, match=message) as caught:
        push(exported, repository, private=True)
    assert f"{exported} stays" in str(caught.value)
    assert token not in str(caught.value)
    assert sorted(exported.iterdir()) == before
    assert hub.repositories["me/taken"].refs == {"main": "1" * 40}


def test_missing_network_is_one_error(exported, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{CLOSED_PORT}")
    for is_offline, why in ((False, r"\(ConnectError: .*refused\). .*the network"), (True, "OfflineModeIsEnabled")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        with pytest.raises(CheckpointError, match=rf"--push me/small: .*{why}"):
            push(exported, "me/small", private=True)
    assert (exported / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own call
def test_interrupted_upload_is_repeated_into_its_empty_repository(hub, exported):
    assert push(exported, "me/empty", private=False) == f"{hub.endpoint}/me/empty"
    repository = hub.repositories["me/empty"]
    assert "model.safetensors" in repository.commits[repository.refs["main"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["--export", "model", "--push", name], "--push: must be OWNER/NAME")
          for name in ("small", "me/", "me/../../small", "me/a b", "https://hub/me/small")),
        (["--export", "model", "--push", "me/small"], "--push me/small: needs a token that may write; got none."),
        (["--push", "me/small"], "add --"),
        (["--public"], "add --"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_the_export(run, tmp_path, monkeypatch, capsys, words, message):
    use_hub(monkeypatch, tmp_path, CLOSED_PORT)
    monkeypatch.chdir(tmp_path)
    done = in_this_process(capsys, "checkpoints", str(run.layout.run_dir), *words)
    assert (done.code, message in done.err, len(done.err.strip().splitlines())) == (2, True, 1), done
    assert not (tmp_path / "model").exists()
