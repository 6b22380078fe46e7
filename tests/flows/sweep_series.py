"""Sweeps of the debug experiment, one after the other in one process, so that they share one Prefect and one trainer.

    python -m tests.flows.sweep_series ROOT

Writes `series.json` in ROOT: what each call returned, and what was there at that moment.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.sweep.flow import sweep
from flows.sweep.record import members_of, sweep_directory
from flows.sweep.result import BEST_FILE
from rlcore.config.sweep_load import load_sweep
from tests.flows.sweep_specs import SPECS, UNTRACKED


def main(root: Path) -> None:
    calls: dict[str, Any] = {}
    folder = root / "specs"
    folder.mkdir(parents=True)
    for name, text in SPECS.items():
        (folder / f"{name}.yaml").write_text(text)

    def call(what: str, name: str, overrides: tuple[str, ...] = UNTRACKED, **parameters: Any) -> None:
        begun = time.monotonic()
        result = sweep(str(folder / f"{name}.yaml"), list(overrides), root=str(root), **parameters)
        document = json.loads((result.folder / "sweep.json").read_text())
        calls[what] = {"result": asdict(result), "sweep": document, "seconds": time.monotonic() - begun}
        print(what, f"{time.monotonic() - begun:.1f} s", flush=True)

    obstacle = in_the_way(folder, root)
    call("grid", "grid")
    obstacle.unlink()
    call("grid again", "grid")
    call("list", "list")
    call("random, one run", "random", max_runs=1)
    call("random", "random")
    call("paired", "paired")
    call("optuna, three runs", "optuna", max_runs=3)
    call("optuna", "optuna")
    call("alone", "alone")
    call("tracked", "tracked", ())
    (best_in_the_way(folder, root)).mkdir(parents=True)
    try:
        call("spoiled", "spoiled", ())
    except OSError as error:
        calls["spoiled"] = str(error)
    (root / "series.json").write_text(json.dumps(calls, indent=2, default=str))


def in_the_way(folder: Path, root: Path) -> Path:
    """A file where one run of the grid (point 1, seed 2) wants to keep its validations: its trainer fails."""
    checked = load_sweep(str(folder / "grid.yaml"), [*UNTRACKED, f"paths.root={root}"])
    members, _ = members_of(checked, checked.points[0])
    obstacle = members[1].run_dir / "validation"
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    return obstacle


def best_in_the_way(folder: Path, root: Path) -> Path:
    """Where a sweep whose only run is finished already wants to write its best settings."""
    return sweep_directory(load_sweep(str(folder / "spoiled.yaml"), [f"paths.root={root}"])) / BEST_FILE


if __name__ == "__main__":
    main(Path(sys.argv[1]))
