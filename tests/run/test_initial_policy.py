"""The model of step 0 and its tokenizer: names, fingerprints, damaged inputs, and the settings of a warm start."""

import shutil
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import pytest

from rlcore.config import ModelConfig, PathsConfig, RunConfig
from rlcore.config.base import leaves
from rlcore.config.compose import load_config
from rlcore.config.data import CountdownData, MixtureData
from rlcore.config.fingerprint import fingerprint, settings_fingerprint
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_SHA256
from rlcore.config.run import all_keys
from rlcore.errors import ConfigError, ModelError
from rlcore.run import initial_policy as policy
from rlcore.run.layout import RunInputs, RunLayout, configured_model, suite_fingerprint
from rlcore.run.pass_rates import planned_pass_rates
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import Manifest
from tests.helpers.published import edit_manifest, flip, publish
from tests.helpers.settings import changed
from tests.helpers.small_run import SmallRun
from tests.helpers.small_run import make as prepare


@pytest.mark.parametrize(("values", "shown"), [
    ({"reward": 0.25, "held_out_loss": 1.23456, "loss": 9}, "reward 0.250, held-out-loss 1.235 after 7 steps"),
    ({"held_out_loss": 2, "accuracy": 0.5, "reward": None}, "held-out-loss 2.000 after 7 steps"),
])  # fmt: skip
def test_text_shows_reward_and_held_out_loss(values: dict[str, object], shown: str) -> None:
    for cached, skipped in ((True, ", skipped: done before"), (False, "")):
        manifest = Manifest(MappingProxyType({"steps": 7, "kind": "model", **values}), ())
        found = policy.InitialPolicy.of(Path("m"), manifest, cached=cached)
        assert str(found) == f"{shown}{skipped} (m)"
        assert found.figures == {name: value for name, value in values.items() if value is not None}


