"""Operations of an update: against the sum over matrices and pairs, layer by layer, and against torch's count."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen2Config

from rlcore.batching.pack import shared_prompts
from rlcore.config.model import LoraConfig
from rlcore.models.lora import add_adapters
from rlcore.models.shape import ModelShape, peak_flops
from tests.models.tiny import CONFIGS, answers, policy_of, write_model

LLAMA_1B = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                       num_key_value_heads=8, head_dim=64, vocab_size=128_256, tie_word_embeddings=True)  # fmt: skip


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_weights_are_those_of_the_linear_layers(kind: str, tmp_path: Path) -> None:
    policy = policy_of(write_model(kind, tmp_path))
    linear = [module for module in policy.model.modules() if isinstance(module, torch.nn.Linear)]
    head = policy.head.weight.numel()
    shape = ModelShape.of_config(policy.decoder.config.to_dict())
    assert shape.layers * shape.layer_weights + shape.embedding == sum(module.weight.numel() for module in linear)
    assert shape.embedding == head


def test_every_matrix_and_every_pair_is_counted_once() -> None:
    config = Qwen2Config(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    lengths = (3, 5, 1)
    total = 0.0
    for length in lengths:
        for _ in range(2):
            for rows, columns in ((8, 8), (4, 8), (4, 8), (8, 8), (12, 8), (12, 8), (8, 12)):
                total += 3 * 2 * rows * columns * length
            # Query times key, and weight times value, for all pairs; half of them lie in the future.
            total += 3 * 2 * (2 * 4 * 2 * length * length) / 2
        total += 3 * 2 * 7 * 8 * length
    shape = ModelShape.of_config(config.to_dict())
    assert shape.update_flops(lengths, num_targets=9) == total
    assert shape.update_flops(lengths, num_targets=4) == total - 5 * 6 * 7 * 8
    assert shape.verl_flops(lengths) == total + 6 * 7 * 8 * sum(lengths)


def add_product(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared prompts"])
@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=3), LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))],
    ids=["dense", "adapters", "some adapters"],
)  # fmt: skip
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_counted_is_what_torch_counts(kind: str, lora: LoraConfig | None, shares: bool, tmp_path: Path) -> None:
    """Every matrix product of a pass forward and backward, as torch's dispatcher meets it. It also meets the head's
    logits a second time, in the backward pass; and attention whole, of which half is due."""
    policy, batch = policy_of(write_model(kind, tmp_path)), answers([(9, (3, 5, 4)), (6, (7,)), (11, (2, 8))])
    if lora is not None:
        add_adapters(policy, lora, seed=1)
    shared = shared_prompts(batch) if shares else None
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: add_product})
    with counter, sdpa_kernel(SDPBackend.MATH):  # its products are seen one by one
        found = policy(
            batch.token_ids, batch.position_ids, batch.cu_seqlens.numpy(), batch.target_ids, batch.loss_mask.numpy(),
            shared, temperature=1.0, entropy="none",
        )  # fmt: skip
        found.logprobs.sum().backward()
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
    if lora is None or "k_proj" in lora.target_modules:  # else the first layer's keys and values need no gradient
        assert in_attention == 2 * attention
    else:
        assert 1.5 * attention < in_attention < 2 * attention


def test_the_reference_model_has_the_weights_that_its_figures_are_made_of() -> None:
    shape = ModelShape.of_config(LLAMA_1B.to_dict())
    assert round((shape.layers * shape.layer_weights + shape.embedding) / 1e9, 3) == 1.236
    assert round((shape.layers * shape.layer_weights + 2 * shape.embedding) / 1e9, 3) == 1.498, (
        "as veRL counts a tied embedding"
    )


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
     ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GB200", 2_500),
     ("NVIDIA B200", 2_250), ("NVIDIA H200 NVL", 835)],
)  # fmt: skip
def test_a_gpu_is_known_by_its_name(name: str, tflops: float) -> None:
    assert peak_flops(name) == 1e12 * tflops
    assert peak_flops("Some other card") is peak_flops("NVIDIA RTX A1000 Laptop GPU") is None
