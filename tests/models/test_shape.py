"""Counts of parameters against models that are really built."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from benchmarks.shapes import SHAPES
from flows.plan.checks import check_before_plan
from rlcore.config import LoraConfig, ModelConfig, RunConfig, ScratchModel
from rlcore.config.model import PUBLISHED
from rlcore.errors import ModelError
from rlcore.models.load import load_policy, load_value_model
from rlcore.models.lora import add_adapters
from rlcore.models.scratch import build_scratch_model
from rlcore.models.shape import (
    ModelShape,
    has_experts,
    require_embeddings,
    require_same_tokens,
    require_trainable,
    shape_of,
    token_counts,
)
from rlcore.models.tokenizer import build_scratch_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, head_dim=24, tie_word_embeddings=False),
}


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_policy_has_as_many_parameters_as_its_config_says(name: str) -> None:
    config = CONFIGS[name]
    shape = ModelShape.of_config(json.loads(config.to_json_string(use_diff=False)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.policy_parameters == num_parameters(model)
    assert shape.layer_parameters == num_parameters(model.model.layers[0])


def test_policy_critic_and_adapters_of_a_model_from_nothing(tmp_path: Path) -> None:
    scratch = ScratchModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)
    build_scratch_tokenizer(scratch, tmp_path)
    build_scratch_model(scratch, vocab_size=113, eos_token_id=1, pad_token_id=0, seed=1, directory=tmp_path)
    cpu = torch.device("cpu")
    from_settings, from_file = shape_of(ModelConfig(scratch=scratch)), shape_of(ModelConfig(path=str(tmp_path)))
    assert from_settings == from_file
    assert from_settings is not None
    policy = load_policy(tmp_path, model=ModelConfig(), device=cpu)
    critic = load_value_model(tmp_path, model=ModelConfig(), device=cpu)
    assert from_settings.policy_parameters == num_parameters(policy)
    assert from_settings.critic_parameters == num_parameters(critic)
    lora = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
    adapted = add_adapters(policy, lora, seed=1)
    assert from_settings.adapter_parameters(lora) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"hidden_size": 3}', "[]"])
def test_what_is_no_decoder_of_these_families_has_no_shape(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert shape_of(ModelConfig(path=str(tmp_path))) is None
    assert shape_of(ModelConfig(path="nobody/nothing-here")) is None


def test_a_mixture_of_experts_has_no_shape_that_would_count_one_expert(tmp_path: Path) -> None:
    dense = Qwen3Config(**SIZES).to_dict()
    config = Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=160)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert num_parameters(model) > 1.5 * ModelShape.of_config(dense).policy_parameters
    config.save_pretrained(tmp_path)
    assert shape_of(ModelConfig(path=str(tmp_path))) is None
    assert (has_experts(config.to_dict()), has_experts(dense)) == (True, False)


@pytest.mark.parametrize(
    ("hub_id", "published_parameters"),
    [("Qwen/Qwen2.5-0.5B", 494_032_768), ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400)],
)
def test_a_published_shape_has_as_many_parameters_as_the_hub_says(hub_id: str, published_parameters: int) -> None:
    shape = shape_of(ModelConfig(path=hub_id))
    assert shape is not None
    assert shape.policy_parameters == published_parameters
    config = AutoConfig.for_model(**PUBLISHED[hub_id])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert num_parameters(model) == published_parameters


@pytest.mark.parametrize(
    ("shape", "rope_theta", "rms_norm_eps"),
    [("llama3.2-1b", 500_000.0, 1e-5), ("qwen2.5-0.5b", 1_000_000.0, 1e-6), ("smollm2-135m", 100_000.0, 1e-5)],
)
def test_a_benchmarks_model_has_the_published_ones_positions_and_norms(
    shape: str, rope_theta: float, rms_norm_eps: float
) -> None:
    config = AutoConfig.for_model(**SHAPES[shape])
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (rope_theta, rms_norm_eps)


def test_what_is_on_this_machine_goes_before_what_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name is the model; what it lacks is not made up."""
    folder = tmp_path / "Qwen" / "Qwen2.5-0.5B"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert shape_of(ModelConfig(path="Qwen/Qwen2.5-0.5B")) is not None
    CONFIGS["llama"].save_pretrained(folder)
    found = shape_of(ModelConfig(path="Qwen/Qwen2.5-0.5B"))
    assert found is not None
    assert found.hidden == 64


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3MoeConfig(**SIZES, num_experts=8).to_dict(), r"no mixture of experts \(model_type qwen3_moe\)"),
        (MixtralConfig(**SIZES).to_dict(), r"no mixture of experts \(model_type mixtral\)"),
        (Qwen2_5_VLConfig().to_dict(), r"text alone, without pictures or sound \(model_type qwen2_5_vl\)"),
        (T5Config().to_dict(), r"without an encoder \(model_type t5\)"),
        ({**LlamaConfig(**SIZES).to_dict(), "quantization_config": {"quant_method": "bitsandbytes"}},
         r"not quantized \(bitsandbytes\)"),
    ],
    ids=["qwen3_moe", "mixtral", "qwen2_5_vl", "t5", "bitsandbytes"],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_its_config_alone(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    """By a check before a start, and by whoever loads it (a hub's model is not here before that)."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = rf"{reason}, got {tmp_path}\. Trained are dense decoders of text: llama, mistral, qwen2, qwen3"
    with pytest.raises(ModelError, match=rf"critic\.path: must .*{told}"):
        require_trainable("critic.path", str(tmp_path))
    with pytest.raises(ModelError, match=rf"model\.path: must .*{told}"):
        load_policy(tmp_path, model=ModelConfig(), device=torch.device("cpu"))
    with pytest.raises(ModelError, match=told):
        check_before_plan(RunConfig(model=ModelConfig(path=str(tmp_path))))


def test_a_critic_knows_every_token_of_the_policy_by_the_same_id(tmp_path: Path) -> None:
    """Words, and pairs of a word and its score, as the library numbers them; what is added to them is not read."""
    models = {
        "policy": BPE({"a": 0, "b": 1}, []),
        "more": Unigram([("a", 0.0), ("b", 0.0), ("c", 0.0)]),
        "turned": BPE({"b": 0, "a": 1, "c": 2}, []),
    }
    for name, model in models.items():
        tokenizer = Tokenizer(model)
        tokenizer.add_special_tokens(["<image>"])
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        assert token_counts(str(tmp_path / name)) == tokenizer.get_vocab(with_added_tokens=False)
    policy, more, turned, other = (str(tmp_path / name) for name in (*models, "other"))
    tokens = token_counts(policy)
    for same in (policy, more, other):
        require_same_tokens("critic.path", same, tokens)
    with pytest.raises(ModelError, match=r"critic\.path: must have the policy's tokenizer.*2 of 2 tokens.*'a'"):
        require_same_tokens("critic.path", turned, tokens)
    require_same_tokens("critic.path", policy, token_counts(more))
    Path(other).mkdir()
    for folder, size in ((policy, 2), (other, 1)):
        (Path(folder) / "config.json").write_text(json.dumps({"vocab_size": size}))
    require_embeddings("model.path", policy, tokens)
    with pytest.raises(ModelError, match=r"critic\.path: .* every token; got .*vocab_size is 1, .* highest id is 1"):
        require_same_tokens("critic.path", other, tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_can_be_trained_is_not_refused(tmp_path: Path, name: str) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    require_trainable("model.path", str(tmp_path))
