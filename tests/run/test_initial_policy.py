"""The model of step 0 and its tokenizer by name, and the settings of a warm start."""

import hashlib
from pathlib import Path
from types import MappingProxyType

import pytest

from rlcore.config import ModelConfig, PathsConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.config.data import CountdownData, MixtureData
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_SHA256
from rlcore.errors import ModelError
from rlcore.run import initial_policy
from rlcore.run.initial_policy import (
    REFERENCE,
    InitialPolicy,
    has_configured_model,
    known_initial_policy,
    planned_initial_policy,
    planned_tokenizer,
    remove_leftovers,
    require_smollm2,
    require_whole_model,
    stage_layout,
    stage_settings,
)
from rlcore.run.layout import RunInputs, RunLayout, configured_model
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import Manifest
from tests.helpers.published import publish


def manifest(**values: object) -> Manifest:
    return Manifest(MappingProxyType(values), ())


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"reward": 0.25, "held_out_loss": 1.23456, "loss": 9}, "reward 0.250, held-out-loss 1.235 after 7 steps"),
        ({"held_out_loss": 2, "accuracy": 0.5, "reward": None}, "held-out-loss 2.000 after 7 steps"),
    ],
)
def test_text_shows_reward_and_held_out_loss(values: dict[str, object], shown: str) -> None:
    for cached, skipped in ((True, ", skipped: done before"), (False, "")):
        found = InitialPolicy.of(Path("m"), manifest(steps=7, kind="model", **values), cached=cached)
        assert str(found) == f"{shown}{skipped} (m)"
        assert found.figures == {name: value for name, value in values.items() if value is not None}


def test_configured_and_built_policies_are_known(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    inputs = RunInputs(tmp_path / "f", tmp_path / "t")
    given = known_initial_policy(of_model(tmp_path, tmp_path / "given", warm=False), inputs)
    assert given == InitialPolicy(tmp_path / "given", cached=True)
    assert str(given) == f"no supervised steps: training starts from {tmp_path}/given"
    for warm in (False, True):
        config = of_model(tmp_path, None, warm=warm)
        assert known_initial_policy(config, inputs) is None
        planned = planned_initial_policy(config, inputs.filtered_directory)
        publish(planned, fingerprint=planned.name, steps=7, loss=0.5)
        assert known_initial_policy(config, inputs) == InitialPolicy(planned, True, 7, {"loss": 0.5})


def test_leftovers_of_a_warm_start_are_removed(tmp_path: Path) -> None:
    config, inputs = of_model(tmp_path, None, warm=True), RunInputs(tmp_path / "f", tmp_path / "t")
    stage = stage_layout(config, inputs.filtered_directory)
    for folder in (stage.checkpoints, stage.run_dir / REFERENCE):
        folder.mkdir(parents=True)
        (folder / "file").touch()
        remove_leftovers(config, inputs)
        assert folder.is_dir()
    stage.journal.touch()
    publish(planned_initial_policy(config, inputs.filtered_directory), steps=7)
    with RunLock(stage.run_dir):
        remove_leftovers(config, inputs)
        assert stage.checkpoints.is_dir(), "it is in use"
    remove_leftovers(config, inputs)
    assert sorted(path.name for path in stage.run_dir.iterdir()) == ["metrics.jsonl", "run.lock"]
    (stage.run_dir / REFERENCE).mkdir()  # a kill between the two removals
    remove_leftovers(config, inputs)
    assert sorted(path.name for path in stage.run_dir.iterdir()) == ["metrics.jsonl", "run.lock"]


def test_smollm2_folder_is_named_by_its_digest(tmp_path: Path) -> None:
    config = of_model(tmp_path, SMOLLM2)
    folder = tmp_path / "models" / f"smollm2-{SMOLLM2_SHA256[:16]}"
    assert (configured_model(config), planned_tokenizer(config)) == (folder, folder)
    assert not has_configured_model(config)


def of_model(root: Path, path: Path | str | None, *, max_integer: int | None = None, warm: bool = False) -> RunConfig:
    config = RunConfig(model=ModelConfig(path=None if path is None else str(path)), paths=PathsConfig(root=str(root)))
    warm_start = config.warm_start.model_copy(update={"enabled": warm})
    model = config.model
    if max_integer is not None:
        model = model.model_copy(update={"scratch": model.scratch.model_copy(update={"max_integer": max_integer})})
    return config.model_copy(update={"warm_start": warm_start, "model": model})


def test_planned_folder_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "model", "~/model"):
        config = of_model(tmp_path, path)
        assert configured_model(config) == planned_tokenizer(config) == tmp_path / "model"
    configs = [of_model(tmp_path, path) for path in ("owner/a", "owner/b", None)]
    names = [planned_tokenizer(config) for config in [*configs, of_model(tmp_path, None, max_integer=7)]]
    assert len(set(names)) == 4
    assert {name.parent for name in names} == {tmp_path / "tokenizers"}


def test_configured_model_needs_no_stage(tmp_path: Path) -> None:
    filtered = Path("filtered/0123")
    for path, warm, given in (("owner/a", False, True), ("owner/a", True, False), (None, False, False)):
        config = of_model(tmp_path, path, warm=warm)
        assert has_configured_model(config) == given
        planned = planned_initial_policy(config, filtered)
        assert planned == (Path("owner/a") if given else tmp_path / "models" / planned.name)
        stage = stage_layout(config, filtered)
        assert stage == RunLayout(tmp_path, tmp_path / "warm-starts" / f"warm-start-{planned.name}")
    assert require_whole_model("model.path", None) is None
    assert require_whole_model("model.path", str(tmp_path)) is None


