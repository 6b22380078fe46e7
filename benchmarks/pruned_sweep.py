"""A sweep of 24 points with pruning against the same without: the same winner, and which share of the training?

    python -m benchmarks.pruned_sweep --root /tmp/pruned --out docs/results/pruned_sweep.json

The run of `experiment=debug` on countdown's prompts, with a scorer from which it learns in a few steps (the share of
digits in an answer, `tests/share_of_digits.py`): six learning rates by two aggregations by two numbers of answers, for
each of three seeds, once without pruning and once with `pruning: {every_steps: N}` (paired intervals). Without Prefect,
one run after the other, as in a sweep of one process; the data are there before. Counts training steps, and processor
seconds of the trainer processes, so other work on the machine does not matter. Where the winners differ, their last
answers are held against each other, problem by problem. Exit code 0 if every seed has the same winner and at most 0.6
of the processor seconds.
"""

import argparse
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prefect.logging import disable_run_logger

from flows import chain
from flows.sweep.drive import Drive, Task
from flows.sweep.record import best_of, sweep_directory
from flows.work.open_run import open_run
from rlcore.config.sweep_load import load_sweep
from rlcore.evaluation.stats import paired_difference
from tests.share_of_digits import LEARNING

GRID = {
    "optim.lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
    "algo.aggregation": ["token-mean", "seq-mean-token-mean"],
    "rollout.samples_per_prompt": [2, 4],
}
NUM_SAMPLES = 2
MOST_SHARE = 0.6


def work_here(tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
    """Train each to its step, without Prefect; a failure ends the measurement."""
    for task in tasks:
        config = task.member.config
        with open_run(config) as run:
            chain.train(run, chain.make_rows(config, chain.run_here).inputs, chain.run_here, task.to_step)
        yield task, ""


def trainers_processor_seconds() -> float:
    """User and system time of the trainers that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_sweep(root: Path, name: str, seed: int, steps: int, every: int, grid: dict[str, Any], **more: Any) -> Drive:
    """One sweep to its end."""
    overrides = [f"name={name}", f"trainer.total_steps={steps}", f"trainer.steps_per_chunk={every}",
                 f"validation.every_steps={every}", "data.validation_size=256", "trainer.batch_size=64",
                 "trainer.mini_batch_size=64", f"validation.samples_per_problem={NUM_SAMPLES}",
                 "tracking.enabled=false", *LEARNING, f"paths.root={root}"]  # fmt: skip
    spec = {"name": name, "experiment": "debug", "seeds": [seed], "grid": grid, "overrides": overrides, **more}
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(spec))
    sweep = load_sweep(str(file))
    drive = Drive(sweep, sweep_directory(sweep), work_here, {})
    drive.run()
    return drive


def measured(root: Path, kind: str, seed: int, steps: int, every: int) -> dict[str, Any]:
    """What one of the two sweeps cost, its winner, and where each point ended."""
    before = trainers_processor_seconds()
    more = {"pruning": {"every_steps": every}} if kind == "pruned" else {}
    drive = run_sweep(root, f"{kind}-{seed}", seed, steps, every, GRID, **more)
    seconds = trainers_processor_seconds() - before
    best = best_of(drive.points.values(), "maximize")
    assert best is not None
    assert best.score is not None
    answers = best.problem_scores(f"reward/mean@{NUM_SAMPLES}", steps)
    print(f"{kind}, seed {seed}: {seconds:.0f} s, {best.label}: {best.score:.4f}", flush=True)
    points = [drive.points[number] for number in sorted(drive.points)]
    return {
        "processor_seconds": round(seconds, 1),
        "steps": drive.spending.num_steps,
        "winner": dict(best.settings),
        "score": best.score,
        "answers": [answers[problem] for problem in sorted(answers)],
        "steps_by_point": [point.members[0].step for point in points],
        "scores_by_point": [point.score for point in points],
    }


def main() -> None:
    """Both sweeps of each seed, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    given = parser.parse_args()
    root = given.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    with disable_run_logger():
        for seed in given.seeds:
            run_sweep(root, f"start-{seed}", seed, given.every, given.every, {"optim.lr": [1e-3]})
            whole, pruned = (measured(root, kind, seed, given.steps, given.every) for kind in ("whole", "pruned"))
            share = round(pruned["processor_seconds"] / whole["processor_seconds"], 3)
            same = pruned["winner"] == whole["winner"]
            gain = paired_difference(pruned.pop("answers"), whole.pop("answers")).difference
            lead = {"value": gain.value, "low": gain.low, "high": gain.high}
            found.append({"seed": seed, "share": share, "same_winner": same, "lead_of_the_winner_without": lead,
                          "whole": whole, "pruned": pruned})  # fmt: skip
            passed = all(one["same_winner"] and one["share"] <= MOST_SHARE for one in found)
            document = {"steps": given.steps, "every": given.every, "grid": GRID, "passed": passed, "seeds": found}
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    print("| seed | steps | with pruning | processor seconds | with pruning | share | same winner | behind by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in found:
        whole, pruned, lead = one["whole"], one["pruned"], one["lead_of_the_winner_without"]
        print(f"| {one['seed']} | {whole['steps']} | {pruned['steps']} | {whole['processor_seconds']:.0f} | "
              f"{pruned['processor_seconds']:.0f} | {one['share']:.2f} | {one['same_winner']} | "
              f"{lead['value']:.4f} [{lead['low']:.4f}, {lead['high']:.4f}] |")  # fmt: skip
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
