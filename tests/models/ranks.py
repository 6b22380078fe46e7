"""Program of each gloo rank, and of the single process for comparison.

python -m tests.models.ranks RANK WORLD_SIZE MODELS OUT     one rank of WORLD_SIZE
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlcore.batching.pack import select
from rlcore.config.algo import OptimConfig
from rlcore.config.model import LoraConfig, ModelConfig
from rlcore.models import parallel
from rlcore.models.load import load_value_model
from rlcore.models.lora import add_adapters, frozen_tensors
from rlcore.models.memory import OffloadedWeights, build_optimizer, clip_grad_norm, compact, local_tensor
from rlcore.models.parallel import full_state, gather_parameter, shard
from rlcore.models.policy import CausalPolicy, ValueModel
from rlcore.types import PackedBatch
from tests.models.tiny import CPU, inputs_of, make_batch, policy_of

LENGTHS = (5, 3, 9, 1, 5, 14, 3, 3)
CASES = ("tied", "untied-checkpointed", "lora", "lora-nf4", "value", "bfloat16", "lora-bfloat16", "lora-float32-base")
MODEL_OF = dict.fromkeys(CASES, "qwen2-tied") | {"untied-checkpointed": "llama-gqa-untied"}
ROUNDED = ("bfloat16", "lora-bfloat16", "lora-float32-base")  # they compute in bfloat16
# Micro-batches of each rank; a single process takes all of them.
SPLIT = {
    2: (((5, 0), (3, 6)), ((2, 1, 7), (4,))),
    4: (((5,), (0,)), ((3,), (6,)), ((2,), (1,)), ((7,), (4,))),
    8: tuple(((sequence,),) for sequence in (5, 0, 3, 6, 2, 1, 7, 4)),
}


def build(case: str, models: Path) -> CausalPolicy | ValueModel:
    directory = models / MODEL_OF[case]
    if case == "value":
        model = load_value_model(directory, model=ModelConfig(), device=CPU)
        with torch.no_grad():
            model.value_head.weight.fill_(0.1)
        return model
    lora = LoraConfig(rank=2, base="nf4" if case == "lora-nf4" else "native") if case.startswith("lora") else None
    policy = policy_of(
        directory,
        gradient_checkpointing=case == "untied-checkpointed",
        head_chunk_tokens=3,
        lora=lora,
        dtype="bfloat16" if case == "lora-bfloat16" else "float32",
    )
    return policy if lora is None else add_adapters(policy, lora, seed=5)


def loss_of(model: CausalPolicy | ValueModel, micro: PackedBatch) -> Tensor:
    if isinstance(model, ValueModel):
        return ((model(*inputs_of(micro)[:3]) - micro.behavior_logprobs).square() * micro.loss_mask).sum()
    out = model(*inputs_of(micro), temperature=0.8, entropy="grad")
    return ((out.logprobs + 0.1 * out.entropy) * micro.behavior_logprobs).sum()


def run_case(
    case: str, models: Path, micro_batches: tuple[tuple[int, ...], ...], mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Take two optimizer steps; return losses, gradient norms, first gradients and last weights."""
    model = build(case, models)
    world_size = 1
    if mesh is not None:
        world_size = mesh.size()
        model = shard(model, mesh=mesh, dtype=torch.bfloat16 if case in ROUNDED else torch.float32)
    # Adam divides by the gradient's size: a small eps would amplify rounding of tiny gradients to a full step.
    optimizer = build_optimizer(model, OptimConfig(lr=0.01, eps=0.1), device=CPU)
    whole = make_batch(LENGTHS, seed=4)
    found: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for sequences in micro_batches:
            loss = loss_of(model, select(whole, sequences))
            (loss * world_size).backward()
            total += loss.detach()
        if mesh is not None:
            dist.all_reduce(total)
        found[f"loss.{step}"] = total
        for name, parameter in model.named_parameters():
            if step == 0 and parameter.grad is not None:
                found[f"gradient.{name}"] = gather_parameter(parameter.grad).clone()  # clipping is in place
        found[f"norm.{step}"] = clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
    return found | {f"weight.{name}": tensor.clone() for name, tensor in full_state(model)}


def wait_on_the_host(case: str, models: Path, mesh: DeviceMesh) -> None:
    """Offload a sharded base, read it from the host, and reload it."""
    policy = shard(build(case, models), mesh=mesh, dtype=torch.float32)
    assert isinstance(policy, CausalPolicy)
    micro = make_batch(LENGTHS, seed=4)
    first = loss_of(policy, micro).detach()
    policy.reshard()
    before = {name: tensor.clone() for name, tensor in full_state(policy)}
    frozen = [tensor for _, tensor in frozen_tensors(policy)]
    assert any(tensor.dtype == torch.uint8 for tensor in frozen) == (case == "lora-nf4")
    weights = OffloadedWeights(frozen)
    weights.offload()
    assert {local_tensor(tensor).untyped_storage().nbytes() for tensor in frozen} == {0}
    compact(parameter for parameter in policy.parameters() if parameter.requires_grad)
    away = {name: tensor.clone() for name, tensor in full_state(policy, weights.value)}
    weights.reload()
    for found in (away, dict(full_state(policy))):
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert torch.equal(loss_of(policy, micro), first)


def gather_in_buckets(policy: CausalPolicy) -> None:
    """Compare bits with single gathers, and count collectives."""
    alone = {name: gather_parameter(parameter) for name, parameter in policy.model.named_parameters()}
    send, counts = dist.all_gather, []
    for size in (1, 20_000, parallel.BUCKET_BYTES):
        calls: list[int] = []

        def counted(*arguments: Any, calls: list[int] = calls, **more: Any) -> Any:
            calls.append(1)
            return send(*arguments, **more)

        with patch.object(parallel, "BUCKET_BYTES", size), patch.object(dist, "all_gather", counted):
            found = dict(full_state(policy))
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
        counts.append(len(calls))
    assert counts[0] == len(alone) > counts[1] > counts[2] == 1
    found = dict(full_state(policy, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in alone.items():
        assert torch.equal(found[name], tensor.bfloat16() if tensor.ndim > 1 else tensor), "sent like a cast"


def main() -> None:
    warnings.simplefilter("error")
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    models, out = Path(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{out / 'meeting'}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    for case in CASES:
        found = run_case(case, models, SPLIT[world_size][rank], mesh)
        save_file({name: t.contiguous() for name, t in found.items()}, out / f"{case}-{rank}.safetensors")
    policy = shard(build("tied", models), mesh=mesh, dtype=torch.float32)
    assert isinstance(policy, CausalPolicy)
    parameters = list(policy.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    held = sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)
    assert held < 1.2 / world_size, "each rank has its part"
    save_file({name: tensor.contiguous() for name, tensor in full_state(policy)}, out / f"state-{rank}.safetensors")
    gather_in_buckets(policy)
    wait_on_the_host("lora", models, mesh)
    wait_on_the_host("lora-nf4", models, mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A running gloo thread would end the process by std::terminate at interpreter shutdown.
    os._exit(0)
