"""The program of each gloo rank of the checkpoint tests.

python -m tests.checkpoint.ranks RANK WORLD_SIZE OUT
python -m tests.checkpoint.ranks RANK WORLD_SIZE OUT FROM TO     resumes from a checkpoint for a step, and saves
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from rlcore.checkpoint.load import load_shards
from tests.checkpoint.small import build, save_shards, state_of, train, whole


def main() -> None:
    rank, world_size, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{out / f'meeting-{world_size}'}", rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (world_size,))
    if len(sys.argv) > 4:
        source, target = (out / name for name in sys.argv[4:])
        model, optimizer = build(seed=8, mesh=mesh)
        load_shards(source, model=model, optimizer=optimizer)
        keep(target.with_suffix(f".read-{rank}"), state_of(model, optimizer), rank)
        train(model, optimizer, 1)
        save_shards(target, model=model, optimizer=optimizer)
        keep(target.with_suffix(f".left-{rank}"), state_of(model, optimizer), rank)
        dist.barrier()
        return

    # What one process saved, read by all ranks, and saved again by them.
    model, optimizer = build(seed=3, mesh=mesh)
    load_shards(out / "from-one", model=model, optimizer=optimizer)
    keep(out / f"read-{rank}", state_of(model, optimizer), rank)
    save_shards(out / "from-ranks", model=model, optimizer=optimizer)

    # Trained on, with a pass without backward last, which leaves the root's parameters gathered.
    train(model, optimizer, 2)
    with torch.no_grad():
        model(torch.arange(6)[None])
    save_shards(out / "trained", model=model, optimizer=optimizer)
    keep(out / f"trained-{rank}", state_of(model, optimizer), rank)

    # Saved by ranks, read by ranks, over a used optimizer.
    again, its_optimizer = build(seed=4, mesh=mesh)
    train(again, its_optimizer, 1)
    load_shards(out / "trained", model=again, optimizer=its_optimizer)
    keep(out / f"reread-{rank}", state_of(again, its_optimizer), rank)
    for one, optim in ((model, optimizer), (again, its_optimizer)):
        train(one, optim, 1)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(whole(one), whole(other)) for one, other in pairs)

    # Moments on the host, shard by shard: saved as any others, the same numbers.
    offloaded, host_optimizer = build(seed=6, mesh=mesh, offload=True)
    load_shards(out / "trained", model=offloaded, optimizer=host_optimizer)
    train(offloaded, host_optimizer, 1)
    pairs = zip(model.parameters(), offloaded.parameters(), strict=True)
    assert all(torch.equal(whole(one), whole(other)) for one, other in pairs)
    save_shards(out / "offloaded", model=offloaded, optimizer=host_optimizer)
    keep(out / f"offloaded-{rank}", state_of(model, optimizer), rank)

    # A replicated mesh dimension: each value is written by one of its copies.
    replicated = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    copied, copied_optimizer = build(seed=5, mesh=replicated)
    load_shards(out / "trained", model=copied, optimizer=copied_optimizer)
    save_shards(out / "from-copies", model=copied, optimizer=copied_optimizer)
    dist.barrier()
    dist.destroy_process_group()


def keep(path: Path, state: dict[str, torch.Tensor], rank: int) -> None:
    """Write the state that all ranks have gathered, on rank 0."""
    if rank == 0:
        save_file({name: value.clone() for name, value in state.items()}, path)


if __name__ == "__main__":
    main()
    # A thread of gloo's that is still at work when the interpreter goes down ends the process by std::terminate.
    os._exit(0)
