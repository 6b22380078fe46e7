"""A side of `benchmarks.vs_trl` in a new process, with the GPU's memory watched from outside."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.vs_trl.job import Job

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.2


def run_side(job: Job, *, trl_site: Path | None) -> dict[str, Any]:
    begun = time.perf_counter()
    with _driver_memory(job.device) as most_gb:
        start(
            "peer" if job.is_trl else "ours",
            str(job.write()),
            threads=job.threads,
            site=trl_site if job.is_trl else None,
        )
        driver_gb = most_gb()
    found: dict[str, Any] = json.loads((Path(job.folder) / "report.json").read_text())
    if job.device == "cuda" and driver_gb:
        found["device_gb"] = driver_gb
    return {
        "side": job.name,
        "device": job.device,
        "engine": job.engine,
        "answers": job.prompts * job.samples,
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


def start(module: str, *arguments: str, threads: int, site: Path | None = None) -> None:
    """Run a module of this package in a new process, with the folder `site` first on its path."""
    path = [str(site.resolve()) if site else "", str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", f"benchmarks.vs_trl.{module}", *arguments]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)


def _described(lengths: tuple[int, ...]) -> str:
    if not lengths:
        return "as the answers end"
    if len(set(lengths)) == 1:
        return f"all {lengths[0]}"
    return f"drawn, mean {sum(lengths) / len(lengths):.0f}, longest {max(lengths)}"


@contextlib.contextmanager
def _driver_memory(device: str) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the additional memory in use on the first GPU, in GB of 1e9 bytes, or 0."""
    tool = shutil.which("nvidia-smi") if device == "cuda" else None
    if tool is None:
        yield lambda: 0.0
        return
    ask = [tool, "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    before = most = _used_gb(ask)
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(LOOK_EVERY_S):
            most = max(most, _used_gb(ask))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most - before
    finally:
        done.set()
        thread.join()


def _used_gb(ask: list[str]) -> float:
    output = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    return float(output) * 2**20 / 1e9 if output.isdigit() else 0.0
