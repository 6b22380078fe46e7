"""Whether anything listens at a Ray cluster's address. Loads no Ray, which would ask a closed port for minutes."""

import socket

_ANSWER_TIMEOUT_S = 10.0


def unreachable(address: str) -> str | None:
    """Why nothing can be joined at `address`; None where something listens, or where only Ray can tell (`auto`).

    >>> unreachable("auto") is None
    True
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return (
            f"runtime.ray_address: must be the address of a Ray cluster; got {address}, where nothing answers "
            f"({error}). Start one there (ray start --head --port 6379, or millrace up --ray), correct the address, or "
            "leave it out for a cluster of the run's own"
        )
    return None
