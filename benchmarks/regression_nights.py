"""Whether a planted regression is told, and how often a night that is as before.

    python -m benchmarks.regression_nights                # 8 real nights, some minutes; 200 simulated ones
    python -m benchmarks.regression_nights --root ROOT    # keeps the runs there, and goes on from those

Real nights: a model of 14,000 parameters on a CPU. Four unchanged ones, then each of three plants in a night of its
own: a learning rate ten times as high, a reward that is halved, a scorer that waits longer so that a step takes about
30% more; and an unchanged one. The scorer waits in unchanged nights too, as a stand-in for work of an accelerator,
which other programs on the machine do not slow: without it a step is 0.05 s of computing, and takes two to four times
as long on a machine that is busy with other things.

Simulated nights: the trained model has answered each held-out problem many times; a simulated night draws its answers
from those, and its step times from those of one of the real unchanged nights, which is drawn too. Each is judged as a
real one is, against what was simulated before. Writes docs/results/regression_nights.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flows.commands.settings import SLOWER_BY
from rlcore.evaluation.result import ProblemResult, ValidationResult
from rlcore.report.nights import STEP_S, Night, judge, last_good, read_nights, slowest_good
from rlcore.report.record import RunRecord, read_run

REPOSITORY = Path(__file__).resolve().parents[1]
OUT = REPOSITORY / "docs" / "results" / "regression_nights.json"
SCORER = '''"""The task's own scorer, which takes its time."""

import time
from dataclasses import replace

from data.countdown import score as countdown

calls = 0


def score(text, ground_truth):
    global calls
    calls += 1
    if calls % 16 == 0:  # 4 times a step: many short waits would be as long as the machine is busy
        time.sleep({wait_s})
    found = countdown(text, ground_truth)
    return replace(found, total={factor} * found.total)