@pytest.mark.parametrize(
    ("words", "num_rows", "steps"),
    [
        ([], 512, 40),
        (["warm_start.epochs=1.5"], 512, 12),
        (["warm_start.epochs=1.5"], 513, 13),
        (["warm_start.epochs=1.5"], None, 40),
        (["warm_start.epochs=100"], 512, 40),
    ],
)
def test_warm_start_steps_by_epochs(words: list[str], num_rows: int | None, steps: int) -> None:
    config = load_config(["experiment=debug", "warm_start.max_steps=40", "warm_start.batch_size=64", *words])
    trainer = stage_settings(config, num_rows).trainer
    assert (trainer.total_steps, trainer.batch_size, trainer.mini_batch_size, trainer.epochs_per_batch) == (
        steps, 64, 64, 1,
    )  # fmt: skip
    assert trainer.steps_per_chunk == config.warm_start.steps_per_chunk


LENGTHS = ("filter.max_prompt_tokens=32", "rollout.max_response_tokens=8")


@pytest.mark.parametrize(
    ("reward", "max_tokens", "file", "prompt", "response"),
    [
        (None, 50, None, 32, 18),
        (None, 20, None, 32, 1),
        (0.5, 50, None, 32, 8),
        (0.5, 50, "rows.jsonl", 42, 8),
        (0.5, 40, "rows.jsonl", 32, 8),
        (0.5, 41, "rows.jsonl", 33, 8),
    ],
)
def test_warm_start_lengths(
    reward: float | None, max_tokens: int, file: str | None, prompt: int, response: int
) -> None:
    """Separate demonstrations may be longer than the run's prompts."""
    config = load_config(["experiment=debug", *LENGTHS])
    warm = {"stop_at_reward": reward, "max_tokens": max_tokens, "demonstrations": file}
    stage = stage_settings(config.model_copy(update={"warm_start": config.warm_start.model_copy(update=warm)}))
    assert (stage.filter.max_prompt_tokens, stage.rollout.max_response_tokens) == (prompt, response)
    assert stage.rollout.engine == ("none" if reward is None else "hf")
    assert (stage.rollout.samples_per_prompt, stage.warm_start.demonstrations) == (1, None)


@pytest.mark.parametrize(
    ("workers", "address", "backend"), [(1, None, "local"), (2, None, "ray"), (1, "head:6379", "ray")]
)
def test_single_rank_warm_start_needs_no_cluster(workers: int, address: str | None, backend: str) -> None:
    config = load_config(["experiment=debug", "runtime=ray"])
    runtime = config.runtime.model_copy(update={"num_workers": workers, "ray_address": address})
    stage = stage_settings(config.model_copy(update={"runtime": runtime}))
    assert stage.runtime.backend == backend
    assert (stage.name, stage.checkpoint.keep_best, stage.checkpoint.keep_every_steps) == ("warm-start", 1, 0)
    assert (stage.tracking.log_best, stage.tracking.registered_model) == (False, None)
    assert (stage.model.lora, stage.model.share_prompts) == (None, False)


def test_scorer_counts_only_in_a_sampling_warm_start() -> None:
    part = "{task: countdown, template: bare, number_high: 20, target_high: 40, scorer: 'a.b:c'}"
    parts = f"data.parts=[{{name: a, weight: 3, data: {part}}},{{name: b, weight: 0.5, data: {part}}}]"
    config = load_config(["experiment=debug", "data=mixture", parts, "warm_start.stop_at_reward=0.5"])
    plain = config.warm_start.model_copy(update={"stop_at_reward": None})
    default = type(config.data).model_fields["scorer"].default
    of_part = CountdownData.model_fields["scorer"].default
    for stage, scorer in (
        (stage_settings(config), "a.b:c"),
        (stage_settings(config.model_copy(update={"warm_start": plain})), of_part),
    ):
        assert isinstance(stage.data, MixtureData)
        assert [entry.weight for entry in stage.data.parts] == [1.0, 1.0], "all demonstrations are shown"
        assert [entry.data.scorer for entry in stage.data.parts] == [scorer, scorer]
        assert [entry.name for entry in stage.data.parts] == ["a", "b"]
        assert (stage.data.scorer, stage.data.environment) == (default, "")


@pytest.mark.parametrize(("has_file", "has_reader"), [(True, True), (True, False), (False, True)])
def test_smollm2_needs_its_package_and_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool, has_reader: bool
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(initial_policy, "smollm2_file", lambda: file if has_file else None)
    with pytest.raises(ModelError) as caught:
        require_smollm2(tmp_path / "folder", lambda name: has_reader)
    rule = f"{file} must have the sha256 {SMOLLM2_SHA256[:16]}...; got {hashlib.sha256(b'GGUF').hexdigest()[:16]}...."
    if not (has_file and has_reader):
        what = "the package gguf, with which it is read, is" if has_file else "it is"
        rule = f"must be on this machine; got {SMOLLM2}, and {what} not installed."
    assert str(caught.value) == f"model.path: {rule} {INSTALL_SMOLLM2}"
    (tmp_path / "folder").mkdir()
    require_smollm2(tmp_path / "folder", lambda name: has_reader)
