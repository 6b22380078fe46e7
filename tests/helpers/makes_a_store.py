"""Makes MLflow's tables itself, as a process to be forked: python -m tests.helpers.makes_a_store ADDRESS [killed]."""

import os
import signal
import sys

from sqlalchemy import Engine, event

from rlcore.tracking.connection import connect


def kill(connection: object, cursor: object, statement: str, *rest: object) -> None:
    if "CREATE TABLE entity_associations" in statement:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.prefix = "/nowhere"  # without an empty store of this installation
    if sys.argv[2:]:
        event.listen(Engine, "after_cursor_execute", kill)
    connect(sys.argv[1])
