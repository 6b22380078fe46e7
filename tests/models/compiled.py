"""Program for test_cuda.py, since the tests' live shape checks cannot be compiled.

python -m tests.models.compiled MODEL           compiled layers and head against plain ones, many shapes
python -m tests.models.compiled MODEL MEETING   the same under FSDP2 with one rank
The last shapes have prompts with several responses, which only the compiled model shares.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcore.config.model import ModelConfig
from rlcore.models.load import load_policy
from rlcore.models.parallel import shard
from rlcore.models.policy import CausalPolicy
from tests.models.tiny import answers, assert_alike, make_batch, outcome

CUDA = torch.device("cuda")


def main() -> None:
    plain = load_policy(sys.argv[1], model=ModelConfig(), device=CUDA)
    compiled: CausalPolicy = load_policy(
        sys.argv[1], model=ModelConfig(compile=True, head_chunk_tokens=100, share_prompts=True), device=CUDA
    )
    if len(sys.argv) > 2:
        dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
        mesh = init_device_mesh("cuda", (1,))
        plain, compiled = (shard(policy, mesh=mesh, dtype=torch.bfloat16) for policy in (plain, compiled))
    torch._dynamo.utils.counters.clear()
    batches = [make_batch([(7 * seed + 13 * i) % 300 + 1 for i in range(3 + seed)], seed=seed) for seed in range(12)]
    with_prompts = [
        answers([(30 + 5 * i + seed, range(20 + i, 20 + i + 3 * (2 + i % 3), 3)) for i in range(3 + seed)])
        for seed in range(6)
    ]
    for batch in [*batches, *with_prompts]:
        found, expected = outcome(compiled, batch), outcome(plain, batch)
        error = float((found[0] - expected[0]).abs().mean())
        assert error < 0.02, error
        assert_alike(found[1], expected[1])
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs <= 16, num_graphs
    print(f"compiled {num_graphs} graphs for {len(batches) + len(with_prompts)} shapes")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
