"""MLflow's server on a sqlite file, as a process to be forked: python -m tests.helpers.mlflow_server DATABASE PORT."""

import os
import sys
from pathlib import Path

import uvicorn

from rlcore.storage.documents import sqlite_address
from rlcore.tracking.connection import connect, mlflow_app

if __name__ == "__main__":
    database = Path(sys.argv[1])
    address = sqlite_address(database)
    connect(address)
    # As `mlflow server` sets them.
    os.environ |= {
        "_MLFLOW_SERVER_FILE_STORE": address,
        "_MLFLOW_SERVER_REGISTRY_STORE": address,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(database.parent / "served-artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    uvicorn.run(mlflow_app(), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", lifespan="on")
