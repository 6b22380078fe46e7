"""Later weight syncs copy each tensor in place, on a model with vLLM's layout."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.errors import EngineError
from rlcore.rollout.engine import WeightSyncResult
from rlcore.rollout.vllm.weights import SentWeights, _engine_tensor, _local_shard, load_weights

PARTS = {  # a matrix of vLLM's: the transformers matrices in its rows, and how many each has
    "model.layers.0.self_attn.qkv_proj": {"q_proj": 4, "k_proj": 2, "v_proj": 2},
    "model.layers.0.mlp.gate_up_proj": {"gate_proj": 6, "up_proj": 6},
    "model.layers.0.mlp.down_proj": {"down_proj": 4},
    "model.embed_tokens": {"embed_tokens": 5},
}


def merged() -> nn.Module:
    """Return modules with vLLM's names, in bfloat16; the embedding has more rows than the vocabulary."""
    model = nn.Module()
    for path, parts in PARTS.items():
        *above, leaf = path.split(".")
        parent = model
        for name in above:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        rows = sum(parts.values()) + 3 * (leaf == "embed_tokens")
        parent.add_module(leaf, nn.Linear(4, rows, bias=False, dtype=torch.bfloat16).requires_grad_(False))
    return model


def weights(seed: int) -> dict[str, Tensor]:
    """Return float32 tensors with transformers' names, which bfloat16 cannot represent."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{path.rpartition('.')[0]}.{name}.weight": torch.randn(rows, 4, generator=generator)
        for path, parts in PARTS.items()
        for name, rows in parts.items()
    }


def by_hand(model: nn.Module, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for path, parts in PARTS.items():
        whole = torch.cat([sent[f"{path.rpartition('.')[0]}.{name}.weight"] for name in parts]).bfloat16()
        expected[f"{path}.weight"][: len(whole)] = whole
    return expected


def first(model: nn.Module) -> SentWeights:
    """Return a weight sync done by vLLM's code."""
    sent, given = SentWeights(model), weights(0)
    model.load_state_dict(by_hand(model, given))
    list(sent.record(given.items()))
    assert sent.compare() == WeightSyncResult()
    return sent


def test_later_weight_syncs_copy_in_place() -> None:
    model = merged()
    places, later = first(model).storages(), weights(1)
    assert places is not None
    expected, addresses = by_hand(model, later), {name: one.data_ptr() for name, one in model.named_parameters()}
    sent = SentWeights(model)
    load_weights(model, None, sent.record(later.items()), frozenset(later), places)
    assert sent.compare() == WeightSyncResult()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.data_ptr() == addresses[name], "a graph reads it there"


def test_split_or_packed_tensors_have_no_storages() -> None:
    model = merged()
    sent = first(model)
    model.get_submodule("model.layers.0.mlp.down_proj").tp_size = 2
    assert sent.storages() is None
    model = merged()
    sent = first(model)
    model.get_submodule("model.embed_tokens").params_dtype = torch.float32
    assert sent.storages() is None


class Rank:
    def __init__(self, rank: int, size: int, *, columns: bool = False, replicas: int = 1) -> None:
        self.tp_rank, self.tp_size, self.num_kv_head_replicas = rank, size, replicas
        self.input_size, self.input_size_per_partition = 4, 4 // size if columns else 4


WHOLE, BIAS, EVERY = torch.arange(16.0).reshape(4, 4), torch.arange(4.0), slice(None)
WORDS = SimpleNamespace(
    shard_indices=SimpleNamespace(org_vocab_start_index=1, org_vocab_end_index=3), tp_size=2, tp_rank=1
)


