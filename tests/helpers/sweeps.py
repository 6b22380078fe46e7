"""Sweeps small enough for a test. A learning rate of 1 spoils the model in one step, so the scores differ for sure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.sweep.study import Member, members_of
from rlcore.config.sweep import load_sweep
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import Journal
from rlcore.tracking.lineage import Origin
from tests.flows.conftest import commit, numbers
from tests.helpers.reports import validation

UNTRACKED = ("tracking.enabled=false",)

SPECS = {
    "grid": """
name: grid
experiment: debug
overrides: [trainer.total_steps=1]
seeds: [1, 2]
grid:
  optim.lr: [3e-4, 1.0]
""",
    "stopped": """
name: stopped
experiment: debug
overrides: [name=stopped]
list:
  - {optim.lr: 3e-4}
  - {optim.lr: 1.0}
""",
    "on workers": """
name: on_workers
experiment: debug
overrides: [validation.every_steps=1, name=worked]
optuna:
  num_points: 4
  points_at_once: 2
  startup_points: 2
  seed: 25
  space:
    optim.lr: {low: 1e-5, high: 10.0, log: true}
    algo: [grpo, rloo]
pruning: {every_steps: 1}
""",
}


def spec_of(folder: Path, name: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(SPECS[name])
    return file


def in_the_way(spec: Path, root: Path) -> Path:
    """Create a file where a run (point 1, seed 2) would write its validations, so that its trainer fails."""
    checked = load_sweep(str(spec), [*UNTRACKED, f"paths.root={root}"])
    members, _ = members_of(checked, checked.points[0])
    obstacle = RunLayout.of(members[1].config).validation
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    return obstacle


def points_of(root: Path, name: str) -> list[dict[str, Any]]:
    """Return the points in `sweep.json`, by number."""
    (file,) = root.glob(f"sweeps/{name}-*/sweep.json")
    points: list[dict[str, Any]] = json.loads(file.read_text())["points"]
    return sorted(points, key=lambda point: int(point["point"]))


def score_of(run: Mapping[str, Any], step: int) -> float | None:
    """Return a run's score at a step from its journal."""
    return numbers(Path(run["run_dir"])).get(step, {}).get("val-core/countdown/reward/mean_at_2")


GAINS = {1e-4: 0.5, 2e-4: 0.1, 3e-4: 0.6, 4e-4: 0.3}  # gain of each learning rate in two steps with seed 1


class RunWriter:
    def __init__(self, fails: Mapping[int, BaseException] | None = None) -> None:
        self.trained: list[tuple[str, int]] = []
        """Labels of runs, and the steps that they were trained to."""
        self._fails = dict(fails or {})

    def __call__(self, member: Member, to_step: int, label: str) -> None:
        self.trained.append((label, to_step))
        if (error := self._fails.pop(len(self.trained), None)) is not None:
            raise error
        layout, config = RunLayout.of(member.config), member.config
        layout.run_dir.mkdir(parents=True, exist_ok=True)
        Origin(config).write(layout.run_dir)
        with Journal(layout.journal) as journal:
            gain = GAINS[config.optim.lr] * 0.9 ** (member.seed - 1)
            result = validation(config, f"step-{to_step:06d}", 40 * to_step, gain, 40)
            result.write(layout.validation / f"step-{to_step:06d}.json")
            journal.append_step(to_step, result.metrics())
        commit(config, to_step)
