"""A run's inputs by name and in its record; the settings of a warm start."""

import hashlib
from pathlib import Path

import pytest

from rlcore.config import ModelConfig, PathsConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.config.data import CountdownData, MixtureData
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_SHA256
from rlcore.errors import DataError, ModelError
from rlcore.run import initial_policy
from rlcore.run.initial_policy import (
    has_configured_model,
    planned_initial_policy,
    planned_tokenizer,
    require_smollm2,
    require_whole_model,
    stage_layout,
    stage_settings,
)
from rlcore.run.layout import RunInputs, RunLayout, configured_model
from rlcore.tracking.lineage import Origin, Stage
from tests.helpers.published import publish


def test_inputs_round_trip(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, tmp_path / "run")
    for inputs in (
        RunInputs(Path("f"), Path("t")),
        RunInputs(Path("f"), Path("t"), Path("d"), Path("o"), {"a": Path("a"), "suite b": Path("b")}),
    ):
        inputs.write(RunConfig(), layout)
        assert RunInputs.read(layout) == inputs


def test_record_without_inputs_is_refused(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, tmp_path)
    for stages in (None, (), (Stage("filtered", "f", "f"),)):
        if stages is not None:
            Origin(RunConfig(), stages=stages).write(tmp_path)
        with pytest.raises(DataError, match=r"run\.json: has no inputs of the run; start it by `millrace run` or"):
            RunInputs.read(layout)


def test_files_of_a_mixture_and_a_suite(tmp_path: Path) -> None:
    mixture = publish(tmp_path / "mixture", parts=["a", "b"])
    inputs = RunInputs(mixture, Path("t"), Path("d"), Path("o"), {"s": tmp_path / "s"})
    parts = (tmp_path / "a", tmp_path / "b")
    assert inputs.parts == parts
    assert inputs.train_parquets == tuple(part / "train.parquet" for part in parts)
    assert inputs.validation_parquets == tuple(part / "validation.parquet" for part in parts)
    for part in parts:
        assert not inputs.has_training_rows
        part.mkdir()
        (part / "train.parquet").touch()
    assert inputs.has_training_rows
    of_suite = inputs.for_suite("s")
    assert (of_suite.filtered_directory, of_suite.demonstrations_directory) == (tmp_path / "s", None)
    assert (of_suite.tokenizer_directory, of_suite.dataset_directory) == (Path("t"), Path("d"))
    with pytest.raises(DataError, match=r"^validation\.suites: the rows of x are not made; start the run again"):
        inputs.for_suite("x")


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
    ("words", "prompt", "response"),
    [
        (["warm_start.stop_at_reward=null", "warm_start.max_tokens=50"], 32, 18),
        (["warm_start.stop_at_reward=null", "warm_start.max_tokens=20"], 32, 1),
        (["warm_start.stop_at_reward=0.5", "warm_start.max_tokens=50"], 32, 8),
    ],
)
def test_warm_start_lengths(words: list[str], prompt: int, response: int) -> None:
    stage = stage_settings(load_config(["experiment=debug", *LENGTHS, *words]))
    assert (stage.filter.max_prompt_tokens, stage.rollout.max_response_tokens) == (prompt, response)
    samples = "null" not in words[0]
    assert (stage.rollout.engine, stage.rollout.samples_per_prompt) == ("hf" if samples else "none", 1)


def test_separate_demonstrations_may_be_longer_than_prompts() -> None:
    config = load_config(["experiment=debug", *LENGTHS, "warm_start.stop_at_reward=0.5", "warm_start.max_tokens=50"])
    for max_tokens, prompt in ((50, 42), (40, 32), (41, 33)):
        warm = config.warm_start.model_copy(update={"demonstrations": "rows.jsonl", "max_tokens": max_tokens})
        stage = stage_settings(config.model_copy(update={"warm_start": warm}))
        assert stage.filter.max_prompt_tokens == prompt
        assert stage.warm_start.demonstrations is None


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
