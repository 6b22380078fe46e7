"""Order and schedule of work: Prefect flows and tasks, deployments, sweeps, the command line. No tensors."""

from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parents[1]  # folder of this package, `rlcore` and `data`
