"""Whether the table of pass rates orders training rows by how hard they are.

    python -m benchmarks.pass_rates --out pass_rates.json        # on a CPU, a minute

Countdown rows of two and three numbers, and a small model that was shown their solutions. How hard a row is for it is
known from 128 further answers, drawn apart from those of the table. The figure is Spearman's rank correlation of the
table's rates, from 16 answers to each row, with those. Exit code 1 if it is 0.9 or less.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.run.pass_rates import TABLE, planned_pass_rates, read_table
from tests.run.sessions import session_of
from tests.small_run import prepare

LEAST = 0.9
SETTINGS = (
    "data.train_size=128", "data.min_numbers=2", "data.number_high=9", "data.target_high=18",
    "warm_start.misdirected_share=0", "warm_start.stop_at_reward=null", "warm_start.max_steps=300",
    "pass_rates.rows_per_part=64", "tracking.enabled=false",
)  # fmt: skip
FURTHER_ANSWERS, FAR_AWAY = 128, 10_000_000
"""To each row; drawn as if of rows that are so many places behind."""


def ranks(values: np.ndarray) -> np.ndarray:
    """Places of the values in their order, the mean place for equal ones."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_place: np.ndarray = (ends - (counts - 1) / 2)[inverse]
    return mean_place


def measure(root: Path, samples: int) -> dict[str, Any]:
    """Pass rates by the stage and by further answers, beside each other."""
    run = prepare(root, *SETTINGS, f"pass_rates.samples={samples}")
    with session_of(run) as session:
        begun = time.perf_counter()
        session.measure_pass_rates()
        seconds = time.perf_counter() - begun
        workers = session._workers
        prompts = [prompt for part in workers.problems.train for prompt in part]
        answers = workers.training_answers(prompts, FURTHER_ANSWERS, FAR_AWAY)
    table = read_table(planned_pass_rates(run.config, run.inputs.filtered_directory) / TABLE)
    rates = table.column("passes").to_numpy() / table.column("samples").to_numpy()
    known = np.array([answer.solved for answer in answers]).reshape(len(prompts), -1).mean(axis=1)
    return {
        "rows": len(prompts),
        "samples": samples,
        "rank_correlation": float(np.corrcoef(ranks(rates), ranks(known))[0, 1]),
        "rows_by_known_rate": np.histogram(known, bins=5, range=(0, 1))[0].tolist(),
        "seconds": seconds,
    }


def main() -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="answers to each row in the table")
    parser.add_argument("--out", type=Path, help="write the figures as JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.samples)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0 if found["rank_correlation"] > LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
