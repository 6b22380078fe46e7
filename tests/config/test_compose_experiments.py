"""Every file in conf/ composes, and has its expected settings."""

import pytest
import yaml
from omegaconf import OmegaConf

from rlcore.config import RunConfig
from rlcore.config.base import CONF_DIR, group_members, value_at
from rlcore.config.compose import GROUPS, compose, experiment_names, load_config
from rlcore.config.data import TASKS
from rlcore.config.documents import to_yaml


@pytest.mark.parametrize("name", experiment_names())
def test_experiment_composes_under_its_name(name):
    first = (CONF_DIR / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# millrace run experiment={name}"
    found = compose([], experiment=name).require_valid()
    assert found.unused_settings() == []
    config = found.config
    assert config.name == name
    assert RunConfig.model_validate_json(config.model_dump_json(), strict=True) == config


@pytest.mark.parametrize("load", [yaml.safe_load, lambda text: OmegaConf.to_container(OmegaConf.create(text))])
def test_yaml_round_trip(load):
    """Both YAML readers agree on every value: 1e-06 is a number and "off" no boolean."""
    config = load_config([], experiment="verl_gsm8k_grpo")
    assert RunConfig.model_validate(load(to_yaml(config))) == config


def test_every_member_of_every_group_composes():
    needs = {
        ("critic", "default"): ["algo=ppo"],
        ("data", "mixture"): ["data.parts=[{data:{task:countdown}},{data:{task:custom}}]"],
        ("data", "openenv"): ["episode.server=http://127.0.0.1:8000"],
        ("data", "parquet"): ["data.train_file=README.md", "data.validation_file=README.md"],
        ("data", "verifiers"): ["data.taskset=a:B"],
        ("model", "scratch"): ["experiment=debug"],
    }
    assert set(group_members("data")) >= TASKS.keys()
    for group in GROUPS:
        assert GROUPS[group] in group_members(group)
        for member in group_members(group):
            overrides = ["reward.num_processes=1", *needs.get((group, member), [])]
            overrides += ["model.path=some/model"] if group != "model" else []
            load_config([*overrides, f"{group}={member}"])


def test_defaults_of_classes_hold_without_files():
    """Defaults are only in the classes: conf/ changes nothing unless a file is chosen."""
    assert load_config(["model.path=some/model"]) == RunConfig.model_validate({"model": {"path": "some/model"}})


PUBLISHED = {
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_experiment_has_published_settings(name):
    config = load_config([], experiment=name)
    assert {key: value_at(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]
