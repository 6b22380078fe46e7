"""Tests that need a GPU: flash kernels, compiled layers, bfloat16 under FSDP2, the head's memory at full size."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from rlcore.config.model import LoraConfig, ModelConfig
from rlcore.models.attention import build_layout
from rlcore.models.kernels import choose_attention
from rlcore.models.load import load_policy
from rlcore.models.lora import add_adapters
from rlcore.models.parallel import full_state, shard
from tests.helpers.head_memory import chunked_over_full
from tests.models.tiny import CPU, VOCAB, answers, assert_alike, attend, inputs_of, make_batch, outcome, policy_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # Compilers and drivers warn of things that are not ours.
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
LENGTHS = (200, 31, 17, 200, 5, 64)
CUDA = torch.device("cuda")
FLASH = ("varlen", pytest.param("flash_attn", marks=pytest.mark.flash))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=1, initializer_range=0.05,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def require(name: str) -> None:
    if name == "flash_attn":
        pytest.importorskip("flash_attn", reason="needs the flash-attn package")


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", FLASH)
def test_kernels_equal_dense_attention_by_length(name: str, window: int | None) -> None:
    require(name)
    choice = choose_attention(name, CUDA, torch.bfloat16, 64)
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(sum(LENGTHS), heads, 64, generator=generator).cuda().bfloat16() for heads in (8, 2, 2)]
    bounds = make_batch(LENGTHS).cu_seqlens
    found, expected = (
        attend(qkv, build_layout(bounds, backend=backend, device=CUDA), scaling=0.2, sliding_window=window).float()
        for backend in (choice.name, "sdpa")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)


def test_auto_attention_is_flash_in_half_precision() -> None:
    assert choose_attention("auto", CUDA, torch.bfloat16, 64).name in ("flash_attn", "varlen")
    assert choose_attention("auto", CUDA, torch.float32, 64).name == "sdpa"
    assert choose_attention("auto", CUDA, torch.bfloat16, 513).name == "sdpa"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FLASH)
def test_half_precision_on_the_gpu_agrees_with_float32_on_the_cpu(
    name: str, checkpointing: bool, directory: Path
) -> None:
    require(name)
    batch = make_batch(LENGTHS)
    expected = outcome(policy_of(directory), batch)
    settings = ModelConfig(attention=name, gradient_checkpointing=checkpointing)
    policy = load_policy(directory, model=settings, device=CUDA)
    assert policy.compute_dtype == torch.bfloat16
    found = outcome(policy, batch)
    assert (found[0] - expected[0]).abs().mean() < 0.02
    assert_alike(found[1], expected[1])


def test_offloaded_activations_keep_all_bits(directory: Path) -> None:
    batch = make_batch(LENGTHS)
    settings = [ModelConfig(gradient_checkpointing=True, offload_activations=offload) for offload in (False, True)]
    kept, offloaded = (outcome(load_policy(directory, model=one, device=CUDA), batch) for one in settings)
    assert torch.equal(kept[0], offloaded[0])
    assert all(torch.equal(kept[1][name], offloaded[1][name]) for name in kept[1])


@pytest.mark.parametrize("name", [*FLASH, "sdpa"])
def test_a_prompt_is_computed_once_for_its_answers(name: str, directory: Path) -> None:
    require(name)
    batch = answers([(90, (40, 3, 150, 17)), (5, (6,)), (200, (30, 30))])
    expected = outcome(policy_of(directory), batch)
    settings = ModelConfig(attention=name, share_prompts=True)
    policy = load_policy(directory, model=settings, device=CUDA)
    found = outcome(policy, batch)
    assert (found[0] - expected[0]).abs().mean() < 0.02
    assert_alike(found[1], expected[1])
    again = outcome(policy, batch)
    assert torch.equal(again[0], found[0])


def test_float32_on_the_gpu_equals_float32_on_the_cpu(directory: Path) -> None:
    batch = make_batch(LENGTHS)
    expected = outcome(policy_of(directory), batch)
    found = outcome(load_policy(directory, model=ModelConfig(dtype="float32"), device=CUDA), batch)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-4)
    assert_alike(found[1], expected[1])


@pytest.mark.parametrize("sharded", [False, True])
def test_compiled_layers_and_head_agree_and_are_compiled_a_few_times_only(
    sharded: bool, directory: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.models.compiled", str(directory)]
    command += [str(tmp_path / "meeting")] if sharded else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr


def test_one_rank_of_fsdp_computes_in_bfloat16_on_float32_weights(directory: Path, tmp_path: Path) -> None:
    batch = make_batch(LENGTHS)
    expected = outcome(policy_of(directory), batch)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        policy = load_policy(directory, model=ModelConfig(), device=CUDA)
        sharded = shard(policy, mesh=init_device_mesh("cuda", (1,)), dtype=torch.bfloat16)
        found = outcome(sharded, batch)
        assert {p.dtype for p in sharded.parameters()} == {torch.float32}
        assert (found[0] - expected[0]).abs().mean() < 0.03
        assert_alike(found[1], expected[1])
        weights = dict(policy_of(directory).model.named_parameters())
        assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in full_state(sharded))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_4_bit_base_is_bit_equal_on_a_gpu(directory: Path, dtype: str) -> None:
    lora = LoraConfig(rank=4, base="nf4")
    model = ModelConfig(dtype=dtype, lora=lora)
    found, expected = (
        add_adapters(load_policy(directory, model=model, device=device), lora, seed=0) for device in (CUDA, CPU)
    )
    assert found.base_digest == expected.base_digest
    weights = dict(full_state(expected))
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in full_state(found))
    with torch.no_grad():
        first, second = (
            policy(*(x.to(policy.device) for x in inputs_of(make_batch(LENGTHS))), temperature=1.0, entropy="none")
            for policy in (found, expected)
        )
    assert (first.logprobs.cpu() - second.logprobs).abs().mean() < 0.03


@pytest.mark.parametrize("entropy", ["value", "grad"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_at_full_size_takes_an_eighth_of_the_memory(dtype: str, entropy: str) -> None:
    assert chunked_over_full(entropy, device="cuda", dtype=dtype) <= 1 / 8
