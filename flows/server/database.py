"""An empty Prefect database, made once with the installation: to make one takes Prefect 5 s of migrations.

    python -m flows.server.database

writes it beside this Python's other files; `make` does so when it installs. A server with a new home begins with a
copy. Without it, or with another version of Prefect, the server makes its database itself.
"""

import asyncio
import os
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from rlcore.storage.sqlite import sqlite_address

DATABASE = "prefect.db"
"""Name of the database in a server's home."""
PREFECT_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
PREFECT_DATABASE_TOO = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
PREFECT_SQLITE = "sqlite+aiosqlite:///"
"""How the address of a file begins where Prefect reads it."""


def empty_database() -> Path:
    """Where the one of this installation is, if it was made."""
    return Path(sys.prefix) / "share" / "millrace" / f"prefect-{version('prefect')}.db"


def lay_out(home: Path, made: Path | None = None) -> bool:
    """Give a server's home an empty database, where it has none and one was made; whether it did."""
    made = made or empty_database()
    target = home / DATABASE
    if target.exists() or not made.is_file():
        return False
    part = target.with_suffix(".part")
    shutil.copyfile(made, part)
    part.rename(target)
    return True


def address_in(home: Path) -> dict[str, str]:
    """Environment of a server: where the database in its home is. Nothing where it finds it, or is told another one."""
    if "?" not in str(home) or any(os.environ.get(key) for key in (PREFECT_DATABASE, PREFECT_DATABASE_TOO)):
        return {}
    return {PREFECT_DATABASE: sqlite_address(home / DATABASE, PREFECT_SQLITE)}


def make(target: Path) -> None:
    """Let Prefect make one, in a folder of its own."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["PREFECT_HOME"] = home
        os.environ.pop(PREFECT_DATABASE, None)
        from prefect.server.database import provide_database_interface

        asyncio.run(provide_database_interface().create_db())
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        with closing(sqlite3.connect(Path(home) / DATABASE)) as source, closing(sqlite3.connect(part)) as copy:
            source.backup(copy)
        part.rename(target)


if __name__ == "__main__":
    make(empty_database())
