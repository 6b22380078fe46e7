"""Measure the peak memory of log-probabilities and entropies, for a chunked head and for full logits.

    python benchmarks/head_memory.py                    # 8,192 tokens; on a CPU the full version takes about 25 GB
    python benchmarks/head_memory.py --tokens=512 --chunk-tokens=128 --hidden=16        # a sixteenth of the memory

Each version runs in a separate process. The result is the highest resident memory (CPU) or the allocator's peak (CUDA).
The memory before the measurement is subtracted, so weights and inputs do not count.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 150_000
LOSSES = {"logprob": "value", "logprob-and-entropy": "grad"}  # the entropy mode; both compute the entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens of the micro-batch")
    parser.add_argument("--chunk-tokens", type=int, default=2_048, help="model.head_chunk_tokens")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size; small, so that the logits dominate")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--loss", choices=LOSSES, help="one of the two losses; both without this option")
    parser.add_argument("--one", nargs=2, metavar=("VERSION", "ENTROPY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    print(
        f"vocabulary {VOCAB:,}, {arguments.tokens:,} tokens, chunks of {arguments.chunk_tokens:,}, "
        f"hidden {arguments.hidden}, {arguments.dtype} on {arguments.device}"
    )
    for loss in [arguments.loss] if arguments.loss else LOSSES:
        full, chunked = (in_new_process(version, LOSSES[loss]) for version in ("full", "chunked"))
        print(
            f"gradient of {loss}: full logits {full / 1e9:.3f} GB, chunked {chunked / 1e9:.3f} GB, "
            f"ratio {chunked / full:.4f}"
        )


def in_new_process(version: str, entropy: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", version, entropy]
    # Large tensors get fresh pages that are released with them, so that resident memory follows the tensors.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout))


def measure(arguments: argparse.Namespace) -> int:
    """Return the peak memory of one forward and backward pass, minus the memory that was in use before, in bytes."""
    import torch

    from rlcore.models.head import token_logprobs_and_entropy

    version, entropy = arguments.one
    generator = torch.Generator().manual_seed(0)
    shape = {"dtype": getattr(torch, arguments.dtype), "device": arguments.device}
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=generator).to(**shape).requires_grad_()
    weight = torch.randn(VOCAB, arguments.hidden, generator=generator).to(**shape).requires_grad_()
    targets = torch.randint(VOCAB, (arguments.tokens,), generator=generator).to(arguments.device)
    before = held_bytes(arguments.device)
    if version == "full":
        logprobs, entropies = full_logits(hidden, weight, targets, with_gradient=entropy == "grad")
    else:
        found = token_logprobs_and_entropy(
            hidden, weight, targets, temperature=1.0, chunk_tokens=arguments.chunk_tokens, entropy=entropy
        )
        logprobs, entropies = found.logprobs, found.entropy
    loss = logprobs.mean()
    if entropy == "grad":
        loss = loss + entropies.mean()
    loss.backward()
    return peak_bytes(arguments.device) - before


def full_logits(
    hidden: "Tensor", weight: "Tensor", targets: "Tensor", *, with_gradient: bool
) -> "tuple[Tensor, Tensor]":
    """Return log-probabilities and entropies, computed from the float32 logits of all tokens."""
    import torch

    logprobs = (hidden @ weight.t()).float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(with_gradient):
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return chosen, entropies


def held_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes(device: str) -> int:
    """Return the peak memory in bytes. On a CPU, this is the peak since the process started. On CUDA, this is the peak
    since the last call of `held_bytes`."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
