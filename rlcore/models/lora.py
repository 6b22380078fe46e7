"""Low-rank adapters (LoRA, Hu et al. 2021): y = W x + s B A x, where only A and B are trained. s is alpha / rank, or
alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023). Names, initialization and files follow PEFT.

W can be in 4 bits (NF4, Dettmers et al. 2023). Each weight is then one of 16 levels, multiplied by the scale of its
block. The format and the dequantization kernel are those of bitsandbytes. The quantizer of bitsandbytes is not used,
because its division is inexact on a GPU. Instead, Millrace has its own quantizer, so quantized weights, digests and
exports are the same on every device."""

import functools
import hashlib
import importlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int, UInt8
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlcore.config.model import LoraConfig
from rlcore.errors import ModelError
from rlcore.models.memory import digest
from rlcore.models.policy import CausalPolicy

_BASE = ".base_layer."
ADAPTERS = (".lora_A.", ".lora_B.")
BLOCK = 64
"""The number of weights in a block. Each block has one scale. A block contains consecutive weights in row order."""
# The number of blocks quantized together: 17 million weights, whose float32 temporaries take 300 MB.
_CHUNK = 1 << 18
_CODES = tuple(range(0x01, 0x100, 0x22))  # 0 and 1, 2 and 3, ... 14 and 15, two in a byte


class Nf4Linear(nn.Module):
    """A linear layer with a frozen 4-bit weight, stored as two codes per byte and one scale per block. The output has
    the input's type."""

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
        """Return the dequantized weight in the type it had before quantization. `gather` returns a buffer on the
        device, even if the buffer is offloaded."""
        return dequantize_weight(
            gather(self.packed), gather(self.scales), (self.out_features, self.in_features), self.dtype
        )


def quantize_nf4(model: PreTrainedModel, device: torch.device) -> None:
    """Replace each linear layer except the head by an `Nf4Linear`. Layers are quantized on the device one by one, so
    that the device never holds the whole unquantized model."""
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
    """Return the codes (two per byte, the first in the high half) and the float32 scale of each block. The scale is the
    largest absolute value of a weight in the block. The last block is padded with 0."""
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
    """Return the dequantized weights. Each weight is its level times the scale of its block, computed in float32 and
    rounded once to `dtype`."""
    flat = torch.ops.bitsandbytes.dequantize_4bit.default(packed, scales, BLOCK, "nf4", [2 * len(packed)], dtype)
    return cast(Tensor, flat).view(-1)[: shape[0] * shape[1]].view(shape)


# One operator per direction: autograd keeps only the packed weight, and the compiler cannot merge the two
# dequantizations into one tensor that lives until backward.


