"""Prefect: the server that a command talks to, and what it says of the flow runs that are here."""