@pytest.mark.parametrize(
    ("module", "leaf", "tensor", "part"),
    [
        (Rank(0, 1), "q_proj", WHOLE, EVERY),
        (Rank(1, 2), "q_proj", WHOLE, slice(2, 4)),
        (Rank(1, 2, columns=True), "o_proj", WHOLE, (EVERY, slice(2, 4))),
        (Rank(3, 4, replicas=2), "q_proj", WHOLE, slice(3, 4)),
        (Rank(3, 4, replicas=2), "k_proj", WHOLE, slice(2, 4)),
        (Rank(1, 4, replicas=2), "v_proj", WHOLE, slice(0, 2)),
        (Rank(3, 4, replicas=4), "k_proj", WHOLE, EVERY),
        (Rank(1, 2, columns=True), "o_proj", BIAS, EVERY),
        (Rank(1, 2), "q_proj", BIAS, slice(2, 4)),
        (WORDS, "embed_tokens", WHOLE, slice(1, 3)),
    ],
)
def test_rank_has_its_rows_columns_and_heads(module: Any, leaf: str, tensor: Tensor, part: Any) -> None:
    assert torch.equal(_local_shard(module, leaf, tensor), tensor[part])


def test_differing_and_uncompared_tensors() -> None:
    model, given = merged(), weights(0)
    model.load_state_dict(by_hand(model, given))
    sent = SentWeights(model)
    unknown = {"model.layers.0.mlp.nothing.weight": torch.zeros(1)}
    wide = {"model.layers.0.mlp.down_proj.weight": torch.zeros(9, 4)}
    given["model.layers.0.mlp.up_proj.weight"] += 1
    list(sent.record([*(given | wide).items(), *unknown.items()]))
    assert sent.compare() == WeightSyncResult(("model.layers.0.mlp.up_proj.weight",), (*unknown, *wide))
    nothing = SentWeights(model)
    list(nothing.record(unknown.items()))
    assert nothing.compare() == WeightSyncResult((), tuple(unknown))


def test_vllm_loads_first_weight_sync_on_gpu() -> None:
    class Loading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, device="meta"))  # not on a CPU
            self.loaded: list[str] = []

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            self.loaded += [name for name, _ in weights]

    model = Loading()
    load_weights(model, None, iter([("a", WHOLE), ("b", WHOLE)]), frozenset({"a", "b"}))
    assert model.loaded == ["a", "b"]
    with pytest.raises(EngineError, match="1 parameters were not sent, first 'b'"):
        load_weights(model, None, iter([("a", WHOLE)]), frozenset({"a", "b"}))


class Packed:
    """Kernel with a matrix in another form, here with its sign flipped."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x.float() @ -layer.weight.float().T


class VocabParallelEmbedding(nn.Embedding):
    """Class with vLLM's name, and its weight as sent."""


def test_packed_matrix_is_read_by_multiplying() -> None:
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    layer.quant_method, layer.input_size_per_partition = Packed(), 4
    assert torch.equal(_engine_tensor(layer, "weight"), -layer.weight.float())
    layer.params_dtype = torch.bfloat16
    held = _engine_tensor(layer, "weight")
    assert held.dtype == torch.bfloat16
    assert torch.equal(held, -layer.weight)
    assert torch.equal(_engine_tensor(layer, "bias"), layer.bias), "no method is asked for a bias"
    away = nn.Linear(4, 3, device="meta")
    away.quant_method, away.input_size_per_partition = Packed(), 4
    assert _engine_tensor(away, "weight") is not None
    assert _engine_tensor(away, "weight").device.type == "meta", "a GPU holds matrices as they are"


def test_embedding_and_missing_weights_are_not_multiplied() -> None:
    embedding = VocabParallelEmbedding(5, 4)
    embedding.quant_method = Packed()
    assert _engine_tensor(embedding, "weight") is embedding.weight
    assert _engine_tensor(embedding, "bias") is None
    plain = nn.Linear(4, 3)
    assert torch.equal(_engine_tensor(plain, "weight"), plain.weight)
    plain.params_dtype = torch.bfloat16
    assert _engine_tensor(plain, "bias").dtype == torch.bfloat16, "the type in which it was sent"
