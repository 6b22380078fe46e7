"""MLflow's server as an application, for whoever puts something before it: `mlflow server` starts uvicorn by itself."""

import os

from starlette.types import ASGIApp

CLIENTS_ASK_THE_SERVER = "mlflow-artifacts:/"
"""Where new experiments keep their artifacts: clients send them to the server, which writes them."""


def mlflow_app(database: str, artifacts: str) -> ASGIApp:
    """Bring the database up to date, then make the application, as `mlflow server` does.

    Args:
        database: address of the store of runs and of the registry of models.
        artifacts: URI of the folder in which the server keeps artifacts.
    """
    # Names of mlflow.server.constants, which cannot be read without importing the server that looks for them.
    os.environ |= {
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": CLIENTS_ASK_THE_SERVER,
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": artifacts,
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(database, database, CLIENTS_ASK_THE_SERVER)
    application: ASGIApp = app
    return application
