"""Three runs of SmolLM2-135M share a GPU and give way to an urgent one: how busy is it, and how long is a switch?

    python -m benchmarks.shared_gpu --root /tmp/shared --out docs/results/shared_gpu.json     # one GPU, 20 minutes
    python -m benchmarks.shared_gpu --root /tmp/shared --alone-gpu 1     # two GPUs, 12 minutes
    python -m benchmarks.shared_gpu --root /tmp/shared --rehearse --steps 500      # a tiny model on a CPU

`millrace train` for each of three runs in a root with three slots on one GPU; when each has trained two steps, a fourth
of a higher priority that does not wait for a chunk's end. The GPU's utilization (NVML: the share of a moment in which a
kernel ran) is sampled once a second. Then, or meanwhile on another GPU, the same runs one after the other in a root
without slots: all metrics of all steps, without those of the machine, are compared value for value, the last
checkpoints tensor by tensor. Needs no Prefect server, no MLflow and no network. Exit code 0 if all were compared and
none differs.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.shared_slots import compare, wait_until
from flows.work.slots import Slots
from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal
from tests.share_of_digits import LEARNING

RUNS, URGENT = ("shared-1", "shared-2", "shared-3"), "shared-4"
COMMON = (*LEARNING, "tracking.enabled=false", "validation.every_steps=0", "data.validation_size=32")
CPU = ("experiment=debug", "trainer.batch_size=64", "trainer.mini_batch_size=64", "rollout.samples_per_prompt=4")
GPU = ("experiment=smollm2_countdown", "data.train_size=2048", "rollout.max_response_tokens=128",
       "rollout.memory_share=0.2", "trainer.mini_batch_size=128", "trainer.max_tokens_per_micro_batch=16384",
       "reward.num_processes=1")  # fmt: skip


def settings_in(root: Path, steps: int, more: list[str]) -> dict[str, list[str]]:
    """Settings of each run; the urgent one trains a quarter of the steps."""
    lengths = {name: steps for name in RUNS} | {URGENT: steps // 4}
    return {
        name: [*more, *COMMON, f"name={name}", f"seed={number}", f"paths.root={root}", f"trainer.total_steps={length}",
               f"trainer.steps_per_chunk={length}"]
        for number, (name, length) in enumerate(lengths.items(), 1)
    }  # fmt: skip


class Shared:
    """The runs in the root with slots, and what was seen of them. `samples`: utilization (0 to 1) by the time."""

    def __init__(self, root: Path, settings: Mapping[str, list[str]], gpu: str | None = None) -> None:
        self.root, self._settings = root, settings
        self._environment = None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        root.mkdir(parents=True)
        self.layouts = {name: RunLayout.of(load_config(words)) for name, words in settings.items()}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.samples: list[tuple[float, float]] = []

    def start(self, name: str, *more: str) -> None:
        """`millrace train` in a process of its own; its output goes to a file."""
        line = [sys.executable, "-m", "flows.cli", "train", *self._settings[name], *more]
        with (self.root / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(line, stdout=log, stderr=log, env=self._environment))

    def have_ended(self) -> bool:
        """Whether the processes are over; the benchmark ends where one has failed."""
        codes = [process.poll() for process in self._processes]
        if any(codes):
            sys.exit(f"a run has failed, see {self.root}/*.log: {codes}")
        return None not in codes

    def step_times(self, name: str) -> list[float]:
        """When each step so far had ended, seconds since the epoch."""
        file = self.layouts[name].journal
        return [line.time for line in read_journal(file) if line.step > 0] if file.exists() else []

    def sample(self, utilization: Callable[[], float]) -> None:
        """Once a second, in a thread."""
        while True:
            self.samples.append((time.time(), utilization()))
            time.sleep(1)

    def switches(self) -> list[dict[str, Any]]:
        """Of each run that waited: seconds from the urgent one's wish, or for the one that gave way from the urgent
        one's end, to its slot (`slot_s`), and from there to the end of its next step (`first_step_s`)."""
        names = {layout.run_dir.name: name for name, layout in self.layouts.items()}
        found, freed = [], 0.0
        for line in map(json.loads, (self.root / "slots" / "log.jsonl").read_text().splitlines()):
            at, name = datetime.fromisoformat(line["at"]).timestamp(), names[line["run_id"]]
            if line["what"] == "ended":
                freed = at
            elif line["waited_s"] > 1:
                step = next((end for end in self.step_times(name) if end > at), float("nan"))
                slot_s = line["waited_s"] if name == URGENT else at - freed
                found.append({"run": name, "slot_s": round(slot_s, 1), "first_step_s": round(step - at, 1)})
        return found


