"""Measure the wall-clock and GPU milliseconds of a vLLM step for different numbers of unfinished responses.

    python -m benchmarks.generation --out generation.json                             # on a GPU
    python -m benchmarks.generation --shape=tiny --prompts=8 --mean=12 --longest=32   # rehearsal on a CPU

Prompts have five responses each. The weights are random, and the lengths are drawn once from a geometric distribution.
The GPU time is measured in three further generations. In each of them, torch's profiler records up to 30 steps in which
the number of unfinished responses is in a given range.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.grpo_step import SAMPLES, describe_step, settings
from benchmarks.harness import PROMPT_TOKENS, draw_lengths
from benchmarks.shapes import SHAPES, model_of
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.vllm.engine import VllmEngine
from rlcore.rollout.vllm.start import EngineShape
from rlcore.types import Prompt

RANGES = ((1, 16), (17, 256), (257, 512), (513, 10**6))  # of unfinished responses, each a row of the table
PROFILED = {"tail": (1, 8), "middle": (60, 160), "wide": (300, 640)}  # in which the profiler records up to 30 steps
PROFILED_STEPS = 30


class Generation:
    """The generation of a batch of responses by vLLM. A caller may replace `step` to measure it."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments, self._vocab = arguments, SHAPES[arguments.shape]["vocab_size"]
        arguments.overrides = [*arguments.overrides, "rollout.sleep_level=0"]
        self._config = settings(arguments, directory)
        device, longest = torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.longest
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = EngineShape(str(directory), 128 + longest, arguments.prompts * SAMPLES, device, dtype)
        self._engine = VllmEngine(shape, self._config.rollout, eos_token_ids=frozenset([1]))
        for parameter in self._engine.model.parameters():
            parameter.data.normal_(0, 0.02)
        self._engine.policy_version = 0
        core = self._engine._engine.engine_core
        self._scheduler, self.step = core.engine_core.scheduler, core.get_output
        core.get_output = lambda: self.step()

    def num_unfinished(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def run(self, number: int) -> float:
        arguments, rng = self._arguments, np.random.default_rng(number)
        prompts = [
            Prompt(index, tuple(rng.integers(4, self._vocab, PROMPT_TOKENS).tolist()), "random", "{}")
            for index in range(arguments.prompts)
        ]
        lengths = np.roll(draw_lengths(arguments.prompts * SAMPLES, arguments.mean, arguments.longest), number)
        requests = [
            SamplingRequest(prompts[index // SAMPLES], index % SAMPLES, seed=1_000 * number + index, max_tokens=length)
            for index, length in enumerate(lengths.tolist())
        ]
        started = time.perf_counter()
        for _ in self._engine.stream(requests, self._config.rollout.sampling, arguments.longest):
            pass
        return time.perf_counter() - started


def timed(step: Callable[[], Any], count: Callable[[], int], found: dict[int, list[float]]) -> Callable[[], Any]:
    """Return a function that calls `step`, then `count`, and appends the milliseconds of `step` to `found[count()]`."""

    def measured() -> Any:
        started = time.perf_counter()
        output = step()
        found[count()].append(1_000 * (time.perf_counter() - started))
        return output

    return measured


def gpu_ms(generation: Generation, low: int, high: int) -> float | None:
    """Return the mean GPU milliseconds of a step with `low` to `high` unfinished responses, or None on a CPU."""
    if not torch.cuda.is_available():
        return None
    step, taken = generation.step, 0
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def measured() -> Any:
        nonlocal taken
        if taken < PROFILED_STEPS and low <= generation.num_unfinished() <= high:
            if taken == 0:
                torch.cuda.synchronize()
                profile.start()
            taken += 1
            output = step()
            if taken == PROFILED_STEPS:
                torch.cuda.synchronize()
                profile.stop()
            return output
        return step()

    generation.step = measured
    generation.run(99)
    generation.step = step
    if taken < PROFILED_STEPS:
        return None
    return sum(kernel.self_device_time_total for kernel in profile.key_averages()) / 1_000 / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_step(parser)
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        generation = Generation(arguments, model_of(arguments, Path(scratch)))
        seconds = [generation.run(number) for number in range(4)]
        steps: dict[int, list[float]] = defaultdict(list)
        step, generation.step = generation.step, timed(generation.step, generation.num_unfinished, steps)
        seconds.append(generation.run(4))
        generation.step = step
        by_range = {
            f"{low}-{high}": {"steps": len(every), "ms": median(every)}
            for low, high in RANGES
            if (every := [ms for count, values in steps.items() if low <= count <= high for ms in values])
        }
        found = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "seconds": seconds,
            "steps_by_responses": by_range,
            "gpu_ms": {name: gpu_ms(generation, *limits) for name, limits in PROFILED.items()},
        }
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
