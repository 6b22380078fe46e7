"""Every loss and every advantage in the list: a short training on the demo with each, held-out reward before and after.

    nice python benchmarks/every_method.py                     # all, one after the other; those that are done are kept
    nice python benchmarks/every_method.py --only gspo gdpo

Each begins with a warm start to the same reward. Writes docs/results/every_method.json and prints a Markdown table.
"""

import argparse
import json
import subprocess
import sys

from benchmarks.seeds import RESULTS, read_seed
from rlcore.config.algo import ADVANTAGES, POLICY_LOSSES
from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout

STEPS = 30
DEMO = (
    "experiment=countdown_demo", f"trainer.total_steps={STEPS}", f"trainer.steps_per_chunk={STEPS}",
    f"validation.every_steps={STEPS}", "runtime.backend=local", "tracking.enabled=false", "seed=1",
)  # fmt: skip
SETTINGS = {
    "ppo_clip": ("trainer.mini_batch_size=32",),
    **{name: ("trainer.mini_batch_size=32", f"algo.policy_loss={name}") for name in POLICY_LOSSES},
    "gspo": ("trainer.mini_batch_size=32", "algo=gspo"),
    "cispo": ("trainer.mini_batch_size=32", "algo=cispo"),
    **{name: (f"algo.advantage={name}",) for name in ADVANTAGES},
    "gae": ("algo=ppo", "algo.lam=0.95", "critic.optim.lr=1e-3", "critic.warmup_steps=5"),
    "gdpo": ("algo.advantage=gdpo", "reward.weights={correct: 1.0, format: 0.2}"),
}
"""Settings of each. Losses get two optimizer steps a batch: with one the ratio is 1 and several are the same."""


def trained(name: str) -> dict[str, object]:
    """Train with a method, unless that has been done; its validations."""
    arguments = [*DEMO, f"name=every_method_{name}", *SETTINGS[name]]
    subprocess.run([sys.executable, "-m", "flows.cli", "train", *arguments], check=True)
    return {"method": name, "settings": list(SETTINGS[name]), **read_seed(RunLayout.of(load_config(arguments)))}


def table(runs: list[dict[str, object]]) -> str:
    """Before, after and rise of each method."""
    lines = ["| method | before | after | rise |", "| --- | --- | --- | --- |"]
    for run in runs:
        points = run["validations"]
        assert isinstance(points, list)
        shown = [
            f"{point['sampled']:.3f} [{point['low']:.3f}, {point['high']:.3f}]" for point in (points[0], points[-1])
        ]
        lines.append(
            f"| {run['method']} | {shown[0]} | {shown[1]} | {points[-1]['sampled'] - points[0]['sampled']:+.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    file = RESULTS / "every_method.json"
    done = {run["method"]: run for run in json.loads(file.read_text())} if file.exists() else {}
    for name in parser.parse_args().only:
        done[name] = trained(name)
        file.write_text(json.dumps([done[each] for each in SETTINGS if each in done], indent=1) + "\n")
    print(table([done[each] for each in SETTINGS if each in done]))


if __name__ == "__main__":
    main()
