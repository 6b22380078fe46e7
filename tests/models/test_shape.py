"""Parameters and operations of model shapes against real models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2_5_VLConfig,
    Qwen3MoeConfig,
    T5Config,
)

from flows.work.checks import check_before_plan
from rlcore.batching.pack import shared_prompts
from rlcore.config import LoraConfig, ModelConfig, RunConfig, ScratchModel
from rlcore.errors import ModelError
from rlcore.models.load import build_scratch_model, load_policy, load_value_model
from rlcore.models.lora import add_adapters
from rlcore.models.shape import (
    ModelShape,
    peak_flops,
    require_embeddings,
    require_same_tokens,
    require_trainable,
    shape_of,
    vocabulary_of,
)
from tests.models.tiny import CONFIGS, answers, inputs_of, policy_of, write_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_policy_parameters_by_config(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    shape = ModelShape.of_config(json.loads(config.to_json_string(use_diff=False)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.policy_parameters == num_parameters(model)
    assert shape.layer_parameters == num_parameters(model.model.layers[0])
    config.save_pretrained(tmp_path)
    require_trainable("model.path", str(tmp_path))


def test_scratch_parameters(tmp_path: Path) -> None:
    scratch = ScratchModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)
    build_scratch_model(scratch, seed=1, directory=tmp_path)
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


EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=160)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"hidden_size": 3}', "[]", json.dumps(EXPERTS.to_dict())])
def test_other_configs_have_no_shape(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert shape_of(ModelConfig(path=str(tmp_path))) is None
    assert shape_of(ModelConfig(path="no/model-here")) is None


def test_local_config_precedes_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name is the model, without defaults for missing files."""
    folder = tmp_path / "Qwen" / "Qwen2.5-0.5B"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert shape_of(ModelConfig(path="Qwen/Qwen2.5-0.5B")) is not None
    LlamaConfig(**SIZES).save_pretrained(folder)
    found = shape_of(ModelConfig(path="Qwen/Qwen2.5-0.5B"))
    assert found is not None
    assert found.hidden == 64


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EXPERTS.to_dict(), r"no mixture of experts \(model_type qwen3_moe\)"),
        (MixtralConfig(**SIZES).to_dict(), r"no mixture of experts \(model_type mixtral\)"),
        (Qwen2_5_VLConfig().to_dict(), r"text alone, without pictures or sound \(model_type qwen2_5_vl\)"),
        (T5Config().to_dict(), r"without an encoder \(model_type t5\)"),
        ({**LlamaConfig(**SIZES).to_dict(), "quantization_config": {"quant_method": "bitsandbytes"}},
         r"not quantized \(bitsandbytes\)"),
    ],
    ids=["qwen3_moe", "mixtral", "qwen2_5_vl", "t5", "bitsandbytes"],
)  # fmt: skip
def test_untrainable_config_raises(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    """Check before the start and when loading."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = rf"{reason}, got {tmp_path}\. Supported are dense text decoders: llama, mistral, qwen2, qwen3"
    with pytest.raises(ModelError, match=rf"critic\.path: must .*{message}"):
        require_trainable("critic.path", str(tmp_path))
    with pytest.raises(ModelError, match=rf"model\.path: must .*{message}"):
        load_policy(tmp_path, model=ModelConfig(), device=torch.device("cpu"))
    with pytest.raises(ModelError, match=message):
        check_before_plan(RunConfig(model=ModelConfig(path=str(tmp_path))))


def test_critic_requires_same_token_ids(tmp_path: Path) -> None:
    """Cover both vocabulary formats; added tokens are not read."""
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
        assert vocabulary_of(str(tmp_path / name)) == tokenizer.get_vocab(with_added_tokens=False)
    policy, more, turned, other = (str(tmp_path / name) for name in (*models, "other"))
    tokens = vocabulary_of(policy)
    for same in (policy, more, other):
        require_same_tokens("critic.path", same, tokens)
    with pytest.raises(ModelError, match=r"critic\.path: must have the policy's tokenizer.*2 of 2 tokens.*'a'"):
        require_same_tokens("critic.path", turned, tokens)
    require_same_tokens("critic.path", policy, vocabulary_of(more))
    Path(other).mkdir()
    for folder, size in ((policy, 2), (other, 1)):
        (Path(folder) / "config.json").write_text(json.dumps({"vocab_size": size}))
    require_embeddings("model.path", policy, tokens)
    with pytest.raises(ModelError, match=r"critic\.path: .* every token; got .*vocab_size is 1, .* highest id is 1"):
        require_same_tokens("critic.path", other, tokens)


def add_product(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared prompts"])
@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=3), LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))],
    ids=["dense", "adapters", "some adapters"],
)  # fmt: skip
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_update_flops_match_torch(kind: str, lora: LoraConfig | None, shares: bool, tmp_path: Path) -> None:
    """Count all matrix products of forward and backward in torch's dispatcher. It also counts recomputed logits of the
    head, and the masked half of attention."""
    policy, batch = policy_of(write_model(kind, tmp_path)), answers([(9, (3, 5, 4)), (6, (7,)), (11, (2, 8))])
    if lora is not None:
        add_adapters(policy, lora, seed=1)
    shared = shared_prompts(batch) if shares else None
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: add_product})
    with counter, sdpa_kernel(SDPBackend.MATH):  # with separate products
        policy(*inputs_of(batch), shared, temperature=1.0, entropy="none").logprobs.sum().backward()
    counted = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    in_attention = counted.pop("aten.bmm")
    shape, lengths = ModelShape.of_config(policy.decoder.config.to_dict()), batch.sequence_lengths().tolist()
    targets = int(batch.loss_mask.sum())
    assert 0 < targets < batch.num_tokens
    num_shared = 0 if shared is None else int(shared.sum())
    assert bool(num_shared) == shares
    attention = 6 * shape.layers * shape.query_width * sum(length**2 for length in lengths)
    flops = shape.update_flops(lengths, num_targets=targets, num_shared=num_shared, lora=lora)
    assert sum(counted.values()) == flops - attention + 2 * targets * shape.embedding
    of_layers = shape.update_flops(lengths, num_targets=0)
    assert shape.verl_flops(lengths) == of_layers + 12 * shape.embedding * batch.num_tokens
    if lora is None or "k_proj" in lora.target_modules:  # else the first layer's keys and values need no gradient
        assert in_attention == 2 * attention
    else:
        assert 1.5 * attention < in_attention < 2 * attention


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
     ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GB200", 2_500),
     ("NVIDIA B200", 2_250), ("NVIDIA H200 NVL", 835)],
)  # fmt: skip
def test_peak_flops_by_device_name(name: str, tflops: float) -> None:
    assert peak_flops(name) == 1e12 * tflops
    assert peak_flops("Some other card") is peak_flops("NVIDIA RTX A1000 Laptop GPU") is None
