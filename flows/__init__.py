"""When and in what order: Prefect flows and tasks, deployments, sweeps, the command line. No tensor, no algorithm."""

from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parents[1]  # folder of this package, `rlcore` and `data`
