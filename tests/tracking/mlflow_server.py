"""MLflow's server on a sqlite file, as a process to be forked: python -m tests.tracking.mlflow_server DATABASE PORT."""

import sys
from pathlib import Path

import uvicorn

from rlcore.storage.sqlite import sqlite_address
from rlcore.tracking.connection import mlflow_app

if __name__ == "__main__":
    database = Path(sys.argv[1])
    app = mlflow_app(sqlite_address(database), str(database.parent / "served-artifacts"))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", lifespan="on")
