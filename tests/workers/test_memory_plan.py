"""The memory plan against bytes of real tensors and published runs."""

import json
import re
from pathlib import Path

import pytest
import torch

from rlcore.config import LoraConfig, RunConfig, ScratchModel
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.config.model import PUBLISHED
from rlcore.models.lora import add_adapters, frozen_tensors
from rlcore.models.memory import build_optimizer
from rlcore.models.policy import CausalPolicy
from rlcore.models.shape import ModelShape, shape_of
from rlcore.types import PackedBatch
from rlcore.workers import memory_plan as planning
from rlcore.workers.memory_plan import FREE_SHARE, Device, chosen_settings, fit_settings, plan_memory, resident_bytes
from tests.helpers.small_run import other_model
from tests.models.tiny import answers, inputs_of, policy_of

SCRATCH = ScratchModel(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=192)
QWEN_05B = ModelShape.of_config(PUBLISHED["Qwen/Qwen2.5-0.5B"])
LLAMA_1B = ModelShape.of_config(PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"])
CARD_24, H200 = Device("a 24 GB card", 2, 25_300_000_000), Device("H200", 2, 150_000_000_000)
CARD_80 = Device("an 80 GB card", 2, 85_000_000_000)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> CausalPolicy:
    return policy_of(other_model(tmp_path_factory.mktemp("model"), SCRATCH))


def forward(policy: CausalPolicy, batch: PackedBatch) -> torch.Tensor:
    return policy(*inputs_of(batch), temperature=1.0, entropy="value").logprobs.sum()


def test_planned_weights_gradients_and_moments_are_real(policy: CausalPolicy) -> None:
    config = RunConfig()
    optimizer = build_optimizer(policy, config.optim, device=torch.device("cpu"))
    forward(policy, answers([(2, (7,)), (2, (10,))])).backward()
    optimizer.step()
    real = {
        "policy: float32 weights": sum(p.nbytes for p in policy.parameters()),
        "policy: moments": sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim
        ),
    }
    shape = ModelShape.of_scratch(SCRATCH)
    assert resident_bytes(config, shape, 4) == real
    gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
    phases = plan_memory(config, shape, Device("x", 4, None)).phases
    assert phases[planning.POLICY_UPDATE]["policy: gradients"] == gradients
    optimizer.zero_grad(set_to_none=True)


def saved_bytes(policy: CausalPolicy, batch: PackedBatch) -> int:
    """Return bytes that autograd keeps, each storage once, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    seen: dict[int, int] = {}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(policy, batch)
    assert torch.isfinite(loss)
    return sum(seen.values())


def test_planned_activations_match_autograd(policy: CausalPolicy) -> None:
    """The difference of models with 1 and 2 layers cancels heads and embeddings."""
    batch = answers([(2, (38,) * 8)])
    layers = policy.decoder.layers
    two = saved_bytes(policy, batch)
    policy.decoder.layers = layers[:1]
    policy.decoder.config.num_hidden_layers = 1
    try:
        one = saved_bytes(policy, batch)
    finally:
        policy.decoder.layers = layers
        policy.decoder.config.num_hidden_layers = 2
    counted = planning.layer_activation_bytes(ModelShape.of_scratch(SCRATCH), 4) * batch.num_tokens
    assert counted * 0.8 < two - one < counted * planning.ACTIVATION_FACTOR * 1.1


def settings(*overrides: str) -> RunConfig:
    """Return TinyZero's settings without recomputation."""
    return load_config(["experiment=tinyzero_ppo", "model.gradient_checkpointing=false", *overrides])


def test_tutorial_memory_matches_plan() -> None:
    stated = re.search(r"update needs (\d+) GB", (ROOT / "docs" / "tutorials" / "real-model.md").read_text())
    config = load_config(["experiment=smollm2_countdown"])
    shape = shape_of(config.model)
    assert stated is not None
    assert shape is not None
    update = fit_settings(config, shape, CARD_80)[1].phases["policy update"]
    assert round(sum(update.values()) / 1e9) == int(stated[1])


