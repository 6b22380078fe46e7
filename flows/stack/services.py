"""The processes of the local stack, with functions that start them, wait for them and stop them."""

import os
import shlex
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil

from flows import SOURCE_FOLDER
from flows.server.api import PREFECT_ENVIRONMENT
from flows.server.launch import log_tail, python_path, start_process
from flows.stack.state import (
    CLIENT_LOGIN,
    FLOW_RUN_COMMAND,
    LOOPBACK,
    MLFLOW_APP,
    MLFLOW_DATABASE,
    MLFLOW_LOGIN,
    PREFECT_DATABASE,
    PREFECT_SERVER_DATABASE,
    RESPONSES_ROOT,
    SERVER_LOGIN,
    STACK_ROOT,
    Service,
    StackState,
    mlflow_database,
    prefect_database,
    root_login,
)
from rlcore.errors import ConfigError, MillraceError
from rlcore.runtime.cluster import loopback_environment, ray_folder
from rlcore.storage.locks import start_time_of

POOL = "millrace"
FLOW_RUNS = "flow-runs"  # the log that all flow runs share
_LOGGED_COMMAND = (
    f'exec {shlex.quote(sys.executable)} {FLOW_RUN_COMMAND} >>"${STACK_ROOT}/stack-logs/{FLOW_RUNS}.log" 2>&1'
)
FLOW_COMMAND = shlex.join(["sh", "-c", _LOGGED_COMMAND])  # by which a worker starts a flow run
NOTIFY_BLOCK = "MILLRACE_NOTIFY_BLOCK"  # a notification block in the form that `prefect block ls` prints
READY_WAIT_S = 600.0  # seconds for a service to start; the first start creates both databases
POLL_S = 0.2
STOP_WAIT_S = 40.0  # seconds for servers and flow runs to end; a flow run waits until its trainer has saved
TRAINER = "rlcore.run.process"


def start_prefect(root: Path, port: int | None, state: StackState) -> Service:
    """Start Prefect's server with its web page and its background services."""
    port = _choose_port(state, "prefect", default=4200, requested=port)
    url = f"http://{LOOPBACK}:{port}"
    environment = prefect_environment(root, f"{url}/api") | {
        SERVER_LOGIN: root_login(root),
        STACK_ROOT: str(root),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url,
        "PREFECT_UI_API_URL": "/api",  # on the page's own origin, also through a tunnel
        # Otherwise a slot of a killed holder stays occupied after a restart of the server.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # These settings let `--watch` show a run's log with the reason of a failure.
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        PREFECT_DATABASE: prefect_database(root / "prefect"),
    }
    command = [sys.executable, "-P", "-m", "flows.stack.serve", str(port)]
    return _start(root, "prefect", command, environment, port, url=url, ready_url=f"{url}/api/health")


