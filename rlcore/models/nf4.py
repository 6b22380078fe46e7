"""Frozen linear layers in 4 bits (NF4, Dettmers et al. 2023). A weight is one of 16 levels times the scale of its
block.

The format and the dequantization kernel are those of bitsandbytes. The quantizer of bitsandbytes is not used, because
it divides approximately on a GPU. Quantized weights, digests and exports are therefore the same on every device."""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

BLOCK = 64
"""The number of weights in a block, which has one scale. Blocks follow each other along the rows of a matrix."""
# The number of blocks quantized together: 17 million weights, whose float32 temporaries take 300 MB.
_CHUNK = 1 << 18
_CODES = tuple(range(0x01, 0x100, 0x22))  # 0 and 1, 2 and 3, ... 14 and 15, two in a byte


class Nf4Linear(nn.Module):
    """A linear layer with a frozen 4-bit weight: two codes per byte, a scale per block. The output has the input's
    type."""

    packed: UInt8[Tensor, "bytes"]
    scales: Float[Tensor, "blocks"]

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        packed, scales = quantize_weight(layer.weight.detach().to(device))
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = None if layer.bias is None else layer.bias.requires_grad_(False)

    def forward(self, x: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch M"]:
        """Compute x W^T + bias."""
        output: Tensor = nf4_linear(x, self.packed, self.scales, self.bias, self.out_features)
        return output

    def dequantized(self, gather: Callable[[Tensor], Tensor]) -> Float[Tensor, "M N"]:
        """Return the weight in its original type. `gather` returns a buffer on the device, even if it is offloaded."""
        return dequantize_weight(
            gather(self.packed), gather(self.scales), (self.out_features, self.in_features), self.dtype
        )


def quantize_nf4(model: PreTrainedModel, device: torch.device) -> None:
    """Replace each linear layer except the head, one at a time, so that the device never holds the whole model."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layer = cast(nn.Linear, model.get_submodule(name))
        setattr(model.get_submodule(parent), leaf, Nf4Linear(layer, device).train(layer.training))


def is_in_4_bits(model: nn.Module) -> bool:
    """Return whether a model has 4-bit layers."""
    return any(isinstance(module, Nf4Linear) for module in model.modules())


def num_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters, including 4-bit weights."""
    in_4_bits = (one.in_features * one.out_features for one in model.modules() if isinstance(one, Nf4Linear))
    return sum(parameter.numel() for parameter in model.parameters()) + sum(in_4_bits)


def quantize_weight(weight: Float[Tensor, "M N"]) -> tuple[UInt8[Tensor, "bytes"], Float[Tensor, "blocks"]]:
    """Return the codes (two per byte, the first in the high half) and the float32 scale of each block, which is its
    largest absolute value. The last block is padded with 0."""
    _have_bitsandbytes()
    zeros = -weight.numel() % BLOCK
    blocks = functional.pad(weight.reshape(-1), (0, zeros)).view(-1, BLOCK)
    every = torch.tensor(_CODES + (0,) * (BLOCK // 2 - len(_CODES)), dtype=torch.uint8)
    levels = dequantize_weight(every, torch.ones(1), (1, 16), torch.float32)[0].to(weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    packed, scales = [], []
    for part in blocks.split(_CHUNK):
        largest = part.float().abs().amax(dim=1)
        relative = part.float() * (1 / largest.clamp(min=1e-38))[:, None]
        codes = torch.bucketize(relative, between, out_int32=True).to(torch.uint8)
        packed.append((codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1))
        scales.append(largest)
    return torch.cat(packed), torch.cat(scales)


def dequantize_weight(
    packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Float[Tensor, "M N"]:
    """Return the weights, level x scale in float32, rounded once to `dtype`."""
    flat = torch.ops.bitsandbytes.dequantize_4bit.default(packed, scales, BLOCK, "nf4", [2 * len(packed)], dtype)
    return cast(Tensor, flat).view(-1)[: shape[0] * shape[1]].view(shape)


# One operator per direction: autograd keeps only the packed weight, and the compiler cannot merge the two
# dequantizations into one tensor that lives until backward.


@torch.library.custom_op("millrace::nf4_linear", mutates_args=())
def nf4_linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Compute x W^T + bias. Only x receives a gradient."""
    return functional.linear(x, dequantize_weight(packed, scales, (out_features, x.shape[-1]), x.dtype), bias)


@torch.library.custom_op("millrace::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(gradient: Tensor, packed: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """Return the gradient of x in `nf4_linear`."""
    return gradient @ dequantize_weight(packed, scales, (gradient.shape[-1], in_features), gradient.dtype)


@nf4_linear.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@nf4_linear_backward.register_fake
def _(gradient: Tensor, packed: Tensor, scales: Tensor, in_features: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], in_features)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scales, _, _ = inputs
    ctx.save_for_backward(packed, scales)
    ctx.in_features = x.shape[-1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return nf4_linear_backward(gradient, *ctx.saved_tensors, ctx.in_features), None, None, None, None


nf4_linear.register_autograd(_backward, setup_context=_setup_context)


def _have_bitsandbytes() -> None:
    """Import bitsandbytes. `require_base` has already checked that bitsandbytes is installed."""
    if "bitsandbytes" in sys.modules:
        return
    # With the package `kernels` it would download and run code from the hub for some CPUs; without, it logs an error.
    hub = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("bitsandbytes")
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hub)
