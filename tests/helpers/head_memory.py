"""The peak memory of log-probabilities and entropies, with the chunked head and with full logits.

python -m tests.helpers.head_memory VERSION ENTROPY TOKENS CHUNK_TOKENS HIDDEN DEVICE DTYPE     # prints bytes

The result is the highest resident memory (CPU) or the allocator's peak (CUDA). The memory before the measurement is
subtracted, so weights and inputs do not count.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from rlcore.models.head import token_logprobs_and_entropy

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 150_000


def chunked_over_full(
    entropy: str, *, tokens: int = 8_192, chunk_tokens: int = 2_048, hidden: int = 64, device: str = "cpu",
    dtype: str = "float32",
) -> float:  # fmt: skip
    """Return the ratio of the peaks, each measured in a new process. On a CPU, full logits of the default size take
    about 25 GB. `hidden` is small, so that the logits dominate. `entropy`: "value", or "grad" for its gradient too.
    """
    # Large tensors get fresh pages that are released with them, so that resident memory follows the tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}
    peaks = []
    for version in ("chunked", "full"):
        words = map(str, (version, entropy, tokens, chunk_tokens, hidden, device, dtype))
        done = subprocess.run(
            [sys.executable, "-m", __name__, *words], cwd=ROOT, env=environment, capture_output=True, text=True,
            check=False, timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    return peaks[0] / peaks[1]


def measure(version: str, entropy: str, tokens: int, chunk_tokens: int, hidden: int, device: str, dtype: str) -> int:
    """Return the peak memory of one forward and backward pass, minus the memory that was in use before, in bytes."""
    generator = torch.Generator().manual_seed(0)
    shape = {"dtype": getattr(torch, dtype), "device": device}
    states = torch.randn(tokens, hidden, generator=generator).to(**shape).requires_grad_()
    weight = torch.randn(VOCAB, hidden, generator=generator).to(**shape).requires_grad_()
    targets = torch.randint(VOCAB, (tokens,), generator=generator).to(device)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident_bytes("VmRSS")
    if version == "full":
        logprobs, entropies = full_logits(states, weight, targets, with_gradient=entropy == "grad")
    else:
        found = token_logprobs_and_entropy(
            states, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens, entropy=entropy
        )
        logprobs, entropies = found.logprobs, found.entropy
    loss = logprobs.mean() + (entropies.mean() if entropy == "grad" else 0)
    loss.backward()
    if on_gpu:
        return torch.cuda.max_memory_allocated() - before
    return (
        resident_bytes("VmHWM") - before
    )  # not `ru_maxrss`, which begins with that of the process that starts this one


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def full_logits(states: Tensor, weight: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    logprobs = (states @ weight.t()).float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(with_gradient):
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return chosen, entropies


if __name__ == "__main__":
    print(measure(*sys.argv[1:3], *map(int, sys.argv[3:6]), *sys.argv[6:8]))
