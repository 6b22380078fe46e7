"""A Prefect server for one command, on loopback, on a socket that its starter has opened.

    python -m flows.server.local FD

Whoever connects before it is up waits in the socket's queue, so nothing polls and no port is guessed.
"""

import socket
import sys

from rlcore.start import uncollected


def main() -> None:
    """Serve until SIGTERM."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    with uncollected():
        import uvicorn
        from prefect.server.api.server import create_app

        from flows.server.guard import Guard

        # ephemeral: no UI, and only the services that record runs and events.
        app = Guard(create_app(ephemeral=True, final=True))
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run(sockets=[listener])


if __name__ == "__main__":
    main()
