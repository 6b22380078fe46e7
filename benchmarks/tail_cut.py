"""Measure the effect of a tail cut (`rollout.finish_share`) on the speed, or on held-out rewards and step times.

    python -m benchmarks.tail_cut --ranks 2 --prompts 128 --out speed.json               # on two GPUs
    python -m benchmarks.tail_cut --experiment smollm2_countdown --seeds 1 2 3 --out curves.json
    python -m benchmarks.tail_cut --shape tiny --engine hf --prompts 20 --mean 12 --longest 64 --steps 3    # rehearsal

With a tail cut, a step trains on the first groups of responses that are finished. The other groups continue in the next
step. `rollout.finish_share` is the share of groups that a step finishes.

Without --experiment, the steps are those of `benchmarks.grpo_step` with an importance correction. Response lengths are
geometrically distributed and determined by the responses' seeds. The geometric distribution is memoryless, so the
remaining length of a continued response is drawn in the same way. With --experiment, `millrace train` runs each seed
with each value of `rollout.finish_share`. Finished runs are not repeated. Other arguments are overrides of settings.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.grpo_step import describe_step, settings
from benchmarks.harness import FixedLengths, run_steps
from benchmarks.seeds import read_seed
from benchmarks.shapes import model_of
from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal

CORRECTION = "algo.importance.mode=truncate"
CARRIED = ("rollout/cut_length", "rollout/carried_groups", "rollout/carried_tokens", "rollout/stale_token_share")


class SeededLengths(FixedLengths):
    """A `WorkerGroup` whose response lengths are geometrically distributed and determined by the responses' seeds."""

    mean = 1.0

    def _limited(self, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        def limited(request: Any, longest: int) -> Any:
            drawn = int(np.random.default_rng(request.seed).geometric(1 / self.mean))
            return replace(request, max_tokens=min(drawn, request.limit(longest)))

        return [
            ([limited(one, longest) for one in requests], sampling, longest, *more)
            for requests, sampling, longest, *more in arguments
        ]


def speed(arguments: argparse.Namespace, directory: Path, share: float) -> dict[str, Any]:
    chosen = argparse.Namespace(**{**vars(arguments), "overrides": list(arguments.overrides)})
    chosen.overrides += [CORRECTION, f"rollout.finish_share={share}"]
    config = settings(chosen, directory, ranks=arguments.ranks)
    group = SeededLengths(config, directory, ())
    group.mean = arguments.mean
    print(f"share {share:g}", flush=True)
    steps = run_steps(config, directory, group, warm_up=arguments.warm_up, measured=arguments.steps)
    found = [result.metrics for result in steps.results]
    seconds = sum(metrics["perf/time_per_step"] for metrics in found)
    tokens = sum(metrics["perf/total_num_tokens"] for metrics in found)
    return {
        "share": share,
        "steps": len(found),
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(found),
        "gen_s": statistics.median(metrics["timing_s/gen"] for metrics in found),
        **{name: statistics.mean(one[name] for one in found) for name in CARRIED if name in found[0]},
    }


def curve(arguments: argparse.Namespace, seed: int, share: float) -> dict[str, Any]:
    words = [f"experiment={arguments.experiment}", f"seed={seed}", CORRECTION, f"rollout.finish_share={share}"]
    words += arguments.overrides
    subprocess.run([sys.executable, "-m", "flows.cli", "train", *words], check=True)
    layout = RunLayout.of(load_config(words))
    found = [record.metrics for record in read_journal(layout.journal) if record.step > 1]  # the first step compiles
    return {
        "share": share,
        **read_seed(layout),
        "step_s": statistics.median(metrics["perf/time_per_step"] for metrics in found),
        "gen_s": statistics.median(metrics["timing_s/gen"] for metrics in found),
        **{name: statistics.mean(one[name] for one in found) for name in CARRIED if name in found[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_step(parser)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.9])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the batch")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--experiment", help="train this experiment instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_intermixed_args()
    if arguments.experiment:
        runs = [curve(arguments, seed, share) for seed in arguments.seeds for share in arguments.shares]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            directory = model_of(arguments, Path(scratch))
            runs = [speed(arguments, directory, share) for share in arguments.shares]
        print(
            f"{runs[-1]['tokens_per_s'] / runs[0]['tokens_per_s']:.3f} times the tokens/s of share {runs[0]['share']:g}"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    text = json.dumps({"what": "tail cut", "device": device, "command": sys.argv[1:], "runs": runs}, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
