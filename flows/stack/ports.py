"""Free ports on loopback, and who listens on one."""

import socket
from contextlib import suppress

import psutil

LOOPBACK = "127.0.0.1"
HEARS_LOOPBACK = frozenset({LOOPBACK, "0.0.0.0", "::", "::ffff:127.0.0.1"})
"""Addresses on which somebody who listens is met under LOOPBACK."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether one may listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def listener(port: int) -> psutil.Process | None:
    """Who listens there on loopback, as far as this user may know."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            at = connection.laddr
            is_there = connection.status == psutil.CONN_LISTEN and at and at.port == port and at.ip in HEARS_LOOPBACK
            if is_there and connection.pid:
                return psutil.Process(connection.pid)
    return None


def described_listener(port: int) -> str:
    """Who listens there, in words."""
    process = listener(port)
    if process is None:
        return "a process of another user"
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:120]})"
    except psutil.Error:
        return f"process {process.pid}"


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process, or one that it has started, listens there: another server may have been quicker."""
    try:
        family = {process.pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        return False
    found = listener(port)
    return found is not None and found.pid in family
