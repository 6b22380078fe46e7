"""Where Ray writes on this host. No ray: plans read it too."""

import getpass
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rlcore.storage.temporary import remove_tree

END_WAIT_S = 5.0
"""Ray's processes may still write for a moment after they were told to end."""
DEAD_FOR_S = 3_600.0
"""What a killed cluster has logged can be looked at for that long, if no other one is started meanwhile."""


def ray_folder() -> Path:
    """Folder of a private cluster's sockets, logs and spilled objects.

    The path of a socket may not pass 107 bytes, so it cannot lie in the run's folder.
    """
    return Path(tempfile.gettempdir()) / f"ray-{getpass.getuser()}"


def remove_session(session: Path) -> None:
    """Remove the folder of a cluster that has ended."""
    latest = session.with_name("session_latest")
    if latest.is_symlink() and latest.resolve() == session.resolve():
        latest.unlink(missing_ok=True)
    deadline = time.monotonic() + END_WAIT_S
    while session.exists():
        remove_tree(session)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def remove_dead_sessions() -> None:
    """Remove what clusters have left that were killed: no other process of ours would."""
    for session in ray_folder().glob("session_2*"):
        with suppress(FileNotFoundError):  # another run that starts at this moment has removed it
            if time.time() - session.stat().st_mtime > DEAD_FOR_S and not _is_alive(session):
                remove_session(session)


def _is_alive(session: Path) -> bool:
    """Whether a node of the cluster answers; also one in another container, whose process ids mean nothing here."""
    for path in (session / "sockets").glob("raylet*"):
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(path))
            except OSError:
                continue
            return True
    return False
