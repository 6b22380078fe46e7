"""The parts of the flows that do not need Prefect."""
