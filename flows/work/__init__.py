"""Work of the flows without Prefect."""
