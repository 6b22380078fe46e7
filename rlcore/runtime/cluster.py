"""Ray clusters without importing Ray: whether an address answers, folders on this host, and the secret of commands.

Plans use it too; Ray itself would try a closed port for minutes.
"""

import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from rlcore.config import RunConfig
from rlcore.config.problems import mask_secrets
from rlcore.errors import ConfigError
from rlcore.storage.publish import remove_tree, write_secret_once

END_WAIT_S = 5.0
"""Ray's processes may still write for a moment after they were asked to end."""
DEAD_FOR_S = 3_600.0
"""Age at which the next start removes the logs of a killed cluster."""
LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's path, by the kernel."""
LONGEST_SOCKET = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""What Ray adds to its folder."""
LEAST_STORE_BYTES = 256 * 1024**2
SENT_BYTES_PER_TOKEN = 100
"""What a step sends of a token, the reference's part of the batch and the updates' side by side."""


def private_folder() -> Path:
    """Folder of this user's clusters and of the secret that they ask for. A run's is too long for a socket's path."""
    return Path(tempfile.gettempdir()) / f"ray-{os.geteuid()}"


def ray_folder() -> Path:
    """Folder of the clusters' sockets, logs and spilled objects. Ray makes it 0777; the one above it is 0700."""
    return private_folder() / "ray"


def store_bytes(config: RunConfig) -> int:
    """Limit of the store in which a private cluster sends batches: the largest batch of the settings, as far as shared
    memory and Ray's own limit, 30% of the host's memory, go."""
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else LEAST_STORE_BYTES
    most = min(free, psutil.virtual_memory().total * 3 // 10)
    return max(LEAST_STORE_BYTES, min(_sent_bytes(config), most))


def spilled_bytes(config: RunConfig) -> int:
    """What the cluster's folder may take of the largest batch: what its store has no room for. The least store itself,
    where shared memory is smaller."""
    return max(LEAST_STORE_BYTES, _sent_bytes(config) - store_bytes(config))


def _sent_bytes(config: RunConfig) -> int:
    answers = config.trainer.batch_size * config.rollout.samples_per_prompt
    return SENT_BYTES_PER_TOKEN * answers * (config.filter.max_prompt_tokens + config.rollout.max_response_tokens)


def token_file() -> Path:
    """File of the secret that commands to a cluster of this user must carry."""
    return private_folder() / "auth_token"


def folder_problem() -> str | None:
    """Why Ray cannot use its folder; None where it can, or where the folder is not there yet."""
    folder = private_folder()
    remedy = "Set TMPDIR to another folder"
    if len(os.fsencode(f"{ray_folder()}{LONGEST_SOCKET}")) > LONGEST_SOCKET_PATH:
        return (
            f"{folder}: Ray's sockets lie below it, and a socket's path may not pass {LONGEST_SOCKET_PATH} bytes. "
            f"{remedy}, with a shorter path"
        )
    for path, is_right in ((folder, stat.S_ISDIR), (ray_folder(), stat.S_ISDIR), (token_file(), stat.S_ISREG)):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path}: must be readable; got {error}. {remedy}, or remove {folder}"
        if not is_right(found.st_mode) or found.st_uid != os.geteuid():
            return (
                f"{path}: must be a {'folder' if is_right is stat.S_ISDIR else 'file'} of this user (uid "
                f"{os.geteuid()}), since who owns it commands the run; got {stat.filemode(found.st_mode)} of uid "
                f"{found.st_uid}. {remedy}, or have {folder} removed"
            )
    return None


def loopback_environment() -> Mapping[str, str]:
    """Environment in which Ray listens on loopback alone, and refuses connections without this user's secret.

    For starting a cluster of this machine alone and for joining one. Makes folder and secret.

    Raises:
        ConfigError: the folder is not this user's own.
    """
    folder, token = private_folder(), token_file()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if problem := folder_problem():
        raise ConfigError(problem)
    folder.chmod(0o700)  # one that is there may be open to others
    if not token.exists():
        write_secret_once(token, secrets.token_hex(32))
    token.chmod(0o600)
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray takes 127.0.0.1 for the host's address in the network, and then listens on all addresses.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }


def restrict_ray(ray_address: str | None) -> None:
    """Restrict this process, and a cluster of this machine alone that it starts or joins, to loopback and this user's
    secret. Nothing to do for another cluster.

    Raises:
        ConfigError: the folder is not this user's own, or Ray is imported already: it reads the environment then.
    """
    if ray_address is not None and not is_own_head(address_of(ray_address)):
        return
    wanted = loopback_environment()
    if "ray" in sys.modules and any(os.environ.get(name) != value for name, value in wanted.items()):
        raise ConfigError(
            "runtime.backend=ray: ray must not be imported before the workers start, since it reads then that it is to "
            "listen on loopback and to ask for a secret. Start the run in a process of its own, or set "
            f"{' '.join(f'{name}={value}' for name, value in wanted.items())} in its environment."
        )
    os.environ.update(wanted)


def address_of(given: str) -> str:
    """A cluster's address as `ray start` notes its own, and as Ray compares it: localhost is 127.0.0.1 there. `auto`
    is RAY_ADDRESS, else that of `millrace up --ray` where it runs, which Ray itself would not be let into.

    >>> address_of("localhost:6379"), address_of("head.example:6379")
    ('127.0.0.1:6379', 'head.example:6379')
    """
    if given == "auto":
        own = _own_head()
        given = os.environ.get("RAY_ADDRESS") or (own if own and unreachable(own) is None else given)
    host, _, port = given.rpartition(":")
    return f"127.0.0.1:{port}" if host.lower() == "localhost" else given


def is_own_head(address: str) -> bool:
    """Whether the cluster at an address is that of `millrace up --ray`."""
    return address == _own_head()


def _own_head() -> str | None:
    """The address that `ray start` has noted in the folder; perhaps of one that has ended."""
    try:
        return (ray_folder() / "ray_current_cluster").read_text().strip()
    except OSError:
        return None


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
    """Remove the folders of clusters that were killed: nothing else removes them."""
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


_ANSWER_TIMEOUT_S = 10.0


def unreachable(address: str) -> str | None:
    """Why nothing can be joined at `address`; None where something listens, or where only Ray can find out (`auto`).

    >>> unreachable("auto") is None
    True
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return (
            f"runtime.ray_address: must be the address of a Ray cluster; got {mask_secrets(address)}, where nothing answers "
            f"({error}). Start one there (ray start --head --port 6379, or millrace up --ray), correct the address, or "
            "leave it out for a cluster of the run's own"
        )
    return None
