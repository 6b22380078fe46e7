"""Run several seeds of an experiment and draw their held-out reward by step.

    python benchmarks/seeds.py                                    # countdown_demo, seeds 1 2 3
    python benchmarks/seeds.py --experiment countdown_ppo_demo --seeds 1 2 3
    python benchmarks/seeds.py --experiment smollm2_countdown --read ROOT/runs/NAME ...     # existing runs
    python benchmarks/seeds.py --experiment smollm2_countdown_lora --read build/results/smollm2_countdown_seeds.json RUN

The script runs `millrace run` for each seed and reads the validations of the runs. It writes
build/results/<experiment>_seeds.{json,svg} and prints a Markdown table. Finished runs are not repeated.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlcore.config.compose import load_config
from rlcore.evaluation.result import ValidationResult
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal

RESULTS = Path(__file__).resolve().parents[1] / "build" / "results"


def run_seed(experiment: str, seed: int, overrides: list[str]) -> dict[str, object]:
    arguments = [f"experiment={experiment}", f"seed={seed}", *overrides]
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flows.cli", "run", *arguments], check=True)
    seconds = time.perf_counter() - begun
    return {**read_seed(RunLayout.of(load_config(arguments))), "command_s": round(seconds, 1)}


def read_seed(layout: RunLayout) -> dict[str, object]:
    settings = json.loads(layout.run_json.read_text())["settings"]
    lora = settings["model"]["lora"]
    results = sorted(
        (ValidationResult.read(file) for file in layout.validation.glob("step-*.json")), key=lambda result: result.step
    )
    steps = []
    for result in results:
        name = f"val-core/{result.data_source}/reward/mean_at_{result.num_samples}"
        greedy = f"val-core/{result.data_source}/reward/greedy"
        summary = result.metrics()
        steps.append(
            {
                "step": result.step,
                "sampled": summary[name],
                "low": summary[f"{name}/ci_low"],
                "high": summary[f"{name}/ci_high"],
                **({"greedy": summary[greedy]} if greedy in summary else {}),
            }
        )
    last = read_journal(layout.journal)[-1].metrics
    critic = {name: last[name] for name in ("critic/vf_explained_var",) if name in last}
    adapters = {} if lora is None else {"lora_rank": lora["rank"]}
    return {"seed": settings["seed"], **adapters, "validations": steps, "last_step": critic}


def draw(experiment: str, runs: list[dict[str, object]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for run in runs:
        points = run["validations"]
        assert isinstance(points, list)
        steps = [point["step"] for point in points]
        (line,) = axes.plot(steps, [point["sampled"] for point in points], marker="o", ms=3, label=_label(run))
        axes.fill_between(
            steps,
            [point["low"] for point in points],
            [point["high"] for point in points],
            alpha=0.15,
            color=line.get_color(),
            linewidth=0,
        )
    axes.set(xlabel="training step", ylabel="held-out sampled reward", title=experiment, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file)


def _label(run: dict[str, object]) -> str:
    adapters = f", LoRA of rank {run['lora_rank']}" if "lora_rank" in run else ""
    return f"seed {run['seed']}{adapters}{', with a critic' if run['last_step'] else ''}"


def table(runs: list[dict[str, object]], column: str, label: Callable[[dict[str, object]], str]) -> str:
    lines = [
        f"| {column} | before | after | rise | greedy before | greedy after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        points = run["validations"]
        assert isinstance(points, list)
        first, last = points[0], points[-1]
        shown = [f"{point['sampled']:.3f} [{point['low']:.3f}, {point['high']:.3f}]" for point in (first, last)]
        greedy = [f"{point['greedy']:.3f}" if "greedy" in point else "" for point in (first, last)]
        cells = [label(run), *shown, f"{last['sampled'] - first['sampled']:+.3f}", *greedy]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="countdown_demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="RUN", help="read these run folders and JSON files, run nothing"
    )
    parser.add_argument("overrides", nargs="*", help="settings as on the command line")
    arguments = parser.parse_args()
    if arguments.read:
        runs: list[dict[str, object]] = []
        for path in map(Path.resolve, arguments.read):
            runs += json.loads(path.read_text()) if path.is_file() else [read_seed(RunLayout(path.parents[1], path))]
    else:
        runs = [run_seed(arguments.experiment, seed, arguments.overrides) for seed in arguments.seeds]
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = RESULTS / f"{arguments.experiment}_seeds"
    stem.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    draw(arguments.experiment, runs, stem.with_suffix(".svg"))
    print(table(runs, "seed", lambda run: _label(run).removeprefix("seed ")))


if __name__ == "__main__":
    main()
