r"""TRL's GRPOTrainer and ours beside each other: same model, prompts, batch, steps and algorithm.

    pip install --target TRL_FOLDER --no-deps trl==1.16.0
    python -m benchmarks.vs_trl --trl-site TRL_FOLDER                     # CPU: reward and samples/s, some minutes
    python -m benchmarks.vs_trl --device cuda --trl-site TRL_FOLDER       # GPU: vLLM colocated in both
    python -m benchmarks.vs_trl --device cuda --only trl-fp32 --out DIR   # one side; `ours`, `trl-bf16` likewise
    python -m benchmarks.vs_trl --device cuda --combine DIR --write       # the table of what lies there
    python -m benchmarks.vs_trl --device cuda --experiment smollm2_countdown --only trl-fp32 ours --engine-share 0.25 \
        --out DIR
    python -m benchmarks.vs_trl --judge DIR                               # the weights that the last one kept

Each side has a fresh process of its own, one after the other. TRL gets its best settings: the largest micro-batch that
is fast, no gradient checkpointing, SDPA, fused AdamW, and no log-probability or reference pass that it does not need.

GPU: one GPU's share of veRL's Llama-3.2-1B benchmark (128 prompts of 107 tokens x 5, four updates, reference), random
weights. TRL pads its batches, so `--lengths equal` (every answer has the mean length) is its best case; with
`--lengths drawn` (geometric, to 1,024) it computes mostly padding. Memory is the most that the driver has in use by the
whole process, engine included. Sides: trl-fp32 (float32 master weights under bfloat16 autocast, as lr 1e-6 needs),
trl-bf16 (bfloat16 weights and optimizer), ours (float32 master weights).

`--experiment` (on a CPU: countdown_demo, transformers' generation in both, float32): both sides learn from the same
supervised start and keep their weights every 20 steps. After that one process judges the weights of all sides in DIR on
the held-out problems, with one engine (`--engine`); each point goes to DIR as soon as it is known.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.vs_trl.gpu import prepare_shape
from benchmarks.vs_trl.learning import prepare_experiment
from benchmarks.vs_trl.run import run_side, start
from benchmarks.vs_trl.table import show, summary

SIDES = {"cuda": ("trl-fp32", "ours", "trl-bf16"), "cpu": ("trl", "ours")}


def main() -> None:
    """Run the sides, print the table."""
    arguments = parsed()
    with tempfile.TemporaryDirectory() as scratch:
        out = (arguments.combine or arguments.judge or arguments.out or Path(scratch, "out")).resolve()
        if not (arguments.combine or arguments.judge):
            measure(arguments, out, Path(scratch))
        if not arguments.combine and any(out.glob("*/step-0")):
            start("judge", str(out), arguments.engine, threads=arguments.threads)
        found = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    told = summary([one for one in found if "step_s" in one])  # a side that was cut off has none
    show(told)
    if arguments.write:
        from benchmarks.results import write_result

        print(write_result(f"vs_trl_{arguments.device}", told))


def measure(arguments: argparse.Namespace, out: Path, scratch: Path) -> None:
    """Every wanted side, `--repeats` times in turn: a report of each in `out`, and a folder of the report's name."""
    learning = arguments.experiment or (arguments.device == "cpu" and not arguments.random)
    prepare = prepare_experiment if learning else prepare_shape
    for seed in range(arguments.seed, arguments.seed + arguments.repeats):
        for side in arguments.only or SIDES[arguments.device]:
            folder = out / f"{side}-{arguments.lengths}-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            job = prepare(arguments, side, folder, seed=seed, shared=scratch)
            report = run_side(job, trl_site=arguments.trl_site) | {"seed": seed}
            folder.with_suffix(".json").write_text(json.dumps(report))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.vs_trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIDES, default="cpu")
    parser.add_argument("--trl-site", type=Path, help="folder with trl, put on the path of its process alone")
    parser.add_argument("--only", nargs="+", choices=sorted({side for sides in SIDES.values() for side in sides}))
    parser.add_argument("--out", type=Path, help="folder for JSON and weights of the sides; the table shows all there")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="train nothing: judge the weights kept in DIR")
    parser.add_argument("--combine", type=Path, metavar="DIR", help="measure nothing: the table of DIR/*.json")
    parser.add_argument("--write", action="store_true", help="keep the figures in build/results")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all sides, each with a seed of its own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2, help="batches before the measured ones")
    parser.add_argument("--steps", type=int, help="measured batches (5; with learning curves 60 less the warm-up)")
    parser.add_argument("--experiment", help="learn this experiment from its warm start (CPU: countdown_demo)")
    parser.add_argument("--threads", type=int, help="torch threads of each side (4 beside a GPU, else 1)")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="of the judge; with random weights")
    parser.add_argument("--root", type=Path, help="folder for the experiment's data and model; kept and used again")
    shape = parser.add_argument_group("with random weights")
    shape.add_argument("--random", action="store_true", help="on a CPU too: to rehearse, with --shape tiny")
    shape.add_argument("--shape", default="llama3.2-1b")
    shape.add_argument("--model", type=Path, help="folder for the model; kept and used again")
    shape.add_argument("--prompts", type=int, default=128)
    shape.add_argument("--samples", type=int, default=5)
    shape.add_argument("--prompt-tokens", type=int, default=107)
    shape.add_argument("--mean", type=int, default=183, help="mean length of answers, tokens")
    shape.add_argument("--longest", type=int, default=1_024, help="longest of drawn lengths, tokens")
    shape.add_argument("--lengths", choices=("equal", "drawn"), default="equal")
    shape.add_argument("--trl-micro", type=int, help="answers of TRL's micro-batch (40 if equal, 8 if drawn)")
    shape.add_argument("--engine-share", type=float, default=0.12, help="vLLM's share of the GPU's memory, both sides")
    parser.add_argument("overrides", nargs="*", help="settings of our side, as on the command line")
    chosen = parser.parse_args()
    chosen.threads = chosen.threads or (4 if chosen.device == "cuda" else 1)
    return chosen


if __name__ == "__main__":
    main()
