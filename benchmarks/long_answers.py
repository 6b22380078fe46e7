"""Measure training steps with long responses: tokens per second, MFU, and the planned and the measured peak memory.

    python -m benchmarks.long_answers --out long.json                          # all cases of one GPU
    python -m benchmarks.long_answers --cases 1.5b-32k --memory-gb 80          # as on a card of 80 GB
    python -m benchmarks.long_answers --ranks 2 --cases 7b-32k
    python -m benchmarks.long_answers --cases tiny                             # rehearsal on a CPU

Each case is a step of `benchmarks.grpo_step` with random weights. `runtime.fit_memory=auto` chooses the settings. Each
case runs in a separate process, so that its memory is freed when the case ends. The results are written after each
case.
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import grpo_step
from benchmarks.harness import FixedLengths, draw_lengths, run_steps
from benchmarks.shapes import make_model
from rlcore.models.shape import shape_of
from rlcore.workers.memory_plan import GB, chosen_settings, detect_device, fit_settings, require_fit

_LENGTHS = ["filter.max_prompt_tokens=120", "runtime.fit_memory=auto"]


@dataclass(frozen=True, slots=True)
class Case:
    """A measured case: a shape of `benchmarks.shapes`, the number of prompts (five responses each), and the response
    lengths."""

    shape: str
    prompts: int
    mean: float
    longest: int
    engine: str = "vllm"


CASES = {
    "0.5b-8k": Case("qwen2.5-0.5b", 16, 3_000, 8_192),
    "1b-8k": Case("llama3.2-1b", 16, 3_000, 8_192),
    "1b-16k": Case("llama3.2-1b", 8, 6_000, 16_384),
    "1.5b-32k": Case("qwen2.5-1.5b", 4, 12_000, 32_640),
    "7b-8k": Case("qwen2.5-7b", 8, 3_000, 8_192),
    "7b-32k": Case("qwen2.5-7b", 4, 12_000, 32_640),
    "tiny": Case("tiny", 4, 24, 64, "hf"),
}


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps of a case in this process."""
    case = CASES[name]
    overrides = [*_LENGTHS, *arguments.overrides]
    options = argparse.Namespace(**asdict(case), ranks=arguments.ranks, scorers=4, overrides=overrides)
    lengths = draw_lengths(case.prompts * grpo_step.SAMPLES, case.mean, case.longest)
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_model(case.shape, Path(scratch) / "model")
        asked = grpo_step.settings(options, directory, ranks=arguments.ranks)
        shape, device = shape_of(asked.model), detect_device(asked)
        assert shape is not None, "the shapes of the benchmarks have a plan"
        if arguments.memory_gb is not None:
            _limit_memory(arguments.memory_gb)
            device = replace(device, total_bytes=round(arguments.memory_gb * GB))
        config, plan = fit_settings(asked, shape, device)
        require_fit(config, plan)
        print(f"{name}: {chosen_settings(asked, config)}", flush=True)
        group = FixedLengths(config, directory, lengths)
        steps = run_steps(config, directory, group, warm_up=arguments.warm_up, measured=arguments.steps)
        found = grpo_step.metrics(options, config, steps.results)
    peak_gb = max(result.metrics.get("perf/max_memory_allocated_gb", 0.0) for result in steps.results)
    return found | {
        "case": name,
        "memory_gb": None if device.total_bytes is None else device.total_bytes / GB,
        "chosen": chosen_settings(asked, config),
        "planned_gb": {phase: sum(parts.values()) / GB for phase, parts in plan.phases.items()},
        "peak_gb": peak_gb,
        "plan_over_peak": plan.peak_bytes / GB / peak_gb if peak_gb else None,
    }


def _limit_memory(gb: float) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(gb * GB / torch.cuda.get_device_properties(0).total_memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the batch")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory-gb", type=float, help="use no more of the GPU")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line")
    arguments = parser.parse_intermixed_args()
    results = []
    for name in arguments.cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                found = process.submit(measure, name, arguments).result()
            except Exception as error:  # the next case may fit
                found = {"case": name, "error": f"{type(error).__name__}: {error}"}
        results.append(found)
        print(_line(found), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=2) + "\n")


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['case']}: {found['error']}"
    mfu = "" if found["update_mfu"] is None else f", update MFU {found['update_mfu']:.3f}"
    planned = max(found["planned_gb"].values())
    return (
        f"{found['case']}: {found['step_s']:.2f} s a step, {found['tokens_per_s']:,.0f} tokens/s/GPU{mfu}, "
        f"planned {planned:.1f} GB, peak {found['peak_gb']:.1f} GB"
    )


if __name__ == "__main__":
    main()