def test_configured_and_built_policies_are_known(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    inputs = RunInputs(tmp_path / "f", tmp_path / "t")
    given = policy.known_initial_policy(of_model(tmp_path, tmp_path / "given", warm=False), inputs)
    assert given == policy.InitialPolicy(tmp_path / "given", cached=True)
    assert str(given) == f"no supervised steps: training starts from {tmp_path}/given"
    for warm in (False, True):
        config = of_model(tmp_path, None, warm=warm)
        assert policy.known_initial_policy(config, inputs) is None
        planned = policy.planned_initial_policy(config, inputs.filtered_directory)
        publish(planned, fingerprint=planned.name, steps=7, loss=0.5)
        assert policy.known_initial_policy(config, inputs) == policy.InitialPolicy(planned, True, 7, {"loss": 0.5})


def test_leftovers_of_a_warm_start_are_removed(tmp_path: Path) -> None:
    config, inputs = of_model(tmp_path, None, warm=True), RunInputs(tmp_path / "f", tmp_path / "t")
    stage = policy.stage_layout(config, inputs.filtered_directory)
    for folder in (stage.checkpoints, stage.run_dir / policy.REFERENCE):
        folder.mkdir(parents=True)
        (folder / "file").touch()
        policy.remove_leftovers(config, inputs)
        assert folder.is_dir()
    stage.journal.touch()
    publish(policy.planned_initial_policy(config, inputs.filtered_directory), steps=7)
    with RunLock(stage.run_dir):
        policy.remove_leftovers(config, inputs)
        assert stage.checkpoints.is_dir(), "it is in use"
    for _ in range(2):
        policy.remove_leftovers(config, inputs)
        assert sorted(path.name for path in stage.run_dir.iterdir()) == ["metrics.jsonl", "run.lock"]
        (stage.run_dir / policy.REFERENCE).mkdir()  # a kill between the two removals


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
    of_smollm2 = tmp_path / "models" / f"smollm2-{SMOLLM2_SHA256[:16]}"
    for path, folder in (
        (tmp_path / "model", tmp_path / "model"),
        ("~/model", tmp_path / "model"),
        (SMOLLM2, of_smollm2),
    ):
        config = of_model(tmp_path, path)
        assert configured_model(config) == policy.planned_tokenizer(config) == folder
    configs = [of_model(tmp_path, path) for path in ("owner/a", "owner/b", None)]
    names = [policy.planned_tokenizer(config) for config in [*configs, of_model(tmp_path, None, max_integer=7)]]
    assert len(set(names)) == 4
    assert {name.parent for name in names} == {tmp_path / "tokenizers"}


def test_configured_model_needs_no_stage(tmp_path: Path) -> None:
    filtered = Path("filtered/0123")
    assert not policy.has_configured_model(of_model(tmp_path, SMOLLM2))
    for path, warm, given in (("owner/a", False, True), ("owner/a", True, False), (None, False, False)):
        config = of_model(tmp_path, path, warm=warm)
        assert policy.has_configured_model(config) == given
        planned = policy.planned_initial_policy(config, filtered)
        assert planned == (Path("owner/a") if given else tmp_path / "models" / planned.name)
        stage = policy.stage_layout(config, filtered)
        assert stage == RunLayout(tmp_path, tmp_path / "warm-starts" / f"warm-start-{planned.name}")
    assert policy.require_whole_model("model.path", None) is None
    assert policy.require_whole_model("model.path", str(tmp_path)) is None


@pytest.mark.parametrize(("words", "num_rows", "steps"), [
    ([], 512, 40),
    (["warm_start.epochs=1.5"], 512, 12),
    (["warm_start.epochs=1.5"], 513, 13),
    (["warm_start.epochs=1.5"], None, 40),
    (["warm_start.epochs=100"], 512, 40),
])  # fmt: skip
def test_warm_start_steps_by_epochs(words: list[str], num_rows: int | None, steps: int) -> None:
    config = load_config(["experiment=debug", "warm_start.max_steps=40", "warm_start.batch_size=64", *words])
    trainer = policy.stage_settings(config, num_rows).trainer
    assert (trainer.total_steps, trainer.steps_per_chunk) == (steps, config.warm_start.steps_per_chunk)
    assert (trainer.batch_size, trainer.mini_batch_size, trainer.epochs_per_batch) == (64, 64, 1)


@pytest.mark.parametrize(("reward", "max_tokens", "file", "prompt", "response"), [
    (None, 50, None, 32, 18),
    (None, 20, None, 32, 1),
    (0.5, 50, None, 32, 8),
    (0.5, 40, "rows.jsonl", 32, 8),
    (0.5, 41, "rows.jsonl", 33, 8),
])  # fmt: skip
def test_warm_start_lengths(reward, max_tokens, file, prompt, response) -> None:
    """Separate demonstrations may be longer than the run's prompts."""
    words = ["filter.max_prompt_tokens=32", "rollout.max_response_tokens=8", "rollout.sampling.temperature=0.5"]
    config = load_config(["experiment=debug", *words])
    warm = {"stop_at_reward": reward, "max_tokens": max_tokens, "demonstrations": file}
    stage = policy.stage_settings(config.model_copy(update={"warm_start": config.warm_start.model_copy(update=warm)}))
    assert (stage.filter.max_prompt_tokens, stage.rollout.max_response_tokens) == (prompt, response)
    assert (stage.rollout.engine, stage.rollout.sampling.temperature) == (
        ("none", 1.0) if reward is None else ("hf", 0.5)
    )
    assert (stage.rollout.samples_per_prompt, stage.warm_start.demonstrations) == (1, None)


def test_single_rank_warm_start_needs_no_cluster() -> None:
    config = load_config(["experiment=debug", "runtime=ray"])
    for workers, address, backend in ((1, None, "local"), (2, None, "ray"), (1, "head:6379", "ray")):
        runtime = config.runtime.model_copy(update={"num_workers": workers, "ray_address": address})
        stage = policy.stage_settings(config.model_copy(update={"runtime": runtime}))
        assert stage.runtime.backend == backend, (workers, address)
    assert (stage.name, stage.checkpoint.keep_best, stage.checkpoint.keep_every_steps) == ("warm-start", 1, 0)
    assert (stage.tracking.log_best, stage.tracking.registered_model) == (False, None)
    assert (stage.model.lora, stage.model.share_prompts) == (None, False)


def test_scorer_counts_only_in_a_sampling_warm_start() -> None:
    part = "{task: countdown, template: bare, number_high: 20, target_high: 40, scorer: 'a.b:c'}"
    parts = f"data.parts=[{{name: a, weight: 3, data: {part}}},{{name: b, weight: 0.5, data: {part}}}]"
    config = load_config(["experiment=debug", "data=mixture", parts, "warm_start.stop_at_reward=0.5"])
    plain = config.warm_start.model_copy(update={"stop_at_reward": None})
    default, of_part = (data.model_fields["scorer"].default for data in (type(config.data), CountdownData))
    for sampling, scorer in ((config, "a.b:c"), (config.model_copy(update={"warm_start": plain}), of_part)):
        data = policy.stage_settings(sampling).data
        assert isinstance(data, MixtureData)
        facts = [(entry.name, entry.weight, entry.data.scorer) for entry in data.parts]
        assert facts == [("a", 1.0, scorer), ("b", 1.0, scorer)], "all demonstrations are shown"
        assert (data.scorer, data.environment) == (default, "")


@pytest.mark.parametrize(("has_file", "has_reader"), [(True, True), (True, False), (False, True)])
def test_smollm2_needs_its_package_and_reader(tmp_path, monkeypatch, has_file, has_reader) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(policy, "smollm2_file", lambda: file if has_file else None)
    with pytest.raises(ModelError if has_file and has_reader else ConfigError) as caught:
        policy.require_smollm2(tmp_path / "folder", lambda name: has_reader)
    rule = f"{file} must have the sha256 {SMOLLM2_SHA256[:16]}...; got {sha256(b'GGUF').hexdigest()[:16]}...."
    if not (has_file and has_reader):
        what = "the package gguf, with which it is read, is" if has_file else "it is"
        rule = f"must be on this machine; got {SMOLLM2}, and {what} not installed."
    assert str(caught.value) == f"model.path: {rule} {INSTALL_SMOLLM2}"
    (tmp_path / "folder").mkdir()
    policy.require_smollm2(tmp_path / "folder", lambda name: has_reader)


FILTERED = Path("filtered/0123456789abcdef")


def fingerprint_with(*overrides: str, filtered: Path = FILTERED) -> str:
    return policy.initial_policy_fingerprint(load_config(["experiment=debug", *overrides]), filtered)


@pytest.mark.parametrize("override", [
    "reward.weights={correct: 1.0}", "reward.judge.highest=5", "rollout.skip_special_tokens=false", "sandbox.time_s=2",
])  # fmt: skip
def test_fingerprints_of_pass_rates_and_suites_include_scoring(override: str) -> None:
    found, data = [], "{task: countdown, template: bare, number_high: 20, target_high: 40}"
    suite = f"validation.suites=[{{name: s, data: {data}}}]"
    for more in ((), (override,)):
        config = load_config(["experiment=debug", "warm_start.enabled=false", "pass_rates.samples=2", suite, *more])
        of_suite = suite_fingerprint(config, config.validation.suites[0], FILTERED)
        found.append((planned_pass_rates(config, FILTERED).name, of_suite))
    assert all(one != other for one, other in zip(*found, strict=True))


def test_fingerprints_include_code_of_scorers_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    judge = "{url: 'http://127.0.0.1:1/v1', model: m, deadline_s: 1, rules: 'edited:score'}"
    of_judge = ("data.scorer=data.judge:score", f"reward.judge={judge}", "reward.num_processes=1")
    scored, with_tools = set(), set()
    for reward in ("0.5", "1.0"):
        code = f"def score(response, truth):\n    return {reward}\ndef tool() -> float:\n    return {reward}\n"
        (tmp_path / "edited.py").write_text(code)
        scored |= {fingerprint_with("data.scorer=edited:score"), fingerprint_with(*of_judge)}
        for environment in ("rlcore.rollout.tools:Tools", ""):
            suite = {"name": "s", "data": {"task": "countdown", "environment": environment}}
            settings = {"episode": {"tools": ["edited:tool"]}, "validation": {"suites": [suite]}}
            config = RunConfig.model_validate(settings)
            with_tools.add(suite_fingerprint(config, config.validation.suites[0], FILTERED))
    assert len(scored) == 4
    assert len(with_tools) == 3, "without an environment there are no tools"


@pytest.mark.parametrize(
    "overrides", [(), ("warm_start.stop_at_reward=null",)], ids=["a reward ends it", "no reward is sampled"]
)
def test_stages_in_one_folder_have_equal_settings(overrides: tuple[str, ...]) -> None:
    """Each setting is changed. A run with an equal stage name resumes the stage, so its settings must be equal."""
    base = load_config(["experiment=debug", *overrides]).model_dump()
    apart = {"data.task", "warm_start.demonstrations"}  # another dataset, a file that is there
    apart |= set() if overrides else {"data.environment"}  # no reward ends a stage there
    keys = [key for key in leaves(base) if key in all_keys() and key not in apart]

    def stage_of(config: RunConfig) -> tuple[str, str]:
        rows = config.data.model_dump(mode="json", exclude={"scorer", "environment"})
        filtered = Path("filtered") / fingerprint("rows", [rows, config.filter, config.episode.tools])
        settings = settings_fingerprint(policy.stage_settings(config, 512))
        return policy.initial_policy_fingerprint(config, filtered), settings

    name, settings = stage_of(RunConfig.model_validate(base))
    others = {key: stage_of(changed(base, key)) for key in keys}
    assert len(keys) > 100
    assert [key for key, other in others.items() if other[0] == name and other[1] != settings] == []


def test_fingerprint_ignores_unused_settings() -> None:
    assert fingerprint_with(filtered=Path("filtered/fedcba9876543210")) != fingerprint_with()
    unread = ("optim.lr=0.5", "rollout.max_num_seqs=3", "reward.deadline_s=9", "validation.sampling.temperature=0.5")
    assert fingerprint_with(*unread) == fingerprint_with()


def test_another_model_at_the_path_makes_another_policy(tmp_path: Path) -> None:
    names, config = [], RunConfig(model=ModelConfig(path=str(tmp_path)))
    for weights in ("first", "second", "first"):
        (tmp_path / "model.safetensors").write_text(weights)
        names.append(policy.initial_policy_fingerprint(config, FILTERED))
    assert names[0] == names[2] != names[1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return prepare(tmp_path_factory.mktemp("prepared"), "warm_start.max_steps=3")


@pytest.mark.parametrize("file", [
    *("datasets/*/train.parquet", "filtered/*/train.parquet", "filtered/*/validation.parquet"),
    *("tokenizers/*/tokenizer.json", "models/{model}/model.safetensors", "models/{model}/config.json"),
])  # fmt: skip
def test_damaged_input_is_made_again(prepared, tmp_path, caplog, file) -> None:
    shutil.copytree(prepared.config.paths.root, tmp_path / "root")
    (damaged,) = (tmp_path / "root").glob(file.format(model=prepared.model_directory.name))
    whole = damaged.read_bytes()
    flip(damaged)
    again = prepare(tmp_path / "root", "warm_start.max_steps=3")
    assert f"{damaged}: hash must be sha256" in caplog.text
    assert f"kept as {damaged.parent.name}.damaged.1" in caplog.text
    assert damaged.read_bytes() == whole
    assert again.inputs.filtered_directory.name == prepared.inputs.filtered_directory.name
    assert again.model_directory.name == prepared.model_directory.name


def test_damaged_export_is_refused(prepared: SmallRun, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(prepared.model_directory, model)
    edit_manifest(model, fingerprint=model.name)  # as an export, which is called `model`
    config = load_config(["experiment=debug", f"model.path={model}", "warm_start.enabled=false"])
    assert policy.known_initial_policy(config, prepared.inputs).steps == 3
    flip(model / "model.safetensors")
    refused = r"^model\.path: .*model\.safetensors: hash must be.*delete its manifest\.json"
    with pytest.raises(ModelError, match=refused):
        policy.known_initial_policy(config, prepared.inputs)
    (model / "manifest.json").unlink()
    assert policy.known_initial_policy(config, prepared.inputs) == policy.InitialPolicy(model, cached=True)


def test_digests_cover_weights_settings_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("config.json", "model.safetensors", "merges.txt", "README.md", "manifest.json"):
        (tmp_path / name).write_text(name)
    counted = ("config.json", "merges.txt", "model.safetensors")
    digests = {name: sha256(name.encode()).hexdigest() for name in counted}
    assert (policy.digests_in(tmp_path), policy.digests_in(tmp_path / "absent")) == (digests, {})
    for path, expected in (("owner/name", {}), (str(tmp_path), {"model.path": digests})):
        assert policy.model_digests(RunConfig(model=ModelConfig(path=path))) == expected
