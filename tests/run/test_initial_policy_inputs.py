"""Fingerprints of the model of step 0, and damaged inputs."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from rlcore.config import ModelConfig, RunConfig
from rlcore.config.base import leaves
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import fingerprint, settings_fingerprint
from rlcore.config.run import all_keys
from rlcore.errors import ModelError
from rlcore.run import initial_policy as policy
from rlcore.run.layout import suite_fingerprint
from rlcore.run.pass_rates import planned_pass_rates
from tests.helpers.published import edit_manifest, flip
from tests.helpers.settings import changed
from tests.helpers.small_run import SmallRun
from tests.helpers.small_run import make as prepare

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
