"""The Prefect server of a command, and the state of this process's flow run there."""
