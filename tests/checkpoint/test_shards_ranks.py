"""Checkpoints saved by any number of gloo ranks have the same bits when any other number of ranks reads them.

    python -m tests.checkpoint.test_shards_ranks RANK WORLD_SIZE OUT [FROM TO]

is the program of a rank. With FROM and TO, it resumes from a checkpoint for a step, and saves."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from rlcore.checkpoint.load import load_shards
from tests.checkpoint.small import assert_same, build, save_shards, state_of, train, whole
from tests.helpers.forked import run_side_by_side

pytestmark = pytest.mark.multiprocess


def main() -> None:
    """Run the program of one gloo rank."""
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


WORLD_SIZES = [pytest.param(2, marks=pytest.mark.lengthy), pytest.param(3, marks=pytest.mark.slow)]
"""Three share out unevenly, too."""


@pytest.fixture(scope="module", params=WORLD_SIZES, ids=str)
def left_by_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which one process has saved `from-one`, and the ranks have saved what `main` describes."""
    world_size = request.param
    out = tmp_path_factory.mktemp("ranks")
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    save_shards(out / "from-one", model=model, optimizer=optimizer)
    run_side_by_side(
        *(["tests.checkpoint.test_shards_ranks", str(rank), str(world_size), str(out)] for rank in range(world_size)),
        timeout_s=200,
    )
    return out


def test_every_rank_writes_its_part(left_by_ranks):
    files = sorted(left_by_ranks.glob("from-ranks/*.safetensors"))
    assert len(files) == len(list(left_by_ranks.glob("read-*"))) * len({file.name[:10] for file in files})
    sizes = [file.stat().st_size for file in files]
    assert len(files) in (2, 3)
    assert max(sizes) < 1.5 * min(sizes)


def test_ranks_read_one(left_by_ranks):
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    assert_same(load_file(left_by_ranks / "read-0"), state_of(model, optimizer))


def test_one_reads_ranks_and_continues(left_by_ranks):
    expected, its_optimizer = build(seed=1)
    train(expected, its_optimizer, 2)
    model, optimizer = build(seed=9)
    load_shards(left_by_ranks / "from-ranks", model=model, optimizer=optimizer)
    assert_same(state_of(model, optimizer), state_of(expected, its_optimizer))
    train(expected, its_optimizer, 1)
    train(model, optimizer, 1)
    assert_same(state_of(model, optimizer), state_of(expected, its_optimizer))


@pytest.mark.parametrize(
    ("folder", "file"), [("trained", "trained-0"), ("from-copies", "trained-0"), ("offloaded", "offloaded-0")]
)
def test_one_reads_trained_ranks(left_by_ranks, folder, file):
    """The ranks' parameters are gathered after a pass without backward, and the moments of one run are offloaded."""
    model, optimizer = build(seed=9)
    load_shards(left_by_ranks / folder, model=model, optimizer=optimizer)
    assert_same(state_of(model, optimizer), load_file(left_by_ranks / file))


def test_ranks_read_ranks(left_by_ranks):
    assert_same(load_file(left_by_ranks / "reread-0"), load_file(left_by_ranks / "trained-0"))


@pytest.mark.lengthy
def test_eight_then_four_then_one_continue_bit_equal(tmp_path):
    """Each reads the previous one's weights and moments. The training equals one process's up to rounding."""
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    save_shards(tmp_path / "start", model=model, optimizer=optimizer)
    left = state_of(model, optimizer)
    for world_size, source, target in ((8, "start", "eight"), (4, "eight", "four")):
        rest = [str(world_size), str(tmp_path), source, target]
        run_side_by_side(
            *(["tests.checkpoint.test_shards_ranks", str(rank), *rest] for rank in range(world_size)), timeout_s=400
        )
        assert_same(load_file(tmp_path / f"{target}.read-0"), left)
        left = load_file(tmp_path / f"{target}.left-0")
    again, its_optimizer = build(seed=9)
    load_shards(tmp_path / "four", model=again, optimizer=its_optimizer)
    assert_same(state_of(again, its_optimizer), left)
    train(again, its_optimizer, 1)
    train(model, optimizer, 3)
    expected = state_of(model, optimizer)
    for name, value in state_of(again, its_optimizer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_training_on_ranks_equals_training_on_one(left_by_ranks):
    model, optimizer = build(seed=1)
    train(model, optimizer, 4)
    trained = load_file(left_by_ranks / "trained-0")
    for name, value in state_of(model, optimizer).items():
        if value.is_floating_point():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=name)


if __name__ == "__main__":
    main()
    # A thread of gloo's that is still at work when the interpreter goes down ends the process by std::terminate.
    os._exit(0)
