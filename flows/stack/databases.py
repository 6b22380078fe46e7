"""The databases behind the stack's two servers: sqlite files under the root, or what the environment names.

A database's address may hold a password. It travels in the environment of the server alone; in `stack.json`, in
messages and on command lines it stands without.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flows.server.database import DATABASE, PREFECT_DATABASE, PREFECT_DATABASE_TOO, PREFECT_SQLITE
from rlcore.errors import MillraceError
from rlcore.storage.sqlite import sqlite_address

MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
DRIVERS = {
    PREFECT_DATABASE: ("postgresql+asyncpg://", "sqlite+aiosqlite://"),
    MLFLOW_DATABASE: ("postgresql+psycopg://", "postgresql+psycopg2://", "postgresql://", "mysql+pymysql://",
                      "sqlite://"),
}  # fmt: skip
"""How an address may begin: the drivers that each server can load."""
MODULES = {"asyncpg": "asyncpg", "psycopg": "psycopg", "psycopg2": "psycopg2", "pymysql": "pymysql",
           "aiosqlite": "aiosqlite"}  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Databases:
    """Addresses, with passwords if they have any."""

    prefect: str
    mlflow: str

    @classmethod
    def chosen(cls, root: Path, environment: Mapping[str, str] = os.environ) -> "Databases":
        """What the environment names, else files under the root.

        Raises:
            MillraceError: an address is of a kind that the server cannot use, or its driver is not installed.
        """
        prefect = environment.get(PREFECT_DATABASE) or environment.get(PREFECT_DATABASE_TOO)
        mlflow = environment.get(MLFLOW_DATABASE)
        for key, address in ((PREFECT_DATABASE, prefect), (MLFLOW_DATABASE, mlflow)):
            if address:
                _check(key, address)
        files = cls(
            sqlite_address(root / "prefect" / DATABASE, PREFECT_SQLITE),
            sqlite_address(root / "mlflow.db"),
        )
        return cls(prefect or files.prefect, mlflow or files.mlflow)

    def masked(self) -> "Databases":
        """The same without passwords."""
        return Databases(masked(self.prefect), masked(self.mlflow))

    def mlflow_is_the_file(self, root: Path) -> bool:
        """Whether runs under this root find their metrics in the database without being told where it is."""
        return self.mlflow == sqlite_address(root / "mlflow.db")


def masked(address: str) -> str:
    """An address that may be shown.

    >>> masked("postgresql+asyncpg://me:s3cr%40t@db.example:5432/prefect?ssl=require")
    'postgresql+asyncpg://me:***@db.example:5432/prefect'
    >>> masked("sqlite:////data/mlflow.db")
    'sqlite:////data/mlflow.db'
    """
    hidden = re.sub(r"^([\w+]+://[^:@/]*):.*@", r"\1:***@", address)
    return hidden.partition("?")[0]  # a query may hold a password too


def without_passwords(text: str, databases: "Databases") -> str:
    """What a server has written, fit to be shown."""
    for address in (databases.prefect, databases.mlflow):
        for secret in (address, *_passwords(address)):
            text = text.replace(secret, "***") if secret != masked(address) else text
    return text


def _passwords(address: str) -> set[str]:
    found = re.match(r"^[\w+]+://[^:@/]*:(.*)@", address)
    return set() if found is None or not found[1] else {found[1], unquote(found[1])}


def require_same(recorded: str, chosen: str, key: str) -> None:
    """A stack keeps its databases: another one would show an empty history.

    Raises:
        MillraceError: the stack was begun with another database.
    """
    if recorded and recorded != chosen:
        raise MillraceError(
            f"{key}: must name the database that this stack was begun with, {recorded}; it now means {chosen}. Set it "
            "as it was; or `millrace down`, delete stack.json, and `millrace up` begins with the other database."
        )


def _check(key: str, address: str) -> None:
    known = DRIVERS[key]
    if not address.startswith(known):
        raise MillraceError(f"{key}: must begin with one of {', '.join(known)}; got {masked(address)}")
    driver = urlsplit(address).scheme.partition("+")[2] or {"postgresql": "psycopg2"}.get(urlsplit(address).scheme, "")
    if driver and find_spec(MODULES[driver]) is None:
        raise MillraceError(
            f"{key}: {masked(address)} needs the package {driver}, which is not installed. "
            "pip install -c constraints.txt 'millrace[postgres]' brings asyncpg (for Prefect) and psycopg (for MLflow, "
            "as postgresql+psycopg://)."
        )
