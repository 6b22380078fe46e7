"""The Prefect server that a command uses, and the state of this process's flow run on that server."""
