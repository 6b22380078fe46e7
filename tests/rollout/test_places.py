"""A hand-over after the first copies each tensor straight to its place, on a model laid out as vLLM lays it out."""

import pytest
import torch
from torch import Tensor, nn

from rlcore.errors import EngineError
from rlcore.rollout.engine import TakenWeights
from rlcore.rollout.vllm.weights import SentWeights, load

PARTS = {  # a matrix of vLLM's: the transformers matrices in its rows, and how many each has
    "model.layers.0.self_attn.qkv_proj": {"q_proj": 4, "k_proj": 2, "v_proj": 2},
    "model.layers.0.mlp.gate_up_proj": {"gate_proj": 6, "up_proj": 6},
    "model.layers.0.mlp.down_proj": {"down_proj": 4},
    "model.embed_tokens": {"embed_tokens": 5},
}


def merged() -> nn.Module:
    """Modules under vLLM's names, in bfloat16; the embedding has more rows than the vocabulary, as vLLM pads it."""
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
    """Float32 tensors under transformers' names, that bfloat16 cannot hold."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{path.rpartition('.')[0]}.{name}.weight": torch.randn(rows, 4, generator=generator)
        for path, parts in PARTS.items()
        for name, rows in parts.items()
    }


def by_hand(model: nn.Module, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """What vLLM's matrices must be."""
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for path, parts in PARTS.items():
        whole = torch.cat([sent[f"{path.rpartition('.')[0]}.{name}.weight"] for name in parts]).bfloat16()
        expected[f"{path}.weight"][: len(whole)] = whole
    return expected


def first(model: nn.Module) -> SentWeights:
    """A hand-over that vLLM's own code has carried out."""
    sent, given = SentWeights(model), weights(0)
    model.load_state_dict(by_hand(model, given))
    list(sent.noted(given.items()))
    assert sent.compare() == TakenWeights()
    return sent


def test_a_later_hand_over_copies_straight_to_the_places_that_the_first_one_found() -> None:
    model = merged()
    places, later = first(model).places(), weights(1)
    assert places is not None
    expected, addresses = by_hand(model, later), {name: one.data_ptr() for name, one in model.named_parameters()}
    sent = SentWeights(model)
    load(model, None, sent.noted(later.items()), frozenset(later), places)
    assert sent.compare() == TakenWeights()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.data_ptr() == addresses[name], "a graph reads it there"


def test_a_tensor_that_gets_lost_on_the_way_is_found() -> None:
    model = merged()
    places, later = first(model).places(), weights(1)
    sent, lost = SentWeights(model), "model.layers.0.self_attn.k_proj.weight"
    on_the_way = ((name, tensor * (name != lost)) for name, tensor in sent.noted(later.items()))
    load(model, None, on_the_way, frozenset(later), places)
    assert sent.compare() == TakenWeights((lost,), ())


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_missing_and_an_unknown_tensor_are_refused(change: str) -> None:
    model = merged()
    places, later = first(model).places(), weights(1)
    expected = frozenset(later)
    tensor = later.pop("model.embed_tokens.weight")
    if change == "unknown":
        later["model.embed_tokens.weights"] = tensor
    with pytest.raises(EngineError, match=r"model\.embed_tokens\.weight"):
        load(model, None, iter(later.items()), expected, places)


def test_what_is_held_in_parts_or_another_form_has_no_places() -> None:
    model = merged()
    sent = first(model)
    model.get_submodule("model.layers.0.mlp.down_proj").tp_size = 2
    assert sent.places() is None
    model = merged()
    sent = first(model)
    model.get_submodule("model.embed_tokens").params_dtype = torch.float32
    assert sent.places() is None
