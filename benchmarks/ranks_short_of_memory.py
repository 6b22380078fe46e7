"""An update of several ranks of which one has too little memory: its numbers, and what doing it again costs.

    python -m benchmarks.ranks_short_of_memory                     # a rank on each GPU
    python -m benchmarks.ranks_short_of_memory --shape=tiny --sequences=64 --mean=60 --longest=200 --room-mb=8     # CPU

Weights are random in the model's shape. The same update is made three times (a learning rate of 0 leaves the weights
as they are): with all memory; with the last rank held to `--room` of what the update took there (on a CPU to
`--room-mb` more than it holds), so that torch refuses it memory; and again after that, cut finer from the start. The
exit status says whether loss and gradient norm are the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checks import short_memory
from benchmarks.grpo_step import PROMPT_TOKENS
from benchmarks.harness import describe_lengths, draw_lengths
from benchmarks.measured import write_result
from benchmarks.shapes import SHAPES, model_of
from rlcore.algos.aggregation import Denominator
from rlcore.batching.balance import Dealer
from rlcore.batching.pack import pack, select_train
from rlcore.config.compose import load_config
from rlcore.models.shape import known_shape
from rlcore.types import Prompt, Rollout, Score, TrainBatch
from rlcore.workers.actor import Actor
from rlcore.workers.device import choose_place, join_ranks, let_segments_grow


def batch(arguments: argparse.Namespace) -> TrainBatch:
    """Random tokens, advantages and log-probabilities; the same on all ranks."""
    rng = np.random.default_rng(5)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    rollouts = []
    for index, length in enumerate(draw_lengths(arguments.sequences, arguments.mean, arguments.longest)):
        prompt = Prompt(index, tuple(rng.integers(4, vocab_size, PROMPT_TOKENS).tolist()), "gsm8k", "{}")
        answer = rng.integers(4, vocab_size, length)
        rollouts.append(Rollout(prompt, 0, answer, np.zeros(length, dtype=np.float32), "stop", 0))
    packed = pack(rollouts, [Score(0.0, {})] * len(rollouts), list(range(len(rollouts))))
    mask = packed.loss_mask.float()
    noise = [torch.from_numpy(rng.standard_normal(packed.num_tokens).astype(np.float32)) * mask for _ in range(3)]
    likely = -np.log(vocab_size) * mask
    return TrainBatch(
        packed, old_logprobs=likely + 0.1 * noise[0], ref_logprobs=likely + 0.1 * noise[1],
        old_values=None, advantages=noise[2], returns=None, importance_weights=mask,
    )  # fmt: skip


def one_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """The three updates, on this rank."""
    short_memory.prepare()
    rank, world_size = arguments.rank, arguments.ranks
    compiled = ["model.compile=true"] if torch.cuda.is_available() else []
    config = load_config(
        [f"model.path={arguments.model}", f"trainer.max_tokens_per_micro_batch={arguments.max_tokens}",
         f"runtime.num_workers={world_size}", "model.gradient_checkpointing=false", *compiled, *arguments.overrides],
        experiment="verl_gsm8k_grpo",
    )  # fmt: skip
    place = choose_place(config.runtime, config.model)
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        let_segments_grow()
    join_ranks(f"file://{arguments.meeting}", rank=rank, world_size=world_size, device=place.device)
    mesh = init_device_mesh(place.device.type, (world_size,))
    actor = Actor(config, str(arguments.model), place, mesh)
    whole = batch(arguments)
    shares = (
        Dealer(
            num_ranks=world_size,
            max_tokens=arguments.max_tokens,
            shape=known_shape(actor.model.decoder.config.to_dict()),
        )
        .deal(whole.packed, whole.packed.num_sequences)
        .whole
    )
    mine = select_train(whole, shares.sequences[rank])
    counts = Denominator(whole.packed.num_loss_tokens, whole.packed.num_sequences, arguments.longest)

    def update() -> dict[str, float]:
        dist.all_reduce(torch.zeros(1, device=place.device))  # begin together
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        found = actor.update(mine, shares.num_micro, counts, lr=0.0, kl_coef=0.001)
        loss = torch.tensor(float(found.stats.pg_loss), device=place.device)
        dist.all_reduce(loss)
        seconds = time.perf_counter() - start
        need = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        return {"pg_loss": loss.item(), "grad_norm": found.grad_norm, "seconds": seconds, "need_bytes": need}

    update()  # compilers, and the moments of AdamW
    found: dict[str, Any] = {"micro_batches": shares.num_micro, "unforced": update()}
    limit: AbstractContextManager[None] = nullcontext()
    if rank == world_size - 1:
        found["room_bytes"] = round(found["unforced"]["need_bytes"] * arguments.room) or arguments.room_mb << 20
        limit = short_memory.short_of_memory(found["room_bytes"], place.device)
    with limit:
        found["forced"], found["after"] = update(), update()
    budget = actor.update_pass
    told = [str(shortage) for shortage in budget.take_shortages()]
    return found | {"passes_redone": budget.num_failures, "factor": budget.factor, "told": told}


def main() -> int:
    """Run the ranks, print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3.2-1b")
    parser.add_argument("--sequences", type=int, default=320, help="of all ranks")
    describe_lengths(parser)
    parser.add_argument("--max-tokens", type=int, default=32_768, help="of a micro-batch")
    parser.add_argument("--room", type=float, default=0.7, help="share of its need that the last rank gets")
    parser.add_argument("--room-mb", type=int, default=8, help="on a CPU")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--model", type=Path, help="folder for the model; kept and used again")
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(one_rank(arguments)), flush=True)
        os._exit(0)  # gloo's threads
    with tempfile.TemporaryDirectory() as scratch:
        found = all_ranks(arguments, model_of(arguments, Path(scratch)), Path(scratch) / "meeting")
    print(json.dumps(found, indent=1))
    if arguments.write:
        print(write_result("ranks_short_of_memory", found))
    return 0 if found["same"] else 1


def all_ranks(arguments: argparse.Namespace, model: Path, meeting: Path) -> dict[str, Any]:
    """Each in a process of its own, on a GPU of its own where there are some."""
    command = [sys.executable, "-m", "benchmarks.ranks_short_of_memory", *sys.argv[1:]]
    processes = [
        subprocess.Popen(
            [*command, f"--model={model}", f"--meeting={meeting}", f"--rank={rank}", f"--ranks={arguments.ranks}"],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": str(rank)} if torch.cuda.is_available() else {})},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(arguments.ranks)
    ]  # fmt: skip
    ranks = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a rank ended with {process.returncode}")
        ranks.append(json.loads(output.splitlines()[-1]))
    last = ranks[-1]
    relative = 1e-3 if torch.cuda.is_available() else 2e-5
    same = all(
        abs(rank[made][name] - rank["unforced"][name]) <= relative * abs(rank["unforced"][name]) + 1e-6
        for rank in ranks
        for made in ("forced", "after")
        for name in ("pg_loss", "grad_norm")
    )
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "shape": arguments.shape,
        "same": same and last["passes_redone"] > 0 and not any(rank["passes_redone"] for rank in ranks[:-1]),
        "ranks": ranks,
    }


if __name__ == "__main__":
    sys.exit(main())