@torch.library.custom_op("millrace::nf4_linear", mutates_args=())
def nf4_linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Compute x W^T + bias, where W is dequantized from `packed` and `scales`. Only x receives a gradient."""
    return functional.linear(x, dequantize_weight(packed, scales, (out_features, x.shape[-1]), x.dtype), bias)


@torch.library.custom_op("millrace::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(gradient: Tensor, packed: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """Return the gradient with respect to the input x of `nf4_linear`. `gradient`: the gradient of the output."""
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


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter, whose matrices A [rank, in] and B [out, rank] are stored in float32."""

    def __init__(self, base: nn.Linear | Nf4Linear, lora: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        drawn = torch.empty(lora.rank, base.in_features)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, device="meta")
        device = (base.packed if isinstance(base, Nf4Linear) else base.weight).device
        self.lora_A.weight = nn.Parameter(drawn.to(device))
        self.lora_B.weight = nn.Parameter(torch.zeros(base.out_features, lora.rank, device=device))
        self.scaling = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        self.is_on = True

    def forward(self, x: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch M"]:
        """Compute the layer's output, plus the adapter's output if the adapter is enabled."""
        output: Tensor = self.base_layer(x)
        if not self.is_on:
            return output
        low, high = self.lora_A.weight.to(x.dtype), self.lora_B.weight.to(x.dtype)
        within = functional.linear(x, low)
        return output + functional.linear(within * self.scaling, high)

    def merged(self, gather: Callable[[Tensor], Tensor]) -> Float[Tensor, "M N"]:
        """Return W + s B A, summed in float32 and rounded by `stochastic_round`. `gather` unshards a tensor."""
        low, high = gather(self.lora_A.weight), gather(self.lora_B.weight)
        base = self.base_layer
        weight = base.dequantized(gather) if isinstance(base, Nf4Linear) else gather(base.weight)
        return stochastic_round(torch.addmm(weight.float(), high, low, alpha=self.scaling), weight.dtype)


def stochastic_round(exact: Float[Tensor, "M N"], dtype: torch.dtype) -> Float[Tensor, "M N"]:
    """Cast the float32 tensor `exact` to `dtype`. If `dtype` is bfloat16, round stochastically. `exact` is overwritten.

    Most adapter updates are below half the distance to the next bfloat16 number, and rounding to nearest would lose
    them. Instead, a fixed random fraction of this distance is added, and the sum is truncated. A weight without an
    update stays bit-identical."""
    if dtype != torch.bfloat16:
        return exact.to(dtype)
    bits = exact.view(torch.int32).view(-1)
    noise = _noise(exact.device)
    for part in bits.split(len(noise)):
        part += noise[: len(part)]
    bits &= -(1 << 16)  # the half of a float32 that bfloat16 has
    return exact.to(dtype)


@functools.cache
def _noise(device: torch.device) -> Int[Tensor, "C"]:
    """Return fixed random integers from 0 to 2^16 - 1. Added to the bits of a float32 before its lower 16 bits are
    dropped, they round it at random to one of the two neighboring bfloat16 numbers."""
    drawn = torch.randint(1 << 16, (1 << 22,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return drawn.to(device)


def add_adapters(policy: CausalPolicy, lora: LoraConfig, *, seed: int) -> CausalPolicy:
    """Add adapters to `policy` in place, freeze all other weights, and return `policy`. Call this before `shard`. B is
    0, and A depends only on `seed`, not on the device. Raises ModelError if the model has no linear layer of
    `lora.target_modules`."""
    policy.requires_grad_(False)
    policy.base_digest = base_digest(policy.model)
    linear = {
        name: module
        for name, module in policy.model.named_modules()
        if isinstance(module, nn.Linear | Nf4Linear)
        and module is not policy.head  # which computes by chunks from its weight alone
    }
    known = {name.rpartition(".")[2] for name in linear}
    if unknown := [name for name in lora.target_modules if name not in known]:
        raise ModelError(
            f"model.lora.target_modules: must name linear layers of the decoder, got {', '.join(unknown)}. "
            f"It has {', '.join(sorted(known))}."
        )
    generator = torch.Generator().manual_seed(seed)
    for name, module in linear.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in lora.target_modules:
            adapted = AdaptedLinear(module, lora, generator)
            setattr(policy.model.get_submodule(parent), leaf, adapted.train(policy.training))
    return policy


def frozen_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each frozen parameter, and of the packed weight and scales of each 4-bit layer."""
    yield from ((name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad)
    for prefix, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            yield from module.named_buffers(prefix)


def base_digest(model: nn.Module) -> str:
    """Return a hash (16 hex digits) of the names and values of all frozen tensors. Equal tensors give the same hash on
    every device."""
    found = hashlib.sha256()
    for name, tensor in frozen_tensors(model):
        value = tensor.detach() + 0  # -0 as 0: `digest` takes them as one on a CPU
        found.update(f"{name} {value.dtype} {tuple(value.shape)} {int(digest(value))}\n".encode())
    return found.hexdigest()[:16]


@contextmanager
def without_adapters(policy: CausalPolicy) -> Iterator[None]:
    """Disable all adapters inside the `with` block."""
    adapted = [module for module in policy.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


def merged_parameters(model: nn.Module, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter with its adapter merged, under its name in a model without adapters. `gather` unshards a
    tensor."""
    for name, parameter in model.named_parameters():
        owner, is_adapted, rest = name.partition(_BASE)
        layer = model.get_submodule(owner) if is_adapted and rest == "weight" else None
        if isinstance(layer, AdaptedLinear):
            yield f"{owner}.weight", layer.merged(gather)
        elif not any(part in name for part in ADAPTERS):
            yield name.replace(_BASE, "."), gather(parameter)
    for name, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            owner = name.removesuffix(_BASE.rstrip("."))
            layer = model.get_submodule(owner)
            yield (
                f"{owner}.weight",
                layer.merged(gather) if isinstance(layer, AdaptedLinear) else module.dequantized(gather),
            )


def write_peft(adapters: Mapping[str, Tensor], lora: LoraConfig, base: str, folder: Path) -> None:
    """Write adapters into `folder` in the format that `peft.PeftModel.from_pretrained` reads. `base`: the path of the
    base model."""
    folder.mkdir()
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in adapters.items()}
    save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.target_modules),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
