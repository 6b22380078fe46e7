"""Where a Prefect server keeps its database."""

import os
from pathlib import Path

from rlcore.storage.sqlite import sqlite_address

DATABASE = "prefect.db"
"""Name of the database in a server's home."""
PREFECT_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
PREFECT_DATABASE_TOO = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
PREFECT_SQLITE = "sqlite+aiosqlite:///"
"""How the address of a file begins where Prefect reads it."""


def address_in(home: Path) -> dict[str, str]:
    """Environment of a server: where the database in its home is. Nothing where it finds it, or is told another one."""
    if "?" not in str(home) or any(os.environ.get(key) for key in (PREFECT_DATABASE, PREFECT_DATABASE_TOO)):
        return {}
    return {PREFECT_DATABASE: sqlite_address(home / DATABASE, PREFECT_SQLITE)}
