"""Measure the weak scaling of the GRPO step over the GPUs of one machine.

    python -m benchmarks.weak_scaling --gpus 2 --prompts 128 --out weak.json model.zero_stage=1
    python -m benchmarks.weak_scaling --prompts 4 --shape=tiny --engine=hf --mean=12 --longest=32   # rehearsal on a CPU

First, each GPU runs a separate `benchmarks.grpo_step` on its share of the prompts. These runs are concurrent, so that
each has its share of the CPU cores. Then all GPUs run all prompts in one `benchmarks.grpo_step`. The result is the time
of the slowest separate run divided by the time of the joint run. The slowest separate run is used, because in the joint
run all ranks wait for the slowest rank. Other options go to `benchmarks.grpo_step`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def steps_of(cards: Sequence[str], prompts: int, options: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.grpo_step", f"--ranks={len(cards)}", f"--prompts={prompts}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(cards)}
    return subprocess.Popen([*command, f"--out={out}", *options], env=environment)


def wait_for(running: Sequence[subprocess.Popen[bytes]], files: Sequence[Path]) -> list[dict[str, Any]]:
    if any([process.wait() for process in running]):
        sys.exit("a run failed, see its output above")
    return [json.loads(file.read_text()) for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=128, help="prompts of a step on each GPU")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments, options = parser.parse_known_args()
    cards = [str(card) for card in range(arguments.gpus)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{card}.json" for card in [*cards, "all"]]
        own = [steps_of([card], arguments.prompts, options, file) for card, file in zip(cards, files[:-1], strict=True)]
        alone = wait_for(own, files[:-1])
        (together,) = wait_for([steps_of(cards, arguments.gpus * arguments.prompts, options, files[-1])], files[-1:])
    found = {
        "what": "weak scaling of a GRPO step: the slowest card's own seconds over those of all cards",
        "weak": max(run["step_s"] for run in alone) / together["step_s"],
        "alone": alone,
        "together": together,
    }
    seconds = ", ".join(f"{run['step_s']:.3f}" for run in alone)
    print(f"alone {seconds} s; together {together['step_s']:.3f} s")
    print(f"weak scaling {found['weak']:.3f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
