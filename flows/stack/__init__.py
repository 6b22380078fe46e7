"""The local stack of Prefect and MLflow servers, workers and a Ray head, and our deployments in the Prefect server."""
