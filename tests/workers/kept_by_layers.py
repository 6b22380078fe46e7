"""Print as JSON the bytes per token that autograd keeps of a bfloat16 layer, plain and partitioned by torch.compile.

Program for test_memory_plan.py, since the tests' live shape checks cannot be compiled.

python -m tests.workers.kept_by_layers
"""

import json
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

NUM_TOKENS = 64
SHAPE = {"hidden_size": 256, "intermediate_size": 1_024, "num_attention_heads": 4, "num_key_value_heads": 2}


@torch.library.custom_op("millrace_test::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Save what a flash kernel saves (operands, output and normalizer), with its shapes but not its values."""
    return query + key.mean() + value.mean(), query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("millrace_test::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the right shapes."""
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = attention_backward(grad.contiguous(), *ctx.saved_tensors)
    return found


attention.register_autograd(_backward, setup_context=_keep)


def _by_layer(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    packed = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attention(*packed)[0][None], None


def kept(*, compiled: bool) -> float:
    """Return bytes per token, each storage once, without weights and rotary tables."""
    config = LlamaConfig(attn_implementation="millrace_test", **SHAPE)
    layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16).train()
    if compiled:  # the default backend's partitioner without code generation
        layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition")
    hidden = torch.randn(1, NUM_TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True) * 1.0
    tables = LlamaRotaryEmbedding(config)(hidden, torch.arange(NUM_TOKENS)[None])
    not_counted = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tables)}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(hidden, position_embeddings=tables)
    out.float().sum().backward()
    return sum(tensor.untyped_storage().nbytes() for at, tensor in held.items() if at not in not_counted) / NUM_TOKENS


if __name__ == "__main__":
    AttentionInterface.register("millrace_test", _by_layer)
    print(json.dumps({"shape": SHAPE, "plain": kept(compiled=False), "compiled": kept(compiled=True)}))
