"""The weight sync inside vLLM. Tensors are copied one by one on the device, without a host copy or a file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from rlcore.models.memory import digest
from rlcore.rollout.engine import WeightSyncResult, require_all_weights

_FUSED = {  # transformers matrix: vLLM's fused matrix, and its first row from the end, in multiples of its size
    "q_proj": ("qkv_proj", None),
    "k_proj": ("qkv_proj", 2),
    "v_proj": ("qkv_proj", 1),
    "gate_proj": ("gate_up_proj", None),
    "up_proj": ("gate_up_proj", 1),
}
_OF_KEYS = ("k_proj", "v_proj")


def load_weights(
    model: nn.Module,
    model_config: Any,
    weights: Iterable[tuple[str, Tensor]],
    expected: frozenset[str],
    places: Mapping[str, Tensor] | None = None,
) -> None:
    """Copy all weights into vLLM's model, converted to the dtype of that model. Raises EngineError if a tensor is
    unknown or was not sent. If `places` is given, each tensor is copied to its address in `places`. An earlier sync has
    recorded these addresses, which CUDA graphs use. On a CPU, each layer and a tied head are packed again for the
    kernels."""
    whole = require_all_weights(weights, expected)
    with torch.no_grad():
        if places is not None:
            for name, tensor in whole:
                places[name].copy_(tensor)
        elif next(model.parameters()).device.type == "cpu":
            _load_packed(model, model_config, whole)
        else:
            model.load_weights(whole)  # type: ignore[operator]


def _load_packed(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)  # type: ignore[operator]
    finally:  # an interrupted sync keeps the old weights
        finalize_layerwise_reload(model, model_config)
    head, embedding = tied_head(model)
    if head is not None and embedding is not None:
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr, operator]


def tied_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the output head and the embedding if they share weights, otherwise (None, None)."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    tied = head is not None and getattr(embedding, "weight", None) is getattr(head, "weight", None)
    return (head, embedding) if tied else (None, None)


@dataclass(frozen=True, slots=True)
class _SentTensor:
    """A tensor sent to vLLM. `path`: the name of the module in vLLM. `kind`: `weight` or `bias`. `rows_from_end`: the
    number of rows from the tensor's first row to the end of vLLM's fused matrix, or None if the tensor starts at row 0.
    `shape`, `digest`: the shape and the digest of this rank's shard in vLLM's dtype."""

    name: str
    path: str
    kind: str
    rows_from_end: int | None
    shape: torch.Size
    digest: Int[Tensor, ""]


class SentWeights:
    """A comparison of vLLM's weights with the sent weights. It compares digests and synchronizes the device once."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._dtype = next(model.parameters()).dtype
        self._sent: list[_SentTensor] = []
        self._unknown: list[str] = []

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, and record a digest of each for `compare`."""
        for name, tensor in weights:
            self._record_tensor(name, tensor)
            yield name, tensor

    def _record_tensor(self, name: str, tensor: Tensor) -> None:
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        fused, from_end = _FUSED.get(leaf, (leaf, None))
        place = f"{parent}.{fused}".lstrip(".")
        module = self._modules.get(place)
        if module is None:
            self._unknown.append(name)
            return
        part = _local_shard(module, leaf, tensor)
        dtype = getattr(module, "params_dtype", None) or getattr(getattr(module, kind, None), "dtype", self._dtype)
        rows = None if from_end is None else from_end * len(part)
        self._sent.append(_SentTensor(name, place, kind, rows, part.shape, digest(part.to(dtype))))

    def compare(self) -> WeightSyncResult:
        """Compare the engine's weights with the sent ones. Return the names of tensors that differ or cannot be
        compared."""
        held: list[Int[Tensor, ""]] = []
        compared: list[_SentTensor] = []
        unknown = list(self._unknown)
        whole: tuple[str, str, Tensor | None] = ("", "", None)  # q, k and v share a matrix, unpacked once
        for one in [*sorted(self._sent, key=lambda one: (one.path, one.kind)), *self._tied_head()]:
            if whole[:2] != (one.path, one.kind):
                whole = (one.path, one.kind, _engine_tensor(self._modules[one.path], one.kind))
            part = _rows(whole[2], one)
            if part is None:
                unknown.append(one.name)
                continue
            compared.append(one)
            held.append(digest(part))
        if not compared:
            return WeightSyncResult((), tuple(unknown))
        equal = (torch.stack(held) == torch.stack([one.digest for one in compared])).tolist()
        return WeightSyncResult(
            tuple(one.name for one, same in zip(compared, equal, strict=True) if not same), tuple(unknown)
        )

    def storages(self) -> dict[str, Tensor] | None:
        """Return the memory from which vLLM's kernels read each tensor, after a `compare` without differences. Return
        None if vLLM stores any tensor in another form or splits it across ranks."""
        found: dict[str, Tensor] = {}
        for one in self._sent:
            module = self._modules[one.path]
            held, parameter = _rows(_engine_tensor(module, one.kind), one), getattr(module, one.kind, None)
            if held is None or not isinstance(parameter, Tensor) or getattr(module, "tp_size", 1) > 1:
                return None
            if held.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                return None
            found[one.name] = held
        return found

    def _tied_head(self) -> list[_SentTensor]:
        """Return an entry for the output head if its weights were sent only as the embedding, otherwise an empty
        list."""
        leaves = {one.path.rpartition(".")[2]: one for one in self._sent}
        embedding = leaves.get("embed_tokens")
        if embedding is None or "lm_head" in leaves or "lm_head" not in self._modules:
            return []
        return [replace(embedding, name=f"the head, tied to {embedding.name}", path="lm_head")]


def _rows(held: Tensor | None, sent: _SentTensor) -> Tensor | None:
    """Return the part of the vLLM tensor `held` that contains the tensor `sent`, or None if vLLM stores `sent` in
    another form."""
    if held is None or held.ndim != len(sent.shape):
        return None
    start = 0 if sent.rows_from_end is None else len(held) - sent.rows_from_end
    part = held[start : start + sent.shape[0]]
    return part if part.shape == sent.shape else None


def _local_shard(module: Any, leaf: str, tensor: Tensor) -> Tensor:
    shard = getattr(module, "shard_indices", None)
    if shard is not None:  # rows of the vocabulary
        first, last = int(shard.org_vocab_start_index), int(shard.org_vocab_end_index)
        return tensor[first:last]
    size = getattr(module, "tp_size", 1)
    if size == 1:
        return tensor
    if module.input_size_per_partition != module.input_size:  # columns; the bias is not split
        return tensor if tensor.ndim == 1 else tensor.chunk(size, dim=1)[int(module.tp_rank)]
    copies = module.num_kv_head_replicas if leaf in _OF_KEYS else 1  # ranks share heads if there are fewer
    return tensor.chunk(size // copies)[int(module.tp_rank) // copies]


def _engine_tensor(module: nn.Module, kind: str) -> Tensor | None:
    """Return the weight or bias that a module's kernel uses. On a CPU the kernel has a packed copy of the weight
    matrix, so this function recovers the matrix by applying the kernel to the identity matrix."""
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
    if not isinstance(parameter, Tensor):
        return None
    return parameter.to(getattr(module, "params_dtype", None) or parameter.dtype)  # AMX kernels widen a bias
