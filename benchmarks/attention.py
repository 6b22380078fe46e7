"""Packed attention by each kernel that runs here: forward and backward over a micro-batch of the benchmark's lengths.

    python -m benchmarks.attention --out attention.json                                # on a GPU
    python -m benchmarks.attention --shape=tiny --tokens=2048                          # rehearsal on a CPU: sdpa alone

One layer of the model's shape, bfloat16 on a GPU, through the function that the layers call. Answers have the lengths
of `benchmarks.grpo_step`, or others by --mean and --longest. Each kernel's output and gradients are compared with
float32 attention of the first sequences. TFLOP/s count the products of a causal triangle, and 2.5 times those backward.

flash-attn is measured in the version that is installed (2 or 3 by their wheels; 4 by `pip install --pre flash-attn-4`).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.grpo_step import PROMPT_TOKENS
from benchmarks.harness import describe_lengths, draw_lengths
from benchmarks.limits import wait_for
from benchmarks.shapes import SHAPES
from rlcore.errors import ModelError
from rlcore.models.attention import Backend, PackedLayout, build_layout, choose_attention, packed_attention

KERNELS: tuple[Backend, ...] = ("varlen", "flash_attn", "sdpa")
COMPARED = 4
"""Sequences whose attention is computed in float32 as well."""


def main() -> None:
    """Measure and print; with --out also as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3.2-1b")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of the micro-batch")
    describe_lengths(parser)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    found = measure(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every kernel, one after the other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = SHAPES[arguments.shape]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    width = shape.get("head_dim", shape["hidden_size"] // heads)
    bounds = torch.tensor([0, *accumulate(sequence_lengths(arguments))])
    torch.manual_seed(0)
    qkv = [torch.randn(int(bounds[-1]), n, width, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    attended = sum(length * (length + 1) // 2 for length in bounds.diff().tolist())
    forward_flops = 4.0 * attended * heads * width
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    tokens = int(bounds[-1])
    print(f"{name}: {tokens:,} tokens in {len(bounds) - 1} sequences, {heads} and {kv_heads} heads of {width}")
    kernels: dict[str, Any] = {}
    for kernel in arguments.kernels:
        try:
            choice = choose_attention(kernel, device, dtype, width)
        except ModelError as error:
            kernels[kernel] = {"left_out": str(error)}
            print(f"{kernel:<11} {error}")
            continue
        layout = build_layout(bounds, backend=choice.name, device=device)
        row = {"which": choice.reason, **apart(qkv, layout, bounds), **timed(qkv, layout, arguments.repeats)}
        row["forward_tflops"] = forward_flops / row["forward_s"] / 1e12
        row["tflops"] = 3.5 * forward_flops / row["forward_backward_s"] / 1e12
        kernels[kernel] = row
        print(
            f"{kernel:<11} forward {row['forward_s'] * 1e3:.3f} ms ({row['forward_tflops']:.0f} TFLOP/s), "
            f"with backward {row['forward_backward_s'] * 1e3:.3f} ms ({row['tflops']:.0f} TFLOP/s), "
            f"first call {row['first_s']:.1f} s; output {row['output_apart']:.1e}, "
            f"gradients {row['gradients_apart']:.1e} apart; {choice.reason}"
        )
    return {"device": name, "torch": torch.__version__, "shape": arguments.shape, "tokens": tokens, "kernels": kernels}


def sequence_lengths(arguments: argparse.Namespace) -> list[int]:
    """Of a micro-batch: prompt and answer each."""
    drawn: Iterator[int] = iter(draw_lengths(4_096, arguments.mean, arguments.longest))
    lengths = [PROMPT_TOKENS + next(drawn)]
    while sum(lengths) < arguments.tokens:
        lengths.append(PROMPT_TOKENS + next(drawn))
    lengths[-1] -= sum(lengths) - arguments.tokens
    return lengths


def attend(qkv: list[Tensor], layout: PackedLayout) -> Tensor:
    """[T, Hq, D], as a layer asks for it."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in qkv)
    out, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    return out[0]


def apart(qkv: list[Tensor], layout: PackedLayout, bounds: Tensor) -> dict[str, float]:
    """Largest difference from float32 attention, of output and of gradients, over the first sequences."""
    few = bounds[: COMPARED + 1]
    first = [tensor[: int(few[-1])] for tensor in qkv]
    short = build_layout(few, backend=layout.backend, device=qkv[0].device)
    found = _with_gradients(
        lambda parts: attend([part[short.token_order] for part in parts], short)[short.place], first
    )
    exact = _with_gradients(lambda parts: _dense(parts, few), [part.float() for part in first])
    output, *gradients = (float((one.float() - other).abs().max()) for one, other in zip(found, exact, strict=True))
    return {"output_apart": output, "gradients_apart": max(gradients)}


def _with_gradients(work: Callable[[list[Tensor]], Tensor], parts: list[Tensor]) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    out = work(leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weight).sum().backward()  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _dense(parts: list[Tensor], bounds: Tensor) -> Tensor:
    repeats = parts[0].shape[1] // parts[1].shape[1]
    q, k, v = (part.transpose(0, 1) for part in (parts[0], *(p.repeat_interleave(repeats, dim=1) for p in parts[1:])))
    edges = bounds.tolist()
    outs = [
        F.scaled_dot_product_attention(q[None, :, a:b], k[None, :, a:b], v[None, :, a:b], is_causal=True)[0]
        for a, b in pairwise(edges)
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


def timed(qkv: list[Tensor], layout: PackedLayout, repeats: int) -> dict[str, float]:
    """Seconds: median forward without gradient, median forward and backward, and the first of each together."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    gradient = torch.ones_like(qkv[0])

    def forward() -> None:
        with torch.no_grad():
            attend(qkv, layout)

    def both() -> None:
        attend(leaves, layout).backward(gradient)  # type: ignore[no-untyped-call]
        for leaf in leaves:
            leaf.grad = None

    first = _seconds(forward, gradient.device) + _seconds(both, gradient.device)
    return {
        "first_s": first,
        "forward_s": statistics.median(_seconds(forward, gradient.device) for _ in range(repeats)),
        "forward_backward_s": statistics.median(_seconds(both, gradient.device) for _ in range(repeats)),
    }


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    wait_for(device)
    begun = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