def test_plan_matches_measured_step() -> None:
    """Measured on an H200 without moments: 43.6 GB in an update, 9.4 GB in the reference's pass."""
    overrides = ("runtime.num_workers=1", "model.compile=false", "rollout.sleep_level=2")
    config = load_config(list(overrides), experiment="verl_gsm8k_grpo")
    phases = plan_memory(config, LLAMA_1B, H200, tokens=14_744).phases
    measured = {planning.POLICY_UPDATE: 43.6e9, planning.PASSES: 9.4e9 + 0.8e9}
    for phase, found in measured.items():
        planned = sum(size for part, size in phases[phase].items() if part != "policy: moments")
        assert planned == pytest.approx(found, rel=0.06)


def test_plan_matches_measured_compiled_step() -> None:
    """The largest mini-batch of benchmarks/grpo_step.py (49,422 tokens) takes two micro-batches of 24,711."""
    baseline = json.loads((ROOT / "benchmarks/baselines/NVIDIA_H200.json").read_text())
    overrides = ("runtime=local", "runtime.num_workers=1", "trainer.batch_size=128", "trainer.mini_batch_size=32")
    config = load_config([*overrides, *baseline["overrides"]], experiment="verl_gsm8k_grpo")
    assert config.model.compile
    plan = plan_memory(config, LLAMA_1B, Device("H200", 2, 150_100_000_000), tokens=24_711)
    assert plan.peak_phase == planning.POLICY_UPDATE
    assert plan.peak_bytes == pytest.approx(1e9 * baseline["peak_allocated_gb"], rel=0.03)


def test_uncompiled_layers_are_counted_plain() -> None:
    """`model.compile` has no effect without a flash kernel (float32, sdpa)."""
    for overrides, itemsize, is_equal in (
        (["model.dtype=float32"], 4, True),
        (["model.attention=sdpa"], 2, True),
        ([], 2, False),
    ):
        compiled, plain = (
            plan_memory(settings(*overrides, f"model.compile={stated}"), QWEN_05B, Device("x", itemsize, None))
            for stated in ("true", "false")
        )
        assert (compiled == plain) == is_equal
        assert compiled.peak_bytes <= plain.peak_bytes


def test_verl_experiment_fits_80_gb() -> None:
    """The plan leaves room for torch's allocator."""
    plan = plan_memory(load_config([], experiment="verl_gsm8k_grpo"), LLAMA_1B, CARD_80)
    assert plan.usable_bytes is not None
    assert plan.peak_bytes < plan.usable_bytes - 2 * FREE_SHARE * 85e9


def test_critic_is_planned_by_its_shape() -> None:
    name = "meta-llama/Llama-3.2-1B-Instruct"
    phases = plan_memory(settings(f"critic.path={name}"), QWEN_05B, H200).phases
    held, update = phases[planning.GENERATION], phases[planning.CRITIC_UPDATE]
    assert held["critic: float32 weights"] == update["critic: gradients"] == 4 * LLAMA_1B.critic_parameters
    assert held["critic: moments"] == 8 * LLAMA_1B.critic_parameters
    alone = plan_memory(settings("model.path=" + name), LLAMA_1B, H200).phases
    for part in ("activations", "gathered weights"):
        assert update[part] == alone[planning.CRITIC_UPDATE][part] > phases[planning.POLICY_UPDATE][part]


@pytest.mark.parametrize(("size", "heads_of_a_rank"), [(1, 2), (2, 1), (4, 1)])
def test_tensor_parallel_engine_is_split(size: int, heads_of_a_rank: int) -> None:
    """Ranks hold equal parts of the weights, and whole key-value heads of all responses."""
    spanning = settings(
        "model.path=of/unknown-heads",  # else 4 ranks are rejected, which do not divide 14 heads
        "runtime.num_workers=4", f"rollout.tensor_parallel_size={size}", "rollout.max_num_seqs=1024",
        "trainer.batch_size=256", "trainer.mini_batch_size=256", "rollout.samples_per_prompt=1",
        "rollout.enforce_eager=false",
    )  # fmt: skip
    wanted = (
        planning.full_engine_bytes(spanning, QWEN_05B, 2, spanning.concurrent_responses) - planning.ENGINE_FIXED_BYTES
    )
    token = 2 * torch.empty(QWEN_05B.layers, heads_of_a_rank, QWEN_05B.head_dim, dtype=torch.bfloat16).nbytes
    answers = 256 // 4 * size
    assert wanted == 2 * QWEN_05B.policy_parameters // size + answers * planning.max_sequence_tokens(spanning) * token


