"""The local stack: Prefect and MLflow servers, a worker, a Ray head if asked; and what is in the Prefect server."""
