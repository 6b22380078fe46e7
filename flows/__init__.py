"""The layer that schedules work: Prefect flows, deployments, sweeps and the command line. It uses no tensors."""

from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parents[1]  # folder of this package, `rlcore` and `data`
