"""TRL's GRPOTrainer and ours beside each other: same model, prompts, batch, steps and algorithm.

    pip install --target TRL_FOLDER --no-deps trl==1.16.0
    python -m benchmarks.vs_trl --trl-site TRL_FOLDER                     # CPU: reward and samples/s, some minutes
    python -m benchmarks.vs_trl --device cuda --trl-site TRL_FOLDER       # GPU: vLLM colocated in both
    python -m benchmarks.vs_trl --device cuda --only trl-fp32 --out DIR   # one side; `ours`, `trl-bf16` likewise
    python -m benchmarks.vs_trl --device cuda --combine DIR --write       # the table of what lies there
    python -m benchmarks.vs_trl --device cuda --experiment smollm2_countdown --only trl-fp32 ours --engine-share 0.25

Each side has a fresh process of its own, one after the other. TRL gets its best settings: the largest micro-batch that
is fast, no gradient checkpointing, SDPA, fused AdamW, and no log-probability or reference pass that it does not need.

GPU: one GPU's share of veRL's Llama-3.2-1B benchmark (128 prompts of 107 tokens x 5, four updates, reference), random
weights. TRL pads its batches, so `--lengths equal` (every answer has the mean length) is its best case; with
`--lengths drawn` (geometric, to 1,024) it computes mostly padding. Memory is the most that the driver has in use by the
whole process, engine included. Sides: trl-fp32 (float32 master weights under bfloat16 autocast, as lr 1e-6 needs),
trl-bf16 (bfloat16 weights and optimizer), ours (float32 master weights).

`--experiment` (on a CPU: countdown_demo, transformers' generation in both, float32): both sides learn from the same
supervised start, and one judge takes the held-out reward every 20 steps.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.vs_trl.gpu import prepare_shape
from benchmarks.vs_trl.learning import held_out, prepare_experiment
from benchmarks.vs_trl.run import run_side
from benchmarks.vs_trl.table import show, summary

SIDES = {"cuda": ("trl-fp32", "ours", "trl-bf16"), "cpu": ("trl", "ours")}


def main() -> None:
    """Run the sides, print the table."""
    arguments = parsed()
    if arguments.combine:
        found = [json.loads(file.read_text()) for file in sorted(arguments.combine.glob("*.json"))]
    else:
        found = measure(arguments)
    told = summary(found)
    show(told)
    if arguments.write:
        from benchmarks.measured import write_result

        print(write_result(f"vs_trl_{arguments.device}", told))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every wanted side, `--repeats` times in turn; each report also goes to --out."""
    reports = []
    learning = arguments.experiment or (arguments.device == "cpu" and not arguments.random)
    prepare = prepare_experiment if learning else prepare_shape
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(arguments.repeats):
            for side in arguments.only or SIDES[arguments.device]:
                folder = Path(scratch) / f"{side}-{repeat}"
                folder.mkdir()
                job = prepare(arguments, side, folder, seed=arguments.seed + repeat, shared=Path(scratch))
                report = run_side(job, trl_site=arguments.trl_site) | {"seed": job.seed}
                reports.append(report)
                _keep(arguments, report)
                for step in (0, *job.judged_steps) if job.judged_steps else ():
                    report.setdefault("held_out", []).append(held_out(job, arguments, Path(scratch), step))
                    _keep(arguments, report)
    return reports


def _keep(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write what is known so far to --out: judging may take longer than learning."""
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        file = arguments.out / f"{report['side']}-{arguments.lengths}-{report['seed']}.json"
        file.write_text(json.dumps(report))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.vs_trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIDES, default="cpu")
    parser.add_argument("--trl-site", type=Path, help="folder with trl, put on the path of its process alone")
    parser.add_argument("--only", nargs="+", choices=sorted({side for sides in SIDES.values() for side in sides}))
    parser.add_argument("--out", type=Path, help="folder for the sides' JSON")
    parser.add_argument("--combine", type=Path, metavar="DIR", help="measure nothing: the table of DIR/*.json")
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/results")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all sides, each with a seed of its own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2, help="batches before the measured ones")
    parser.add_argument("--steps", type=int, help="measured batches (5; with learning curves 60 less the warm-up)")
    parser.add_argument("--experiment", help="learn this experiment from its warm start (CPU: countdown_demo)")
    parser.add_argument("--threads", type=int, help="torch threads of each side (4 beside a GPU, else 1)")
    parser.add_argument("--root", type=Path, help="folder for the experiment's data and model; kept and used again")
    shape = parser.add_argument_group("with random weights")
    shape.add_argument("--random", action="store_true", help="on a CPU too: to rehearse, with --shape tiny")
    shape.add_argument("--shape", default="llama3.2-1b")
    shape.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
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
    return parser.parse_args()


if __name__ == "__main__":
    main()