def start_mlflow(root: Path, port: int | None, state: StackState, *, tether: bool = False) -> Service:
    """Start MLflow's server with the page of responses. If `tether` is true, the server ends with this process."""
    port = _choose_port(state, "mlflow", default=5000, requested=port)
    url = f"http://{LOOPBACK}:{port}"
    environment = {
        MLFLOW_LOGIN: root_login(root),
        MLFLOW_DATABASE: mlflow_database(root),
        "PYTHONPATH": python_path(),
        "PYTHONSAFEPATH": "1",
        RESPONSES_ROOT: str(root),
        # Its job runners take 2 GB and half a minute to start, and are not used.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", MLFLOW_APP, "--workers", "1"]
    command += ["--host", LOOPBACK, "--port", str(port), "--uvicorn-opts", "--log-level warning --lifespan on"]
    # CORS keeps its default, which allows only loopback. MLflow would send named origins to every client.
    command += ["--allowed-hosts", "127.0.0.1,127.0.0.1:*,localhost,localhost:*"]
    # A URI, because MLflow would decode %41 in a plain path to an A.
    command += ["--artifacts-destination", (root / "mlartifacts").as_uri()]
    return _start(root, "mlflow", command, environment, port, url=url, ready_url=f"{url}/health", tether=tether)


def start_ray(root: Path, state: StackState) -> Service:
    """Start a Ray head for this user on this machine. Runs join it through the setting `runtime.ray_address`."""
    port = _choose_port(state, "ray", default=6379)
    ray = str(Path(sys.executable).parent / "ray")
    if not Path(ray).is_file():
        raise ConfigError(
            f"--ray: needs Ray in this environment, and {ray} does not exist. Start a head with the trainer's "
            "environment (`ray start --head`), or leave --ray out."
        )
    command = [ray, "start", "--head", "--block", "--node-ip-address", LOOPBACK, "--port", str(port)]
    command += ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", str(ray_folder())]
    return _start(root, "ray", command, loopback_environment(), port, url=f"{LOOPBACK}:{port}")


def start_worker(root: Path, name: str, state: StackState) -> Service:
    """Start a Prefect worker that starts each flow run as a process on this host."""
    port = _choose_port(state, name)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--with-healthcheck"]
    command += ["--name", f"{name}@{os.uname().nodename}"]
    environment = prefect_environment(root, state.prefect_api_url) | {
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_WEBSERVER_HOST": LOOPBACK,
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
        # A flow that `millrace down` stops stays Running instead of Crashed, so the next `up` resumes it.
        "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
        STACK_ROOT: str(root),
    }
    log_of(root, FLOW_RUNS)
    return _start(root, name, command, environment, port, ready_url=f"http://{LOOPBACK}:{port}/health")


def prefect_environment(root: Path, api_url: str) -> dict[str, str]:
    """Return environment variables for the processes that use Prefect.

    They contain Prefect's settings, and our source folder in PYTHONPATH.
    """
    return {
        **PREFECT_ENVIRONMENT,
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(root / "prefect" / "storage"),  # does not follow PREFECT_HOME
        "PREFECT_API_URL": api_url,
        CLIENT_LOGIN: root_login(root),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
        "PYTHONPATH": python_path(),
    }


def _start(
    root: Path,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    *,
    url: str = "",
    ready_url: str = "",
    tether: bool = False,
) -> Service:
    """Start a service with a log file in the workspace.

    The service does not inherit the addresses of databases, which may contain passwords. Only the server that uses a
    database gets the database's address, in `environment`.
    """
    log = log_of(root, name)
    secret = (PREFECT_DATABASE, PREFECT_SERVER_DATABASE, MLFLOW_DATABASE)
    inherited = {key: value for key, value in os.environ.items() if key not in secret}
    process = start_process(command, log, {**inherited, **environment}, folder=SOURCE_FOLDER, tether=tether)
    threading.Thread(target=process.wait, daemon=True).start()  # reaps the process if it ends before us
    try:
        born = start_time_of(psutil.Process(process.pid))
    except psutil.NoSuchProcess:
        raise MillraceError(f"{name} has ended instead of starting. {log_tail(log)}") from None
    release = version(name) if name in ("prefect", "mlflow") else ""
    return Service(name, process.pid, born, port, url, ready_url, str(log), release)


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free_port(port: int) -> bool:
    """Return whether a server can listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _choose_port(state: StackState, name: str, *, default: int | None = None, requested: int | None = None) -> int:
    """Return the first free port of these: the requested, the last used, the default and any other port."""
    known = state.service(name)
    for port in (requested, None if known is None else known.port, default):
        if port is not None and is_free_port(port):
            return port
        if port is not None:
            print(f"port {port} is in use on this machine; {name} gets another one", flush=True)
    return free_port()


def log_of(root: Path, name: str) -> Path:
    """Return the log file of a service. A missing file is created and is readable only by its owner."""
    log = root / "stack-logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    log.touch(0o600)
    return log


def wait_until_ready(service: Service) -> None:
    """Wait until a service is ready. Raises MillraceError if it has ended or does not answer in time."""
    deadline = time.monotonic() + READY_WAIT_S
    while not is_ready(service):
        if service.process() is None:
            raise MillraceError(f"{service.name} has ended instead of starting. {log_tail(service.log)}")
        if time.monotonic() >= deadline:
            raise MillraceError(f"{service.name} does not answer on port {service.port}. {log_tail(service.log)}")
        time.sleep(POLL_S)


def is_ready(service: Service) -> bool:
    """Return whether a service is ready: its process listens on the service's port, and its page answers."""
    process = service.process()
    if process is None or not _listens(process, service.port):
        return False
    if not service.ready_url:
        return True
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(service.ready_url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    """Return whether the process or one of its descendants listens on the port."""
    for member in (process, *_descendants(process)):
        with suppress(psutil.Error):
            for connection in member.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def stop_server(process: psutil.Process) -> None:
    """Send SIGTERM to a server, wait, and kill the remaining processes of the server and its descendants."""
    family = [process, *_descendants(process)]
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    _, left = psutil.wait_procs(family, timeout=STOP_WAIT_S)
    kill(left)


def stop_flows(flows: Sequence[psutil.Process]) -> None:
    """Send SIGTERM to flow runs and wait. Then kill the processes that they started, except the trainers, which still
    write their last checkpoints."""
    family = [member for flow in flows for member in (flow, *_descendants(flow))]
    for flow in flows:
        with suppress(psutil.NoSuchProcess):
            flow.terminate()
    _, left = psutil.wait_procs(family, timeout=STOP_WAIT_S)
    others = []
    for member in left:
        with suppress(psutil.NoSuchProcess):
            others += [member] if TRAINER not in member.cmdline() else []
    kill(others)


def flow_runs(root: Path) -> list[psutil.Process]:
    """Return the processes of all flow runs that workers of this workspace have started. The workers may have ended."""
    found, home = [], str(root / "prefect")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if FLOW_RUN_COMMAND in " ".join(process.cmdline()) and process.environ().get("PREFECT_HOME") == home:
                found.append(process)
    return found


def kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to the processes and wait until they have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=STOP_WAIT_S)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
