"""Shards of one rank: exact values, read in place without pickles, and refused if they do not fit."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcore.checkpoint import shards
from rlcore.checkpoint.load import ShardReader, load_shards
from rlcore.checkpoint.shards import Box, LocalPart, local_part, rank_and_world_size, write_parts
from rlcore.errors import CheckpointError, DiskSpaceError
from tests.checkpoint.small import assert_same, build, save_shards, state_of, train
from tests.storage.small_disk import fill


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = build(seed=1)
    train(model, optimizer, 2)
    save_shards(tmp_path / "policy", model=model, optimizer=optimizer)
    return tmp_path / "policy"


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_round_trip_and_training_after_it_are_bit_exact(tmp_path, steps_before):
    model, optimizer = build(seed=1)
    train(model, optimizer, steps_before)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2  # a float that needs all its digits
    expected = state_of(model, optimizer)
    save_shards(tmp_path / "policy", model=model, optimizer=optimizer)
    assert_same(state_of(model, optimizer), expected)

    other, other_optimizer = build(seed=2)
    load_shards(tmp_path / "policy", model=other, optimizer=other_optimizer)
    assert_same(state_of(other, other_optimizer), expected)
    assert other.scratch.tolist() == [2.0, 2.0], "a buffer that does not last is not part of a checkpoint"

    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(one, its_optimizer, 2)
    assert_same(state_of(other, other_optimizer), state_of(model, optimizer))


def test_load_fills_a_used_optimizer_in_place(saved):
    expected = build(seed=1)
    train(*expected, 2)
    model, optimizer = build(seed=3)
    train(model, optimizer, 5)
    first = next(iter(model.parameters()))
    moment = optimizer.state[first]["exp_avg"]
    load_shards(saved, model=model, optimizer=optimizer)
    assert optimizer.state[first]["exp_avg"].data_ptr() == moment.data_ptr()
    assert_same(state_of(model, optimizer), state_of(*expected))


def test_tied_weights_are_written_once(saved):
    (file,) = saved.glob("*.safetensors")
    names = load_file(file)
    assert "model.model.model.embed_tokens.weight" in names
    assert not any("lm_head" in name for name in names)
    model, optimizer = build(seed=2)
    load_shards(saved, model=model, optimizer=optimizer)
    assert model.model.lm_head.weight.data_ptr() == model.model.model.embed_tokens.weight.data_ptr()


def test_dtypes_other_than_float32(tmp_path):
    class Mixed(nn.Module):
        def __init__(self, fill_value: float) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.full((3, 2), fill_value, dtype=torch.bfloat16))
            self.scalar = nn.Parameter(torch.tensor(fill_value, dtype=torch.float64))
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.register_buffer("flags", torch.tensor([fill_value > 1, False]))

    first, second = Mixed(1.7), Mixed(0.3)
    save_shards(tmp_path / "mixed", model=first, optimizer=None)
    load_shards(tmp_path / "mixed", model=second, optimizer=None)
    assert_same(dict(second.state_dict()), dict(first.state_dict()))


def test_frozen_weights_are_not_saved(tmp_path):
    model, _ = build(seed=1)
    model.model.requires_grad_(False)
    save_shards(tmp_path / "policy", model=model, optimizer=None)
    with ShardReader(tmp_path / "policy") as reader:
        assert set(reader.tensors) == {"model.value_head.weight", "model.num_seen"}


def test_compiled_modules_have_plain_names(saved):
    model, optimizer = build(seed=2)
    layers = model.model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    load_shards(saved, model=model, optimizer=optimizer)
    reference, _ = build(seed=2)
    load_shards(saved, model=reference, optimizer=None)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_round_trip_over_many_files_needs_each(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_FILE_BYTES", 4000)
    model, optimizer = build(seed=1)
    train(model, optimizer, 1)
    save_shards(tmp_path / "policy", model=model, optimizer=optimizer)
    sizes = [file.stat().st_size for file in (tmp_path / "policy").glob("*.safetensors")]
    assert len(sizes) > 10
    other, other_optimizer = build(seed=2)
    load_shards(tmp_path / "policy", model=other, optimizer=other_optimizer)
    assert_same(state_of(other, other_optimizer), state_of(model, optimizer))
    for file in sorted((tmp_path / "policy").glob("*.safetensors"))[::5]:
        file.rename(tmp_path / "away")
        with pytest.raises(CheckpointError, match=r"not in it|no shard file holds it"):
            load_shards(tmp_path / "policy", model=model, optimizer=optimizer)
        (tmp_path / "away").rename(file)


_UNPICKLED: list[str] = []


def test_load_unpickles_nothing(saved):
    watching = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if watching and event == "pickle.find_class":
            _UNPICKLED.append(str(args))

    model, optimizer = build(seed=2)
    sys.addaudithook(hook)
    load_shards(saved, model=model, optimizer=optimizer)
    watching = False
    assert not _UNPICKLED


def refused(folder: Path, message: str, **shape: object) -> None:
    model, optimizer = build(seed=1, **shape)
    with pytest.raises(CheckpointError, match=message):
        load_shards(folder, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden_size": 64}, r"is torch\.float32 \[41, 32\] there and torch\.float32 \[41, 64\] here"),
        ({"tied": False}, r"1 tensors are not in it, first model\.model\.lm_head\.weight"),
    ],
    ids=["width", "untied"],
)
def test_another_model_is_refused(saved, shape, message):
    refused(saved, message, **shape)


def test_another_optimizer_or_fewer_tensors_are_refused(saved, tmp_path):
    model, optimizer = build(seed=1)
    with pytest.raises(CheckpointError, match="groups of parameters"):
        load_shards(saved, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    save_shards(tmp_path / "alone", model=model, optimizer=None)
    refused(tmp_path / "alone", r"optimizer\.json: missing")
    del model.value_head
    with pytest.raises(CheckpointError, match=r"1 tensors are not in the model, first model\.value_head\.weight"):
        load_shards(saved, model=model, optimizer=optimizer)


def _rewrite_header(file: Path, **changes: str) -> None:
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    save_file(load_file(file), file, metadata=header | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": "2"}, "format_version must be 1, got 2"),
        ({"format": "pt"}, "is no shard file of a checkpoint"),
        ({"pieces": "{"}, "is damaged"),
        ({"pieces": '{"a": {"global_shape": [1], "offset": [0], "shape": [1], "dtype": "__import__"}}'}, "is damaged"),
    ],
    ids=["newer", "foreign", "broken index", "no type"],
)
def test_unusable_header_is_an_error(saved, changes, message):
    (file,) = saved.glob("*.safetensors")
    _rewrite_header(file, **changes)
    refused(saved, message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("*.safetensors", content, "is damaged") for content in (b"", b"\xff" * 100, b"{}")),
        *(("optimizer.json", content, "is damaged") for content in (b"", b"[]", b"{}")),
        ("optimizer.json", b'{"format_version": 9}', "must be 1, got 9"),
    ],
)
def test_damaged_file_is_an_error(saved, name, content, message):
    (file,) = saved.glob(name)
    file.write_bytes(content)
    refused(saved, message)


def test_copied_file_is_an_error(saved):
    (file,) = saved.glob("*.safetensors")
    shutil.copy(file, saved / "copy.safetensors")
    refused(saved, r"(\d+) of \d+ elements .* twice\. Remove the files .* does not list")


def test_empty_or_absent_folder_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        refused(folder, "holds no shard files")
    model, optimizer = build(seed=1)
    with pytest.raises(CheckpointError, match="cannot be made"):
        save_shards(tmp_path / "absent" / "policy", model=model, optimizer=optimizer)
    assert not (tmp_path / "absent").exists(), "a rank must not bring a removed temporary back"


def test_full_disk_in_the_middle_of_a_shard(small_disk):
    model, optimizer = build(seed=1)
    train(model, optimizer, 1)
    fill(small_disk, leave_bytes=100_000)
    with pytest.raises(DiskSpaceError, match=r"policy/rank-00000.*no room.*bytes are free"):
        save_shards(small_disk / "policy", model=model, optimizer=optimizer)
    shutil.rmtree(small_disk / "policy")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two by two ranks, of which this process is the third."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.distributed.destroy_process_group()


def test_local_part_of_a_mesh_rank(mesh: DeviceMesh) -> None:
    assert rank_and_world_size() == (2, 4)
    copied = DTensor.from_local(torch.zeros(3, 2), mesh, [Replicate(), Shard(0)], run_check=False)
    part = local_part("a", copied)
    assert (part.global_shape, part.box, part.is_written_here) == ((6, 2), Box((0, 0), (3, 2)), False), "a second copy"
    split = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0), Replicate()], run_check=False)
    part = local_part("b", split)
    assert (part.name, part.global_shape, part.box) == ("b", (6, 2), Box((3, 0), (3, 2)))
    assert part.is_written_here
    assert part.local.data_ptr() == split.to_local().data_ptr(), "the memory itself"
    everywhere = DTensor.from_local(torch.zeros(3), mesh, [Replicate(), Replicate()], run_check=False)
    assert not local_part("c", everywhere).is_written_here
    assert not local_part("e", torch.zeros(3)).is_written_here, "rank 0 writes it"
    both = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0), Shard(1)], run_check=False)
    part = local_part("d", both)
    assert (part.global_shape, part.box, part.is_written_here) == ((6, 4), Box((3, 0), (3, 2)), True)
    summed = DTensor.from_local(torch.zeros(3), mesh, [Replicate(), Partial()], run_check=False)
    with pytest.raises(CheckpointError, match=r"^a: is laid out as .*P.*; checkpoints know Shard and Replicate\. Sh"):
        local_part("a", summed)


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.int64), torch.ones(3)], ids=["type", "shape"])
def test_files_that_disagree_on_a_tensor_are_damaged(tmp_path: Path, other: torch.Tensor) -> None:
    for rank, tensor in enumerate((torch.ones(2), other)):
        shape = tuple(tensor.shape)
        write_parts(tmp_path, [LocalPart("a", shape, Box((0,), shape), tensor, True)], rank=rank, world_size=2)
    with pytest.raises(CheckpointError, match="gives a another shape or type than the files before it"):
        ShardReader(tmp_path).__enter__()


def test_a_tensor_without_elements_on_this_rank_is_not_written(tmp_path: Path) -> None:
    nothing = LocalPart("a", (4, 2), Box((4, 0), (0, 2)), torch.ones(0, 2), True)
    empty = LocalPart("b", (0, 2), Box((0, 0), (0, 2)), torch.ones(0, 2), True)
    write_parts(tmp_path, [nothing, empty], rank=1, world_size=2)
    (file,) = tmp_path.glob("*.safetensors")
    assert load_file(file).keys() == {"b"}, "an empty tensor of the model is written"


def test_missing_file_of_a_rank_is_an_error(tmp_path: Path) -> None:
    half = LocalPart("a", (4,), Box((0,), (2,)), torch.ones(2), True)
    write_parts(tmp_path, [half], rank=0, world_size=2)
    whole = LocalPart("a", (4,), Box((0,), (4,)), torch.zeros(4), True)
    with ShardReader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"2 of 4 elements of a .* rank's file"):
        reader.fill(whole)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (Box((0,), (5,)), Box((5,), (5,)), None),
        (Box((0,), (5,)), Box((4,), (5,)), Box((4,), (1,))),
        (Box((), ()), Box((), ()), Box((), ())),
        (Box((0, 2), (4, 2)), Box((2, 0), (9, 9)), Box((2, 2), (2, 2))),
        (Box((0, 0), (0, 3)), Box((0, 0), (4, 3)), None),
    ],
)
def test_overlap_of_boxes(a, b, common):
    assert a.overlap(b) == common == b.overlap(a)
