"""The common functions of the comparisons with TRL. The two sides, TRL and our trainer, run one after the other, each
in a new process.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
Side = Callable[[dict[str, Any], list[Any]], dict[str, Any]]
"""A function that runs TRL or our trainer. Its arguments are the job and the rows, and it returns the measurements."""


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def start(
    words: Sequence[str], *, threads: int, python: str | None = None, site: Path | None = None, **variables: str
) -> None:
    """Run Python with the arguments `words`. `threads`: the number of CPU threads of numerical libraries. `python`: the
    interpreter. `site`: a folder that comes first on the module path. `variables`: additional environment variables."""
    path = [str(site.resolve()) if site else "", str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    subprocess.run([python or sys.executable, *words], env=environment, check=True, cwd=ROOT)


def describe(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--trl-site", type=Path, help="folder with trl, added to the path of its process")
    parser.add_argument("--trl-python", help="interpreter of another environment that has trl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--model", type=Path, help="folder for the model, reused if it exists")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm-up", type=int, help="first steps that are not timed")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--mean", type=int, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, help="most tokens of a response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="settings of our side, as on the command line")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    parser.set_defaults(**defaults)


def run_side(sides: Mapping[str, Side], name: str, folder: Path) -> None:
    """Run the side `name` in this process, with the job and rows in `folder`. Write the measurements to `folder`."""
    job, rows = (json.loads((folder / file).read_text()) for file in ("job.json", "rows.json"))
    torch.set_num_threads(job["threads"])
    (folder / f"{name}.json").write_text(json.dumps(sides[name](job, rows)))


def run_both(
    module: str, arguments: argparse.Namespace, folder: Path, job: Mapping[str, Any], rows: Sequence[Any],
    tokens: Sequence[int],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Run TRL and our trainer on the same rows, and return the measurements of both. `tokens`: the number of tokens in
    each step."""
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "rows.json").write_text(json.dumps(rows))
    found = {}
    for side in ("trl", "ours"):
        theirs = {"python": arguments.trl_python, "site": arguments.trl_site} if side == "trl" else {}
        device = {"CUDA_VISIBLE_DEVICES": "0" if arguments.device == "cuda" else ""}
        start(["-m", module, "--side", side, str(folder)], threads=arguments.threads, **theirs, **device)
        report = found[side] = json.loads((folder / f"{side}.json").read_text())
        timed = slice(arguments.warm_up, None)
        report["tokens_per_s"] = sum(tokens[timed]) / sum(report["step_s"][timed])
    return found


def largest_difference(sides: Mapping[str, Mapping[str, Any]], name: str) -> float:
    return max(abs(a - b) for a, b in zip(sides["trl"][name], sides["ours"][name], strict=True))


def supervised_steps(trainer: Any, count: int) -> list[Mapping[str, float]]:
    """Run steps of our supervised trainer, and return the metrics of each step."""
    from rlcore.checkpoint.catalog import LoopState

    state, metrics = LoopState(0, 0, 0, 0, 0.0), []
    for _ in range(count):
        result = trainer.step(state, epoch=0)
        state = result.state
        metrics.append(result.metrics)
    return metrics


def measuring(trainer: type[Any], found: dict[str, list[float]]) -> tuple[type[Any], Any]:
    """Return a subclass of a TRL trainer, and a callback for it. The subclass appends each step's unrounded loss to
    `found["loss"]`, and the callback appends the step's duration to `found["step_s"]`."""
    from transformers import TrainerCallback

    class Measured(trainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            found["loss"][-1] += float((loss if torch.is_tensor(loss) else loss[0]).detach())
            return loss

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            found["loss"].append(0.0)
            found["step_s"].append(-now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["step_s"][-1] += now()

    return Measured, Clock()
