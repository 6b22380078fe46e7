"""The folders and addresses of Ray clusters, and checks of them before a run. This module does not use Ray, because Ray
tries for minutes to connect to a closed port."""

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

END_WAIT_S = 5.0  # seconds in which processes of Ray may still write after a request to end
DEAD_FOR_S = 3_600.0  # minimum age in seconds at which a killed cluster's folder is removed
LONGEST_SOCKET_PATH = 107  # kernel's limit for the path of a Unix socket, in bytes
LONGEST_SOCKET = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest socket path that Ray appends to its folder, for a check against `LONGEST_SOCKET_PATH`."""
LEAST_STORE_BYTES = 256 * 1024**2
SENT_BYTES_PER_TOKEN = 100  # bytes that a step sends per token, for the reference and the updates together


def private_folder() -> Path:
    """Return the folder of this user's Ray clusters and authentication token. Its path is short, because Ray's sockets
    are in this folder and the length of a socket's path is limited."""
    return Path(tempfile.gettempdir()) / f"ray-{os.geteuid()}"


def ray_folder() -> Path:
    """Return the folder of Ray's sockets, logs and spilled objects. Its mode is 0777, and its parent's mode is 0700."""
    return private_folder() / "ray"


def store_bytes(config: RunConfig) -> int:
    """Return the size, in bytes, of a private cluster's object store. It is the size of the largest batch, limited by
    the free shared memory and 30% of the host's memory, but at least `LEAST_STORE_BYTES`."""
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else LEAST_STORE_BYTES
    most = min(free, psutil.virtual_memory().total * 3 // 10)
    return max(LEAST_STORE_BYTES, min(_sent_bytes(config), most))


def spilled_bytes(config: RunConfig) -> int:
    """Return an estimate of the bytes that Ray writes to the cluster's folder if the largest batch exceeds the object
    store."""
    return max(LEAST_STORE_BYTES, _sent_bytes(config) - store_bytes(config))


def _sent_bytes(config: RunConfig) -> int:
    responses = config.trainer.batch_size * config.rollout.samples_per_prompt
    return SENT_BYTES_PER_TOKEN * responses * (config.filter.max_prompt_tokens + config.rollout.max_response_tokens)


def token_file() -> Path:
    """Return the file with the authentication token of this user's clusters."""
    return private_folder() / "auth_token"


def folder_problem() -> str | None:
    """Return the reason why Ray cannot use its folder, or None if Ray can use it."""
    folder = private_folder()
    remedy = "Set TMPDIR to another folder"
    if len(os.fsencode(f"{ray_folder()}{LONGEST_SOCKET}")) > LONGEST_SOCKET_PATH:
        return (
            f"{folder}: Ray's sockets are in it, and a socket's path may not exceed {LONGEST_SOCKET_PATH} bytes. "
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
                f"{os.geteuid()}), since its owner controls the run; got {stat.filemode(found.st_mode)} of uid "
                f"{found.st_uid}. {remedy}, or have {folder} removed"
            )
    return None


def loopback_environment() -> Mapping[str, str]:
    """Return environment variables with which Ray listens only on loopback and requires this user's token. Create the
    folder and the token if needed. Raises ConfigError if Ray cannot use the folder, for example because it belongs to
    another user."""
    folder, token = private_folder(), token_file()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if problem := folder_problem():
        raise ConfigError(problem)
    folder.chmod(0o700)  # an existing one may be open to others
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
    """Make Ray in this process listen only on loopback and require this user's token. Do nothing if `ray_address` names
    another cluster than the one that `millrace up --ray` has started. Raises ConfigError if Ray cannot use its folder,
    or if Ray was imported earlier with other environment variables."""
    if ray_address is not None and address_of(ray_address) != own_head():
        return
    wanted = loopback_environment()
    if "ray" in sys.modules and any(os.environ.get(name) != value for name, value in wanted.items()):
        raise ConfigError(
            "runtime.backend=ray: ray must not be imported before the workers start, since it then reads its address "
            "and its token. Start the run in a separate process, or set "
            f"{' '.join(f'{name}={value}' for name, value in wanted.items())} in its environment."
        )
    os.environ.update(wanted)


def address_of(given: str) -> str:
    """Return a cluster's address, with 127.0.0.1 for localhost. For `auto`, this is the address in RAY_ADDRESS. If
    RAY_ADDRESS is unset, this is the address of the running cluster of `millrace up --ray`. If there is no such cluster
    either, `auto` is returned."""
    if given == "auto":
        own = own_head()
        given = os.environ.get("RAY_ADDRESS") or (own if own and unreachable(own) is None else given)
    host, _, port = given.rpartition(":")
    return f"127.0.0.1:{port}" if host.lower() == "localhost" else given


def own_head() -> str | None:
    """Return the address of the cluster that `millrace up --ray` has started, or None."""
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
    """Remove the folders of killed clusters."""
    for session in ray_folder().glob("session_2*"):
        with suppress(FileNotFoundError):  # another run has removed it
            if time.time() - session.stat().st_mtime > DEAD_FOR_S and not _is_alive(session):
                remove_session(session)


def _is_alive(session: Path) -> bool:
    """Return whether a node of the cluster accepts connections on its socket. Process ids are not checked, because they
    are not valid across containers."""
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
    """Return the reason why no process listens at `address`, or None. The address `auto` is not checked."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return (
            f"runtime.ray_address: must be the address of a Ray cluster; got {mask_secrets(address)}, where nothing "
            f"answers ({error}). Start one there (ray start --head --port 6379, or millrace up --ray), correct the "
            "address, or leave it out for a private cluster"
        )
    return None
