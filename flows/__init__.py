"""The layer that schedules work: Prefect flows, deployments, sweeps and the command line. It uses no tensors."""

from rlcore import SOURCE_FOLDER as SOURCE_FOLDER
