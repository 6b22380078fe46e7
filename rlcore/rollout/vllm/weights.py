"""Taking over weights inside vLLM: on the device, tensor by tensor, without a host copy or a file."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.errors import EngineError

_FUSED = {  # a transformers matrix: vLLM's, in whose rows it lies, and how many of its own sizes before their end
    "q_proj": ("qkv_proj", None),
    "k_proj": ("qkv_proj", 2),
    "v_proj": ("qkv_proj", 1),
    "gate_proj": ("gate_up_proj", None),
    "up_proj": ("gate_up_proj", 1),
}
_OF_KEYS = ("k_proj", "v_proj")


def load(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]], expected: frozenset[str]) -> None:
    """Copy all weights into vLLM's model, cast to its type.

    On a GPU each tensor is copied straight into its place, which CUDA graphs hold by address. A CPU keeps matrices
    packed for its kernels, so each layer is packed again; vLLM forgets a tied head there, which would go on with the
    old weights without a word.

    Raises:
        EngineError: a tensor is unknown or was not sent.
    """
    seen: set[str] = set()
    counted = _counted(weights, expected, seen)
    with torch.no_grad():
        if next(model.parameters()).device.type == "cpu":
            _load_packed(model, model_config, counted)
        else:
            model.load_weights(counted)  # type: ignore[operator]
    if missing := sorted(expected - seen):
        raise EngineError(f"weight hand-over: {len(missing)} parameters were not sent, first {missing[0]!r}")


def _counted(
    weights: Iterable[tuple[str, Tensor]], expected: frozenset[str], seen: set[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name not in expected:
            raise EngineError(f"weight hand-over: the engine has no parameter {name!r}")
        seen.add(name)
        yield name, tensor


def _load_packed(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)  # type: ignore[operator]
    finally:  # an interrupted hand-over leaves the old weights, not a model in parts
        finalize_layerwise_reload(model, model_config)
    head, embedding = tied_head(model)
    if head is not None and embedding is not None:
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr, operator]


def tied_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Head and embedding where they share their weights, else two Nones."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    tied = head is not None and getattr(embedding, "weight", None) is getattr(head, "weight", None)
    return (head, embedding) if tied else (None, None)


def differing(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that vLLM computes with and that are not what was sent; slow, for a fault's message.

    Consumes `weights` to the end.
    """
    modules = dict(model.named_modules())
    wrong: list[str] = []
    tied: list[str] = []
    has_own_head = False
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        fused, from_end = _FUSED.get(leaf, (leaf, None))
        module = modules.get(f"{parent}.{fused}".lstrip("."))
        held = None if module is None else _held(module, kind)
        if module is None or held is None:
            continue
        part = _part(module, leaf, tensor)
        start = 0 if from_end is None else len(held) - from_end * len(part)
        if not _equal(held[start : start + len(part)], part):
            wrong.append(name)
        head = modules.get("lm_head")
        if leaf == "embed_tokens" and head is not None:
            used = _held(head, "weight")
            if used is not None and not _equal(used[: len(part)], part):
                tied = ["the head, tied to " + name]
        has_own_head |= leaf == "lm_head"
    return wrong if has_own_head else wrong + tied


def _part(module: Any, leaf: str, tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor where ranks share an engine; all of it where none does."""
    shard = getattr(module, "shard_indices", None)
    if shard is not None:  # rows of the vocabulary
        first, last = int(shard.org_vocab_start_index), int(shard.org_vocab_end_index)
        return tensor[first:last]
    size = getattr(module, "tp_size", 1)
    if size == 1:
        return tensor
    if module.input_size_per_partition != module.input_size:  # columns; its bias is whole
        return tensor if tensor.ndim == 1 else tensor.chunk(size, dim=1)[int(module.tp_rank)]
    copies = module.num_kv_head_replicas if leaf in _OF_KEYS else 1  # fewer heads than ranks: some hold the same one
    return tensor.chunk(size // copies)[int(module.tp_rank) // copies]


def _held(module: nn.Module, kind: str) -> Tensor | None:
    """A module's weight or bias as its kernel uses it: packed matrices are read by multiplying them by the identity."""
    parameter = getattr(module, kind, None)
    method = getattr(module, "quant_method", None)
    on_cpu = isinstance(parameter, Tensor) and parameter.device.type == "cpu"
    width = getattr(module, "embedding_dim", None) or getattr(module, "input_size_per_partition", None)
    if kind == "weight" and on_cpu and method is not None and isinstance(width, int):
        if type(module).__name__ == "VocabParallelEmbedding":
            return parameter
        dtype = getattr(module, "params_dtype", None) or torch.float32
        product: Tensor = method.apply(module, torch.eye(width, dtype=dtype))
        return product.t().to(dtype)  # a head's product is float32
    return parameter if isinstance(parameter, Tensor) else None


def _equal(held: Tensor, sent: Tensor) -> bool:
    return held.shape == sent.shape and torch.allclose(held.float(), sent.to(held.dtype).float(), rtol=0, atol=1e-6)
