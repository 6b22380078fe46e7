"""The login of a root's servers: a file that its owner alone may read, with the one line `millrace:<random>`.

It reaches our processes by their environment, which no other user can read; never by a command line or `stack.json`,
which everybody can.
"""

import os
import secrets
from pathlib import Path
from shlex import quote

from rlcore.errors import MillraceError
from rlcore.storage.publish import write_secret_once

SECRET_FILE = "stack-secret"
USER = "millrace"
CLIENT_LOGIN = "PREFECT_API_AUTH_STRING"
SERVER_LOGIN = "PREFECT_SERVER_API_AUTH_STRING"
"""Environment of Prefect's clients, and of its server."""


def new_login() -> str:
    """A new random login of 256 bits."""
    return f"{USER}:{secrets.token_urlsafe(32)}"


def root_login(root: Path) -> str:
    """The login of this root's servers, made when it is first asked for.

    Raises:
        MillraceError: others may read or have written the file.
    """
    path = root / SECRET_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret_once(path, new_login() + "\n")
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            login = file.read().strip()
    except PermissionError as error:
        raise MillraceError(
            f"{path}: may not be read: another user has started a stack under {root}. Name a root of your own by "
            "--root, or paths.root."
        ) from error
    if found.st_mode & 0o077 or found.st_uid != os.geteuid() or not login.startswith(f"{USER}:"):
        raise MillraceError(
            f"{path}: must be a file of yours that nobody else may read (mode 0600, one line {USER}:...). `millrace "
            f"down --root {quote(str(root))}`, delete the file, and `millrace up` makes another one."
        )
    return login


def login_hint(root: Path) -> str:
    """A sentence for people who open the pages."""
    return f"the line in {root / SECRET_FILE}: Prefect takes it whole, MLflow as user and password around the colon"


def mlflow_login_environment(login: str) -> dict[str, str]:
    """Environment of MLflow's clients."""
    user, _, password = login.partition(":")
    return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
