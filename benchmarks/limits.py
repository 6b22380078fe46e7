"""Measured rates of a device and the least seconds of a step at these rates."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of this device: bfloat16 matrix products in FLOP/s, memory traffic in bytes/s."""

    matrix_flops: float
    memory_bytes: float


def measure_rates(device: torch.device) -> Rates:
    """Measure a product of 8,192 squares and a copy of 2 GiB, far smaller on a CPU. The best of several runs counts."""
    on_gpu = device.type == "cuda"
    size, elements = (8_192, 1 << 30) if on_gpu else (512, 1 << 22)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    product_s = _best_seconds(lambda: torch.mm(left, right), device)
    copy_s = _best_seconds(lambda: target.copy_(source), device)
    return Rates(2 * size**3 / product_s, 2 * source.nbytes / copy_s)


def _best_seconds(work: Any, device: torch.device) -> float:
    best = float("inf")
    for _ in range(10):
        wait_for(device)
        begun = time.perf_counter()
        for _ in range(5):
            work()
        wait_for(device)
        best = min(best, (time.perf_counter() - begun) / 5)
    return best


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step on one device.

    `body`, `head`: parameters of the layers and of the output head. `tokens` go through the body, `answer_tokens` also
    through the head. `reference`, `old_pass`: whether these forward passes exist. `attended`: pairs of tokens in causal
    attention, summed over sequences. `width`: query heads x head size.
    """

    body: int
    head: int
    tokens: int
    answer_tokens: int
    longest_answer: int
    updates: int
    reference: bool
    old_pass: bool
    attended: int
    width: int
    layers: int

    @property
    def forward_flops(self) -> float:
        """FLOP of one forward pass: 2 for each parameter and token, 4 for each pair and head element."""
        linear = 2.0 * (self.body * self.tokens + self.head * self.answer_tokens)
        return linear + 4.0 * self.attended * self.width * self.layers


def least_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Return the seconds of each phase if only arithmetic and memory traffic took time.

    gen: the prefill's matrix products, then one read of all bfloat16 weights per token of the longest response. update:
    three forward passes' work, and 28 bytes per parameter for AdamW. update_weights: float32 reads, bfloat16 writes.
    """
    parameters = work.body + work.head
    passes = int(work.reference), int(work.old_pass)
    prompt_share = 1 - work.answer_tokens / work.tokens
    return {
        "gen": (
            prompt_share * work.forward_flops / rates.matrix_flops
            + work.longest_answer * 2 * parameters / rates.memory_bytes
        ),
        "ref": passes[0] * work.forward_flops / rates.matrix_flops,
        "old_log_prob": passes[1] * work.forward_flops / rates.matrix_flops,
        "update_actor": 3 * work.forward_flops / rates.matrix_flops
        + work.updates * 28 * parameters / rates.memory_bytes,
        "update_weights": 6 * parameters / rates.memory_bytes,
    }


def as_json(rates: Rates) -> dict[str, float]:
    return asdict(rates)
