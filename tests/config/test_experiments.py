"""Every file in conf/ composes, and says what it is meant to say."""

import pytest
import yaml
from omegaconf import OmegaConf

from rlcore.config import RunConfig
from rlcore.config.compose import CONF_DIR, GROUPS, experiment_names, group_members, load_config
from rlcore.config.data import TASKS
from rlcore.config.documents import to_yaml


@pytest.mark.parametrize("name", experiment_names())
def test_each_experiment_composes_under_its_own_name(name):
    config = load_config([], experiment=name)
    assert config.name == name
    assert RunConfig.model_validate_json(config.model_dump_json(), strict=True) == config


@pytest.mark.parametrize("name", experiment_names())
def test_first_line_of_an_experiment_is_the_command_that_runs_it(name):
    first = (CONF_DIR / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# millrace run experiment={name}"


@pytest.mark.parametrize("load", [yaml.safe_load, lambda text: OmegaConf.to_container(OmegaConf.create(text))])
def test_settings_as_yaml_read_back_as_the_same(load):
    """Both YAML readers agree on every value: 1e-06 is a number and "off" no boolean."""
    config = load_config([], experiment="verl_gsm8k_grpo")
    assert RunConfig.model_validate(load(to_yaml(config))) == config


def test_every_member_of_every_group_composes():
    needs = {
        ("critic", "default"): ["algo=ppo"],
        ("data", "mixture"): ["data.parts=[{data:{task:countdown}},{data:{task:custom}}]"],
        ("data", "parquet"): ["data.train_file=README.md", "data.validation_file=README.md"],
        ("model", "scratch"): ["experiment=debug"],
    }
    for group in GROUPS:
        assert GROUPS[group] in group_members(group)
        for member in group_members(group):
            overrides = ["reward.num_processes=1", *needs.get((group, member), [])]
            overrides += ["model.path=some/model"] if group != "model" else []
            load_config([*overrides, f"{group}={member}"])


def test_every_task_is_a_member_of_data():
    assert set(group_members("data")) >= TASKS.keys()


def test_without_files_the_defaults_of_the_classes_hold():
    """A default lives once: conf/ changes nothing where nothing is chosen."""
    assert load_config(["model.path=some/model"]) == RunConfig.model_validate({"model": {"path": "some/model"}})


def test_tinyzero_settings():
    config = load_config([], experiment="tinyzero_ppo")
    assert config.model.path == "Qwen/Qwen2.5-0.5B"
    assert (config.data.task, config.data.train_size, config.data.validation_size) == ("countdown", 327_680, 1_024)
    assert (config.data.min_numbers, config.data.max_numbers) == (3, 4)
    assert (config.trainer.batch_size, config.trainer.mini_batch_size) == (256, 128)
    assert (config.filter.max_prompt_tokens, config.rollout.max_response_tokens) == (256, 1_024)
    assert (config.rollout.samples_per_prompt, config.rollout.sampling.temperature, config.rollout.sampling.top_p) == (
        1,
        1,
        1,
    )
    assert (config.rollout.memory_share, config.rollout.enforce_eager, config.rollout.tensor_parallel_size) == (
        0.4,
        True,
        1,
    )
    assert config.critic is not None
    assert (config.optim.lr, config.critic.optim.lr, config.critic.warmup_steps) == (1e-6, 1e-5, 0)
    assert (config.optim.grad_clip, config.trainer.epochs_per_batch) == (1.0, 1)
    kl = config.algo.kl
    assert (kl.where, kl.estimator, kl.coef, kl.adaptive) == ("reward", "k1", 0.001, False)
    assert (config.algo.advantage, config.algo.gamma, config.algo.lam) == ("gae", 1, 1)
    assert (config.algo.value_clip, config.algo.entropy_coef) == (0.5, 0.001)
    assert (config.algo.clip_low, config.algo.clip_high) == (0.2, 0.2)
    assert config.trainer.total_steps == 15 * 327_680 // 256
    assert (config.trainer.steps_per_chunk, config.validation.every_steps) == (100, 100)


def test_verl_settings():
    config = load_config([], experiment="verl_gsm8k_grpo")
    assert config.model.path == "meta-llama/Llama-3.2-1B-Instruct"
    assert config.data.task == "gsm8k"
    assert (config.algo.advantage, config.rollout.samples_per_prompt, config.critic) == ("grpo", 5, None)
    assert (config.trainer.batch_size, config.trainer.mini_batch_size) == (1_024, 256)
    assert (config.filter.max_prompt_tokens, config.rollout.max_response_tokens) == (512, 1_024)
    assert config.optim.lr == 1e-6
    kl = config.algo.kl
    assert (kl.where, kl.estimator, kl.coef, kl.offload) == ("loss", "low_var_kl", 0.001, False)
    assert config.algo.entropy_coef == 0
    assert (config.trainer.old_logprobs, config.algo.importance.mode) == ("auto", "off")
    assert (config.rollout.engine, config.rollout.tensor_parallel_size) == ("vllm", 1)
    assert config.trainer.total_steps == 15 * (7_473 // 1_024)
    assert (config.trainer.steps_per_chunk, config.validation.every_steps) == (20, 5)
    assert (config.runtime.backend, config.runtime.num_workers) == ("ray", 8)
