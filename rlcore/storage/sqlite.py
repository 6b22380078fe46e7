"""Addresses of sqlite files as SQLAlchemy reads them, and so MLflow and Prefect."""

from pathlib import Path
from urllib.parse import quote, unquote

SQLITE = "sqlite:///"
_URI_QUERY = "file:"


def sqlite_address(file: Path, scheme: str = SQLITE) -> str:
    """The address of a file. SQLAlchemy takes a path as it stands, `%` and `#` with it, but ends it at a `?`: such a
    path is written in sqlite's own form. Its slashes too are escaped there, or MLflow would make folders of that name.
    `file` is absolute; `scheme` may name a driver.

    >>> sqlite_address(Path("/data/50%/mlflow.db"))
    'sqlite:////data/50%/mlflow.db'
    >>> sqlite_address(Path("/why?/mlflow.db"))
    'sqlite:///file:%2Fwhy%3F%2Fmlflow.db?uri=true'
    """
    text = str(file)
    return f"{scheme}{_URI_QUERY}{quote(text, safe='')}?uri=true" if "?" in text else f"{scheme}{text}"


def sqlite_file(address: str) -> Path:
    """The file of an address; the other way round.

    >>> sqlite_file("sqlite:///file:%2Fwhy%3F%2Fmlflow.db?uri=true"), sqlite_file("sqlite:///mlflow.db?timeout=5")
    (PosixPath('/why?/mlflow.db'), PosixPath('mlflow.db'))
    """
    _, _, rest = address.partition(":///")
    text = rest.partition("?")[0]
    return Path(unquote(text.removeprefix(_URI_QUERY)) if text.startswith(_URI_QUERY) else text)