def test_offloaded_base_and_engine_alternate() -> None:
    """Qwen2.5-7B takes 15.2 GB in bfloat16, in the trainer and in vLLM, on a card with 23.5 GiB."""
    shape = ModelShape.of_config(
        {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3_584, "intermediate_size": 18_944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    )  # fmt: skip
    card = Device("a 24 GB card", 2, round(23.5 * 2**30))
    given = ("model.path=of/that-shape", "model.lora.rank=32", "critic=none", "algo=grpo", "trainer.batch_size=64",
             "trainer.mini_batch_size=64", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=512",
             "filter.max_prompt_tokens=512")  # fmt: skip
    assert plan_memory(settings(*given), shape, card).cannot_fit
    chosen, plan = fit_settings(settings(*given, "runtime.fit_memory=auto"), shape, card)
    assert plan.fits
    assert {"model.lora.offload=true", "rollout.sleep_level=1"} <= {*chosen_settings(settings(*given), chosen).split()}
    in_4_bits, smaller = fit_settings(settings(*given, "model.lora.base=nf4", "runtime.fit_memory=auto"), shape, card)
    assert smaller.fits
    assert smaller.phases[planning.PASSES][planning.FROZEN_BASE] == pytest.approx(5.85e9, rel=0.001)
    assert in_4_bits.trainer.max_tokens_per_micro_batch > 16 * chosen.trainer.max_tokens_per_micro_batch


@pytest.mark.parametrize(("base", "num_workers"), [("native", 1), ("nf4", 1), ("nf4", 2)])
def test_planned_frozen_base_is_real(tmp_path: Path, base: str, num_workers: int) -> None:
    """Each rank holds all 4-bit matrices, and its share of the rest."""
    lora = LoraConfig(rank=4, base=base)
    policy = add_adapters(policy_of(other_model(tmp_path, SCRATCH), lora=lora, dtype="bfloat16"), lora, seed=0)
    sharded, whole = 0, 0
    for _, tensor in frozen_tensors(policy):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        sharded, whole = sharded + is_parameter * tensor.nbytes, whole + (not is_parameter) * tensor.nbytes
    config = settings("model.lora.rank=4", f"model.lora.base={base}", f"runtime.num_workers={num_workers}")
    found = resident_bytes(config, ModelShape.of_scratch(SCRATCH), 2)[planning.FROZEN_BASE]
    assert found == whole + sharded // num_workers
    assert (whole > sharded) == (base == "nf4")


def test_fit_auto_keeps_fingerprint() -> None:
    config = settings("runtime.fit_memory=auto", "rollout.memory_share=0.9", "rollout.sleep_level=0")
    chosen, plan = fit_settings(config, QWEN_05B, CARD_24)
    assert plan == plan_memory(chosen, QWEN_05B, CARD_24)
    assert chosen.rollout.sleep_level == 2
    assert chosen.rollout.memory_share < 0.5
    assert settings_fingerprint(chosen) == settings_fingerprint(config)


@pytest.mark.parametrize("gb", [24.1, 25.3, 25.7, 42.9, 85.0, 150.1])
@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("experiment", ["tinyzero_ppo", "verl_gsm8k_grpo"])
def test_fit_auto_fits_every_card(experiment: str, num_workers: int, gb: float) -> None:
    """A share rounded up left no token budget: with 24 GB and eight ranks, moments were offloaded and micro-batches had
    one sequence, although half of the card was free."""
    config = load_config(["runtime.fit_memory=auto", f"runtime.num_workers={num_workers}"], experiment=experiment)
    shape = {"tinyzero_ppo": QWEN_05B, "verl_gsm8k_grpo": LLAMA_1B}[experiment]
    device = Device("a card", 2, round(1e9 * gb))
    chosen, plan = fit_settings(config, shape, device)
    assert plan.fits
    assert plan.usable_bytes is not None
    assert plan.peak_bytes <= plan.usable_bytes - FREE_SHARE * 1e9 * gb + 1
    assert chosen.trainer.max_tokens_per_micro_batch >= 4 * planning.max_sequence_tokens(chosen)
    if num_workers == 8 and gb > 25:
        assert [chosen.optim.offload, chosen.algo.kl.offload, chosen.model.gradient_checkpointing] == [False] * 3
    if gb > 100:
        assert chosen.rollout.sleep_level == 0
