"""Training rows drawn by pass rates against rows drawn uniformly: tokens and seconds to the same held-out reward.

    python -m benchmarks.drawn_rows --root /tmp/drawn --target 0.45 --out drawn.json experiment=smollm2_countdown \\
        data.train_size=8192 trainer.total_steps=25 trainer.steps_per_chunk=25 validation.every_steps=5     # on a GPU
    python -m benchmarks.drawn_rows --root /tmp/drawn --seeds 1 --target 0.3 experiment=countdown_demo \\
        trainer.total_steps=20 trainer.steps_per_chunk=20 validation.every_steps=5      # rehearsal on a CPU

For each seed the whole chain once for each way to draw (`pass_rates.draw`), from the same rows and start model, one run
after the other in one trainer process. All but `uniform` measure the start model first (`pass_rates.samples`, 4 unless
given), which is told by itself. The held-out reward is the mean over sampled answers; the step at which it passes the
target lies on the line between two validations. Tokens: prompts and answers of the training steps. Seconds: of the
steps, the first counted as a median one, since it compiles.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.seeds import read_seed
from flows import chain
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import open_run
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout
from rlcore.run.pass_rates import TABLE, read_table
from rlcore.tracking.journal import read_journal

ENDS = 5
"""Steps at the beginning and at the end over which the share of equal groups is a mean."""


def run(config: RunConfig) -> dict[str, Any]:
    """The chain of `millrace train`; the cost of its table of pass rates, if it has one."""
    cost: dict[str, Any] = {}

    def do(stage: chain.Stage[Any]) -> Any:
        begun = time.monotonic()
        result = chain.run_here(stage)
        if stage.name == "pass-rates":
            table = read_table(result.directory / TABLE)
            answers = table.column("mean_tokens").to_numpy() * config.pass_rates.samples
            cost["seconds"], cost["answer_tokens"] = round(time.monotonic() - begun, 1), int(answers.sum())
            passes, samples = (table.column(name).to_numpy() for name in ("passes", "samples"))
            cost["rows_between"] = float(((passes > 0) & (passes < samples)).mean())
        return result

    with open_run(config) as opened, MlflowRecord(opened, {}) as record:
        chain.run_chain(opened, do, record, with_report=False)
    return cost


def read(layout: RunLayout, target: float) -> dict[str, Any]:
    """A finished run's curve over steps, tokens and seconds, and where it passes the target."""
    lines = [line for line in read_journal(layout.journal) if line.step > 0 and "timing_s/step" in line.metrics]
    seconds = np.array([line.metrics["timing_s/step"] for line in lines])
    seconds[0] = median(seconds)
    tokens = np.array([line.metrics["perf/total_num_tokens"] for line in lines])
    of_steps = {"step": np.ones(len(lines)), "tokens": tokens, "seconds": seconds}
    spent = {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in of_steps.items()}
    equal = [line.metrics["reward/equal_group_share"] for line in lines]
    curve = read_seed(layout)["validations"]
    assert isinstance(curve, list)
    at = passed([(point["step"], point["sampled"]) for point in curve], target)
    return {
        "validations": curve,
        "to_target": None
        if at is None
        else {name: round(float(np.interp(at, spent["step"], values)), 1) for name, values in spent.items()},
        "all_steps": {name: round(float(values[-1]), 1) for name, values in spent.items()},
        "equal_group_share": {"first": fmean(equal[:ENDS]), "last": fmean(equal[-ENDS:]), "all": fmean(equal)},
    }


def passed(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The step at which a curve of (step, reward) first reaches the target; None if it never does."""
    for (step, reward), (next_step, next_reward) in pairwise(curve):
        if reward < target <= next_reward:
            return step + (next_step - step) * (target - reward) / (next_reward - reward)
    return None


def main() -> None:
    """Run what is not there yet, print a line for each run, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="JSON file, written again after each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--draws", nargs="+", default=["uniform", "band"], help="values of pass_rates.draw")
    parser.add_argument("--target", type=float, required=True, help="held-out reward that both should reach")
    parser.add_argument("overrides", nargs="*", help="settings as on the command line")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for seed in given.seeds:
        for draw in given.draws:
            measured = any(line.startswith("pass_rates.samples=") for line in given.overrides)
            table = () if measured else ("pass_rates.samples=4",)
            overrides = [*table, *given.overrides]
            if draw == "uniform":
                overrides = [line for line in overrides if not line.startswith("pass_rates.samples=")]
            config = load_config([
                *overrides, f"pass_rates.draw={draw}", f"seed={seed}", f"name={draw}-{seed}",
                f"paths.root={given.root.resolve()}", "tracking.enabled=false",
            ])  # fmt: skip
            cost = run(config)
            one = {"draw": draw, "seed": seed, **read(RunLayout.of(config), given.target), "pass_rates": cost}
            found.append(one)
            shown = {name: one[name] for name in ("draw", "seed", "to_target", "equal_group_share", "pass_rates")}
            print(json.dumps(shown), flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps({"arguments": vars(given), "runs": found}, default=str) + "\n")


if __name__ == "__main__":
    main()