'''
SETTINGS = {
    "name": "nights",
    "data.scorer": "night_scorer:score",
    "data.validation_size": "64",
    "warm_start.stop_at_reward": "0.2",
    "optim.lr": "0.001",
    "trainer.total_steps": "15",
    "trainer.steps_per_chunk": "15",
    "trainer.batch_size": "16",
    "trainer.mini_batch_size": "16",
    "validation.every_steps": "0",
    "validation.samples_per_problem": "4",
}
WAIT_S, LONGER_WAIT_S = 0.35, 0.475
Plant = tuple[str, Mapping[str, str], float, float]
UNCHANGED: Plant = ("unchanged", {}, WAIT_S, 1.0)
NIGHTS: Sequence[Plant] = (
    *[UNCHANGED] * 4,
    ("learning rate x 10", {"optim.lr": "0.01"}, WAIT_S, 1.0),
    ("reward halved", {}, WAIT_S, 0.5),
    ("longer step", {}, LONGER_WAIT_S, 1.0),
    UNCHANGED,
)
POOL = 32
"""Answers of the trained model to each held-out problem, from which a simulated night draws its own."""
TOLD = ("broken", "worse", "slower", "better")


def command(root: Path, verb: Sequence[str], changed: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """A command of Millrace in the folder of the scorer, with these settings."""
    words = [f"{key}={value}" for key, value in {**SETTINGS, **changed}.items()]
    line = ["nice", "-n", "10", sys.executable, "-m", "flows.cli", *verb, *words, "--root", str(root)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, check=False)


def real_nights(root: Path) -> list[dict[str, Any]]:
    """Each night by the command, what was planted and what it has told."""
    found = []
    for planted, changed, wait_s, factor in NIGHTS[len(read_nights(root / "regressions" / "nights")) :]:
        (root / "night_scorer.py").write_text(SCORER.format(wait_s=wait_s, factor=factor))
        done = command(root, ["regression", "debug", "--json"], changed)
        if not done.stdout.strip():
            sys.exit(f"{planted}: {done.stderr}")
        told = json.loads(done.stdout)
        print(f"{planted}: {told['verdict']}, exit code {done.returncode}; {told['text']}", flush=True)
    nights = read_nights(root / "regressions" / "nights")
    for (planted, *_), night in zip(NIGHTS, nights, strict=True):
        figures = {key: value for key, value in asdict(night).items() if key not in ("time", "commit")}
        found.append({"planted": planted, "verdict": night.word, **figures})
    return found


def answer_pool(root: Path, run_id: str) -> ValidationResult:
    """Many answers of the trained model of a run to each held-out problem."""
    many = {"run_id": run_id, "validation.samples_per_problem": str(POOL)}
    file = root / "runs" / run_id / "validation" / "pool.json"
    if not file.is_file():
        kept = file.with_name("after.json")
        before = kept.read_bytes()
        done = command(root, ["validate"], {**many, "experiment": "debug"})
        if done.returncode:
            sys.exit(done.stderr)
        kept.replace(file)
        kept.write_bytes(before)
    return ValidationResult.read(file)


def simulated_run(number: int, pool: ValidationResult, unchanged: Sequence[RunRecord], rng: Any) -> RunRecord:
    """A night in which nothing has changed: other answers of the same model, step times of one of the real nights."""
    k = int(SETTINGS["validation.samples_per_problem"])

    def drawn(problem: ProblemResult) -> ProblemResult:
        return replace(problem, samples=tuple(problem.samples[i] for i in rng.integers(len(problem.samples), size=k)))

    real = unchanged[rng.integers(len(unchanged))]
    steps = real.training_steps
    times = [steps[i].metrics[STEP_S] for i in rng.integers(len(steps), size=len(steps))]
    lines = tuple(replace(one, metrics={STEP_S: time_s}) for one, time_s in zip(steps, times, strict=True))
    after = replace(pool, problems=tuple(drawn(one) for one in pool.problems))
    return RunRecord(Path(f"night-{number}"), real.config, lines, (), {"after": after}, None, (), ())


def simulated_nights(num_nights: int, pool: ValidationResult, unchanged: Sequence[RunRecord], seed: int) -> list[str]:
    """The verdict of each night after the first."""
    rng = np.random.default_rng(seed)
    nights: list[Night] = []
    runs: dict[str, RunRecord] = {}
    for number in range(num_nights + 1):
        run = simulated_run(number, pool, unchanged, rng)
        runs[run.run_id] = run
        good, slowest = (None if one is None else runs[one.run_id] for one in (last_good(nights), slowest_good(nights)))
        nights.append(judge(number, run, good, slowest, slower_by=SLOWER_BY))
    return [night.word for night in nights[1:]]


def main() -> None:
    """Do both, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--root", type=Path, help="folder of the runs; none: a temporary one")
    parser.add_argument("--series", type=int, default=4, help="simulated series")
    parser.add_argument("--nights", type=int, default=50, help="nights of each")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (given.root or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        nights = real_nights(root)
        same = [night["run_id"] for night in nights if night["planted"] == "unchanged"]
        unchanged = [read_run(root / "runs" / run_id) for run_id in same]
        pool = answer_pool(root, same[-1])
        series = []
        for seed in range(given.series):
            words = simulated_nights(given.nights, pool, unchanged, seed)
            series.append({word: words.count(word) for word in TOLD})
            print(f"series {seed}: {sum(series[-1].values())} of {given.nights} told: {series[-1]}", flush=True)
    told = [sum(one.values()) for one in series]
    result = {
        "settings": {**SETTINGS, "scorer_wait_s": WAIT_S, "longer_wait_s": LONGER_WAIT_S, "slower_by": SLOWER_BY},
        "nights": nights,
        "simulated": {"nights_of_a_series": given.nights, "answers_in_pool": POOL, "told": told, "series": series},
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"told of {given.nights} unchanged nights: median {median(told)}, most {max(told)}; {given.out}")


if __name__ == "__main__":
    main()
