"""Prefect's and MLflow's servers of a stack, each with our guard before it; their own commands have no place for one.

    python -m flows.stack.serve prefect PORT
    python -m flows.stack.serve mlflow PORT
    python -m flows.stack.serve one-command FD

The last one is Prefect's for one command (`flows.server.api`), on a socket that the command has opened: whoever
connects before it is up waits in the socket's queue, so nothing polls and no port is guessed.

Everything else is told by the environment: a command line is seen by every user of the machine.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.server.guard import Guard

ONE_COMMAND = "one-command"
MLFLOW_LOGIN = "MILLRACE_MLFLOW_LOGIN"
MLFLOW_ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"
ANSWERS_ROOT = "MILLRACE_ANSWERS_ROOT"
"""Whose kept answers have a page on MLflow's server, see `flows.stack.answers`."""


def main() -> None:
    """Serve until SIGTERM."""
    import uvicorn

    name, place = sys.argv[1:]
    app = _mlflow() if name == "mlflow" else _prefect(for_one_command=name == ONE_COMMAND)
    if name == ONE_COMMAND:
        uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run([socket.socket(fileno=int(place))])
    else:
        from flows.stack.state import LOOPBACK

        uvicorn.run(app, host=LOOPBACK, port=int(place), log_level="warning", lifespan="on")


def _prefect(*, for_one_command: bool) -> "Guard":
    """Prefect asks for its login itself, on websockets too. For one command: no page, and only the services that record
    runs and events."""
    from prefect.server.api.server import create_app
    from prefect.server.events.models import automations

    from flows.server.guard import Guard

    vars(automations)["run_coro_as_sync"] = _soon
    logging.getLogger("prefect.server.utilities.messaging.memory").addFilter(without_address)
    return Guard(create_app(final=True, ephemeral=for_one_command))


_begun: set["asyncio.Task[None]"] = set()


def _soon(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it in the server's own loop, after the request that asks for it. Prefect 3.7 stops the loop until another
    thread has done it, under a lock that a task of the loop may hold: then the server answers nobody any more."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _begun.add(task)  # the loop keeps no task alive
    task.add_done_callback(_begun.discard)


def without_address(record: logging.LogRecord) -> bool:
    """Leave the text of httpx's errors out: it has the whole address of a notification block, and that is a secret."""
    import httpx

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
        status = f" {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {type(error).__name__}{status}", (), None
    return True


def _mlflow() -> "Guard":
    # MLflow's own logins need a second database, and a hash of a password for each request.
    from flows.server.guard import Guard
    from flows.stack.answers import with_answers
    from flows.stack.state import MLFLOW_DATABASE
    from rlcore.tracking.connection import mlflow_app

    login = os.environ.pop(MLFLOW_LOGIN)
    app = mlflow_app(os.environ[MLFLOW_DATABASE], os.environ[MLFLOW_ARTIFACTS])
    return Guard(with_answers(Path(os.environ[ANSWERS_ROOT]), app), login)


if __name__ == "__main__":
    main()
