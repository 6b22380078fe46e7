"""The work of the flows, without Prefect."""