def share(shared: Shared) -> dict[str, Any]:
    """Run them, and say what was seen; times count from the moment when all three trained."""
    for name in RUNS:
        shared.start(name)
    wait_until(lambda: shared.have_ended() or all(len(shared.step_times(n)) > 1 for n in RUNS), "two steps of each")
    begun = time.time()
    shared.start(URGENT, "runtime.priority=1", "runtime.preempt=now")
    wait_until(shared.have_ended, "the last run")
    steps = {name: shared.step_times(name) for name in shared.layouts}
    until = min(steps[name][-1] for name in RUNS)  # then a slot may be empty
    busy = [share for at, share in shared.samples if begun <= at <= until]
    return {
        "utilization": round(fmean(busy), 3) if busy else None,
        "switches": shared.switches(),
        "trainers_started": {name: len(list(it.run_dir.glob("logs/trainer-*"))) for name, it in shared.layouts.items()},
        "samples": [(round(at - begun, 1), share) for at, share in shared.samples],
        "steps_ended": {name: [round(end - begun, 1) for end in ends] for name, ends in steps.items()},
    }


def one_by_one(alone: Shared, until: float) -> list[str]:
    """Let each run go alone, of those that begin before `until` (of the monotonic clock); those that ended."""
    ended = []
    for name in (URGENT, *reversed(RUNS)):
        if time.monotonic() < until:
            alone.start(name)
            wait_until(alone.have_ended, f"{name} alone")
            ended.append(name)
    return ended


def gpu_reader() -> Callable[[], float]:
    """Reads the utilization of GPU 0, 0 to 1."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, whose own load stands for the GPU's")
    parser.add_argument("--steps", type=int, default=36, help="of the three; the urgent one trains a quarter")
    parser.add_argument("--seconds", type=float, default=1000.0, help="begin no run alone after so many")
    parser.add_argument("--alone-gpu", help="where the runs alone go meanwhile; else they follow on the same GPU")
    parser.add_argument("overrides", nargs="*", help="settings as on the command line")
    given = parser.parse_args()
    began, root = time.monotonic(), given.root.resolve()
    more = [*(CPU if given.rehearse else GPU), *given.overrides]
    shared = Shared(root / "shared", settings_in(root / "shared", given.steps, more))
    Slots(shared.root).set_devices(["" if given.rehearse else "0"] * len(RUNS))
    utilization = (lambda: psutil.cpu_percent() / 100) if given.rehearse else gpu_reader()
    threading.Thread(target=shared.sample, args=[utilization], daemon=True).start()
    alone = Shared(root / "alone", settings_in(root / "alone", given.steps, more), given.alone_gpu)
    with ThreadPoolExecutor(1) as beside:
        early = None if given.alone_gpu is None else beside.submit(one_by_one, alone, began + given.seconds)
        result = share(shared) | {"shared_seconds": round(time.monotonic() - began)}
        print(
            {key: result[key] for key in ("utilization", "switches", "trainers_started", "shared_seconds")}, flush=True
        )
        result["alone"] = one_by_one(alone, began + given.seconds) if early is None else early.result()
    counts = compare(shared.root, root / "alone") if result["alone"] else (0, 0, 0)
    result |= dict(zip(("values", "different", "other_weights"), counts, strict=True))
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps({key: result[key] for key in ("alone", "values", "different", "other_weights", "seconds")}))
    if given.out is not None:
        given.out.write_text(json.dumps(result) + "\n")
    is_equal = not result["different"] and not result["other_weights"]
    sys.exit(0 if is_equal and len(result["alone"]) == len(shared.layouts) else 1)


if __name__ == "__main__":
    main()
