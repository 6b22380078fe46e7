r"""Compare TRL's GRPOTrainer with our trainer on the same model, prompts, batch, steps and algorithm.

    pip install --target TRL_FOLDER --no-deps trl==1.16.0
    python -m benchmarks.vs_trl --trl-site TRL_FOLDER                     # CPU: reward and samples/s, some minutes
    python -m benchmarks.vs_trl --device cuda --trl-site TRL_FOLDER       # GPU: vLLM colocated in both
    python -m benchmarks.vs_trl --device cuda --only trl-fp32 --out DIR   # one side; also `ours`, `trl-bf16`
    python -m benchmarks.vs_trl --device cuda --combine DIR --write       # the table of DIR
    python -m benchmarks.vs_trl --device cuda --experiment smollm2_countdown --only trl-fp32 ours --engine-share 0.25 \
        --out DIR
    python -m benchmarks.vs_trl --judge DIR                               # evaluate saved weights

The trainers (sides) run one after the other, each in a new process. TRL runs with the settings that make it fastest:
the best micro-batch, no gradient checkpointing, SDPA, fused AdamW, and no unneeded forward pass.

On a GPU, all sides run one GPU's share of verl's Llama-3.2-1B benchmark with random weights. This share has 128 prompts
of 107 tokens with 5 responses each, four updates, and a reference policy. TRL pads its batches, so `--lengths equal` is
its best case. With `--lengths drawn` (geometric, up to 1,024) TRL computes mostly padding. Memory is the peak that the
driver reports for the whole GPU. The sides are trl-fp32 (float32 master weights, bfloat16 autocast), trl-bf16 (weights
and optimizer in bfloat16), and ours. Updates at the learning rate 1e-6 are too small to change most bfloat16 weights.

With `--experiment`, all sides learn from the same initial policy and save their weights every 20 steps. On a CPU, the
default is `--experiment countdown_demo`, in float32 and with generation by transformers. After training, one process
evaluates the saved weights of all sides on the held-out problems with the engine `--engine`. The process adds the
rewards to the reports in DIR.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from benchmarks.vs_trl.job import Job
from benchmarks.vs_trl.prepare import prepare_experiment, prepare_random
from benchmarks.vs_trl.sides import start
from benchmarks.vs_trl.table import show, summary

SIDES = {"cuda": ("trl-fp32", "ours", "trl-bf16"), "cpu": ("trl", "ours")}


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as scratch:
        out = (arguments.combine or arguments.judge or arguments.out or Path(scratch, "out")).resolve()
        if not (arguments.combine or arguments.judge):
            measure(arguments, out, Path(scratch))
        if not arguments.combine and any(out.glob("*/step-0")):
            _start("evaluation", str(out), arguments.engine, threads=arguments.threads)
        found = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    table = summary([one for one in found if "step_s" in one])  # an interrupted side has no step_s
    show(table)
    if arguments.write:
        print(write_result(f"vs_trl_{arguments.device}", table))


def measure(arguments: argparse.Namespace, out: Path, scratch: Path) -> None:
    """Run each chosen trainer `--repeats` times. Each run writes a report and a folder of the same name to `out`."""
    learning = arguments.experiment or (arguments.device == "cpu" and not arguments.random)
    prepare = prepare_experiment if learning else prepare_random
    for seed in range(arguments.seed, arguments.seed + arguments.repeats):
        for side in arguments.only or SIDES[arguments.device]:
            folder = out / f"{side}-{arguments.lengths}-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            job = prepare(arguments, side, folder, seed=seed, shared=scratch)
            report = _run_side(job, trl_site=arguments.trl_site) | {"seed": seed}
            folder.with_suffix(".json").write_text(json.dumps(report))


def _run_side(job: Job, *, trl_site: Path | None) -> dict[str, Any]:
    begun = time.perf_counter()
    module, site = ("peer", trl_site) if job.is_trl else ("ours", None)
    _start(module, str(job.write()), threads=job.threads, site=site)
    found: dict[str, Any] = json.loads((Path(job.folder) / "report.json").read_text())
    return {
        "side": job.name,
        "device": job.device,
        "engine": job.engine,
        "responses": job.prompts * job.samples,
        "updates": job.updates,
        "threads": job.threads,
        "micro_batch": job.micro_batch if job.is_trl else None,
        "engine_share": job.engine_share if job.engine == "vllm" else None,
        "lengths": _described(job.lengths),
        "overrides": [] if job.is_trl else list(job.overrides),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "command_s": round(time.perf_counter() - begun, 1),
        **found,
    }


def _start(module: str, *arguments: str, threads: int, site: Path | None = None) -> None:
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    device = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    start(["-m", f"benchmarks.vs_trl.{module}", *arguments], threads=threads, site=site, **quiet, **device)


def _described(lengths: tuple[int, ...]) -> str:
    if not lengths:
        return "as the responses end"
    if len(set(lengths)) == 1:
        return f"all {lengths[0]}"
    return f"drawn, mean {sum(lengths) / len(lengths):.0f}, longest {max(lengths)}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.vs_trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIDES, default="cpu")
    parser.add_argument("--trl-site", type=Path, help="folder with trl, added to the path of its process")
    parser.add_argument("--only", nargs="+", choices=sorted({side for sides in SIDES.values() for side in sides}))
    parser.add_argument("--out", type=Path, help="folder for JSON and weights of the sides, all in the table")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="train nothing: evaluate the weights in DIR")
    parser.add_argument("--combine", type=Path, metavar="DIR", help="measure nothing: print the table of DIR/*.json")
    parser.add_argument("--write", action="store_true", help="write the results to build/results")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all sides, each with another seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2, help="batches before the measured ones")
    parser.add_argument("--steps", type=int, help="measured batches (5; with learning curves 60 less the warm-up)")
    parser.add_argument("--experiment", help="learn this experiment from its warm start (CPU: countdown_demo)")
    parser.add_argument("--threads", type=int, help="torch threads of each side (4 with a GPU, else 1)")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="of evaluations and random weights")
    parser.add_argument("--root", type=Path, help="workspace of the experiment, reused if it exists")
    shape = parser.add_argument_group("with random weights")
    shape.add_argument("--random", action="store_true", help="also on a CPU, as a rehearsal with --shape tiny")
    shape.add_argument("--shape", default="llama3.2-1b")
    shape.add_argument("--model", type=Path, help="folder for the model, reused if it exists")
    shape.add_argument("--prompts", type=int, default=128)
    shape.add_argument("--samples", type=int, default=5)
    shape.add_argument("--prompt-tokens", type=int, default=107)
    shape.add_argument("--mean", type=int, default=183, help="mean tokens of a response")
    shape.add_argument("--longest", type=int, default=1_024, help="most tokens of drawn lengths")
    shape.add_argument("--lengths", choices=("equal", "drawn"), default="equal")
    shape.add_argument("--trl-micro", type=int, help="responses of TRL's micro-batch (40 if equal, 8 if drawn)")
    shape.add_argument("--engine-share", type=float, default=0.12, help="vLLM's share of the GPU's memory, both sides")
    parser.add_argument("overrides", nargs="*", help="settings of our side, as on the command line")
    chosen = parser.parse_args()
    chosen.threads = chosen.threads or (4 if chosen.device == "cuda" else 1)
    return chosen


if __name__ == "__main__":
    main()
