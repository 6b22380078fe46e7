"""The servers of Prefect and MLflow behind our guard.

    python -m flows.stack.serve PORT            the Prefect server of a stack
    python -m flows.stack.serve one-command FD  the server of one command (`flows.server.api`) on an open socket

`prefect server start` has no option for a guard. Clients that connect to the open socket FD wait until the server is
up, so they need not poll. `mlflow server` finds `guarded_mlflow` by its name in `pyproject.toml`. Secrets are passed in
the environment, because every user of the machine can see a command line.
"""

import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.server.guard import Guard

ONE_COMMAND = "one-command"
MLFLOW_APP = "millrace"
"""The name of our application in the option `--app-name` of `mlflow server`."""
MLFLOW_LOGIN = "MILLRACE_MLFLOW_LOGIN"
RESPONSES_ROOT = "MILLRACE_ANSWERS_ROOT"
"""The environment variable with the root whose responses are shown on MLflow's server. See `flows.stack.responses`."""


def main() -> None:
    """Serve Prefect until SIGTERM. The server of a single command has no pages, but it records runs and events."""
    import uvicorn
    from prefect.server.api.server import create_app

    from flows.server.guard import Guard
    from flows.stack.limit import SlotsLimit
    from flows.stack.state import LOOPBACK, STACK_ROOT

    logging.getLogger("prefect.server.utilities.messaging.memory").addFilter(hide_address)
    *one_command, place = sys.argv[1:]
    # Prefect checks its login itself, also on websockets.
    prefect = create_app(final=True, ephemeral=bool(one_command))
    app = Guard(prefect if one_command else SlotsLimit(prefect, Path(os.environ[STACK_ROOT])))
    if one_command:
        uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run([socket.socket(fileno=int(place))])
    else:
        uvicorn.run(app, host=LOOPBACK, port=int(place), log_level="warning", lifespan="on")


def hide_address(record: logging.LogRecord) -> bool:
    """Remove httpx's error text, which has the secret address of a notification block, from a log record."""
    import httpx

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
        status = f" {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {type(error).__name__}{status}", (), None
    return True


def guarded_mlflow() -> "Guard":
    """Return MLflow's application and the page of responses, both behind a login.

    MLflow's own logins are not used. They need a second database, and they hash a password for each request.
    """
    from flows.server.guard import Guard
    from flows.stack.responses import with_responses
    from rlcore.tracking.connection import mlflow_app

    login = os.environ.pop(MLFLOW_LOGIN)
    return Guard(with_responses(Path(os.environ[RESPONSES_ROOT]), mlflow_app()), login)


if __name__ == "__main__":
    main()
