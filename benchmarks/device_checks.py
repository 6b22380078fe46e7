"""Check a device with vLLM as the engine. Each check prints its values and PASS or FAIL.

    python -m benchmarks.device_checks --out checks.json             # on a GPU, with the shape of Llama-3.2-1B
    python -m benchmarks.device_checks --only short_memory plan
    python -m benchmarks.device_checks --only warm_start weight_sync --model FOLDER     # a model such as SmolLM2-135M
    python -m benchmarks.device_checks --shape=tiny --prompts=8 --mean=24 --longest=64        # on a CPU, two minutes

A check passes if its statement in this table is true:

    short_memory   an update that runs out of memory is repeated in more micro-batches, with the same numbers
    weight_sync    30 weight syncs raise no false alarm, and a stale layer is detected
    logprobs       the mean |difference| of the log-probabilities of engine and trainer is small
    correction     the loss equals a naive computation, with importance correction off, truncated and masked
    plan           the memory plan agrees with the measured memory of each phase
    warm_start     20 supervised steps run on the device, and its memory is free afterwards
    demo           `millrace train experiment=countdown_demo rollout=vllm` ends without an error and has every metric
"""

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks import by_command, numbers, plan, short_memory, wrong_weight_sync
from benchmarks.checks.rig import Rig, Verdict
from benchmarks.harness import describe_lengths
from benchmarks.shapes import SHAPES, model_of

ON_THE_RIG: Mapping[str, Callable[[Rig], Verdict]] = {
    "plan": plan.check,  # the first check, before memory has grown
    "logprobs": numbers.differences,
    "correction": numbers.correction,
    "short_memory": short_memory.check,
    "weight_sync": wrong_weight_sync.check,
}
BY_COMMAND: Mapping[str, Callable[[argparse.Namespace, Path], Verdict]] = {
    "demo": by_command.demo,
    "warm_start": by_command.warm_start,
}


def run(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    short_memory.prepare()
    found: dict[str, Any] = {}

    def add(name: str, check: Callable[[], Verdict]) -> None:
        found[name] = _run_check(name, check)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(_summary(arguments, found), indent=1) + "\n")

    for name in BY_COMMAND:  # before the rig takes the GPU
        if name in arguments.only:
            add(name, lambda name=name: BY_COMMAND[name](arguments, scratch / name))
    wanted = [name for name in ON_THE_RIG if name in arguments.only]
    if wanted:
        rig = Rig(arguments, model_of(arguments, scratch))
        for name in wanted:
            add(name, lambda name=name: ON_THE_RIG[name](rig))
        rig.close()
    return _summary(arguments, found)


def _summary(arguments: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "model": arguments.shape if arguments.model is None else arguments.model.name,
        "overrides": arguments.overrides,
        "checks": dict(found),
        "pass": all(check["pass"] for check in found.values()),
    }


def _run_check(name: str, check: Callable[[], Verdict]) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        verdict = check()
        found = {"pass": verdict.ok, **verdict.values}
    except Exception as error:
        traceback.print_exc()
        found = {"pass": False, "error": f"{type(error).__name__}: {error}"[:2_000]}
    found["seconds"] = round(time.perf_counter() - begun, 1)
    print(f"{'PASS' if found['pass'] else 'FAIL'} {name} {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*BY_COMMAND, *ON_THE_RIG]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--shape", choices=SHAPES, default="llama3.2-1b")
    parser.add_argument("--prompts", type=int, default=32)
    describe_lengths(parser, mean=120.0, longest=512)
    parser.add_argument("--model", type=Path, help="folder for the model, reused if it exists")
    parser.add_argument("--demo-steps", type=int, default=4)
    parser.add_argument("--demo", nargs="*", default=[], help="more settings of the demo, as on the command line")
    parser.add_argument("--overrides", nargs="*", default=[], help="settings of the rig, as on the command line")
    parser.add_argument("--out", type=Path, help="JSON file for the values")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(arguments, Path(scratch))
    for name, check in found["checks"].items():
        print(f"{'PASS' if check['pass'] else 'FAIL'} {name} ({check['seconds']} s)")
    raise SystemExit(0 if found["pass"] else 1)


if __name__ == "__main__":
    main()
