"""Processes of the local stack: how each is started, whether it answers on its port, and how it ends."""

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows import SOURCE_FOLDER
from flows.parameters import MLFLOW_PAGE
from flows.server.api import QUIET
from flows.server.database import PREFECT_DATABASE, PREFECT_DATABASE_TOO
from flows.server.launch import NUM_LAST_CHARS, PORT_TAKEN, end_of, python_path
from flows.server.secret import CLIENT_LOGIN, SERVER_LOGIN, login_of
from flows.stack.serve import ANSWERS_ROOT, MLFLOW_APP, MLFLOW_LOGIN
from flows.stack.state import LOOPBACK, MLFLOW_DATABASE, STACK, WORKERS_COMMAND, Databases, Service, StackState
from rlcore.errors import MillraceError
from rlcore.runtime.cluster import loopback_environment, ray_folder
from rlcore.storage.locks import birth_of

POOL = "millrace"
FLOW_RUNS = "flow-runs"
"""Name of the log to which flow runs write."""
_IN_ITS_LOG = f'exec {shlex.quote(sys.executable)} {WORKERS_COMMAND} >>"${STACK}/stack-logs/{FLOW_RUNS}.log" 2>&1'
FLOW_COMMAND = shlex.join(["sh", "-c", _IN_ITS_LOG])
"""How a worker starts a flow run."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a service is started. `ready_url` answers once it is up; '' where there is nothing to ask."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    url: str
    ready_url: str

    def started(self, pid: int, born: float, log: Path) -> Service:
        """The service, once its process is there."""
        return Service(self.name, pid, born, self.port, self.url, self.ready_url, str(log))


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _port_of(state: StackState, name: str, *, default: int | None = None, wanted: int | None = None) -> int:
    """The port that was asked for; else the one that it had, so that a page stays where it was; else a free one."""
    if wanted is not None:
        if not is_free(wanted):
            raise MillraceError(
                f"--{name}-port: port {wanted} is in use by {described_listener(wanted)}. Choose another one, or leave "
                "the option out: then a free port is taken and kept."
            )
        return wanted
    known = state.service(name)
    for port in (None if known is None else known.port, default):
        if port and is_free(port):
            return port
        if port:
            say(f"port {port} is in use by {described_listener(port)}; {name} takes another one")
    return free_port()


def prefect_recipe(root: Path, databases: Databases, port: int | None, state: StackState) -> Recipe:
    """Prefect's server, page and services."""
    port = _port_of(state, "prefect", default=4200, wanted=port)
    url = f"http://{LOOPBACK}:{port}"
    environment = prefect_environment(root, f"{url}/api") | {
        SERVER_LOGIN: login_of(root),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url,
        "PREFECT_UI_API_URL": "/api",  # of the page's own origin, whatever tunnel it came through
        # Without it a slot of a holder that was killed stays taken for ever once the server is started anew.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # So that `--watch` shows a run's log, and why it has failed.
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        PREFECT_DATABASE: databases.prefect,
    }
    command = (sys.executable, "-P", "-m", "flows.stack.serve", str(port))
    return Recipe("prefect", command, environment, port, url, f"{url}/api/health")


def mlflow_recipe(root: Path, databases: Databases, port: int | None, state: StackState) -> Recipe:
    """How MLflow's server, with our pages, is started."""
    port = _port_of(state, "mlflow", default=5000, wanted=port)
    url = f"http://{LOOPBACK}:{port}"
    environment = {
        MLFLOW_LOGIN: login_of(root),
        MLFLOW_DATABASE: databases.mlflow,
        "PYTHONPATH": python_path(),
        "PYTHONSAFEPATH": "1",
        ANSWERS_ROOT: str(root),
        # Its job runners take 2 GB and half a minute to start, and nothing here uses them.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", MLFLOW_APP, "--workers", "1"]
    command += ["--host", LOOPBACK, "--port", str(port), "--uvicorn-opts", "--log-level warning --lifespan on"]
    # Its CORS is what it is by default, loopback alone: with origins named it sends them to whoever asks.
    command += ["--allowed-hosts", "127.0.0.1,127.0.0.1:*,localhost,localhost:*"]
    # As a URI: of a plain path MLflow would take %41 for an A.
    command += ["--artifacts-destination", (root / "mlartifacts").as_uri()]
    return Recipe("mlflow", tuple(command), environment, port, url, f"{url}/health")


def ray_recipe(state: StackState) -> Recipe:
    """A Ray head of this user and machine alone; runs join it by `runtime.ray_address`."""
    port = _port_of(state, "ray", default=6379)
    ray = str(Path(sys.executable).parent / "ray")
    command = [ray, "start", "--head", "--block", "--node-ip-address", LOOPBACK, "--port", str(port)]
    command += ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", str(ray_folder())]
    return Recipe("ray", tuple(command), loopback_environment(), port, f"{LOOPBACK}:{port}", "")


def worker_recipe(root: Path, number: int, state: StackState) -> Recipe:
    """A Prefect worker that starts flow runs as processes on this host. It does not know the databases."""
    name = f"worker-{number}"
    port = _port_of(state, name)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--with-healthcheck"]
    command += ["--name", f"{name}@{os.uname().nodename}"]
    environment = prefect_environment(root, state.prefect_api_url) | {
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_WEBSERVER_HOST": LOOPBACK,
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
        # A flow that is told to end by `millrace down` has not crashed: it stays Running, and the next `up` goes on.
        "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
        MLFLOW_PAGE: state.mlflow_url,
        STACK: str(root),
    }
    log_of(root, FLOW_RUNS)
    return Recipe(name, tuple(command), environment, port, "", f"http://{LOOPBACK}:{port}/health")


def prefect_environment(root: Path, api_url: str) -> dict[str, str]:
    """Prefect's settings in every process of the stack, and where it finds the code that we run."""
    return {
        **QUIET,
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(root / "prefect" / "storage"),  # does not follow PREFECT_HOME
        "PREFECT_API_URL": api_url,
        CLIENT_LOGIN: login_of(root),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
        "PYTHONPATH": python_path(),
    }


HEARS_LOOPBACK = frozenset({LOOPBACK, "0.0.0.0", "::", "::ffff:127.0.0.1"})
"""Addresses whose listeners are reached under LOOPBACK."""


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server may listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def listener(port: int) -> psutil.Process | None:
    """The process that listens there on loopback; None where this user may not see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            at = connection.laddr
            is_there = connection.status == psutil.CONN_LISTEN and at and at.port == port and at.ip in HEARS_LOOPBACK
            if is_there and connection.pid:
                return psutil.Process(connection.pid)
    return None


def described_listener(port: int) -> str:
    """The process that listens on the port, in words."""
    process = listener(port)
    if process is None:
        return "a process of another user"
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:120]})"
    except psutil.Error:
        return f"process {process.pid}"


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process, or one that it has started, listens there: another server may have been quicker."""
    try:
        family = {process.pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        return False
    found = listener(port)
    return found is not None and found.pid in family


# ---------------------------------------------------------------------- start, wait, end

READY_WAIT_S = 600.0
"""The first start makes both databases; minutes on a busy machine. A service that dies is noticed at once."""
POLL_S = 0.2
END_WAIT_S = 40.0
"""Seconds for servers and flow runs to end; a flow run waits for its trainer, which saves in any case."""
TRAINER = "rlcore.run.process"


class PortTakenError(MillraceError):
    """Another process took the port between its choice and its use, which may be a minute."""


def start(root: Path, recipe: Recipe) -> Service:
    """Start a service that outlives us, with its log under the root. Only a database's own server gets its address.

    Raises:
        MillraceError: the service has ended at once.
    """
    log = log_of(root, recipe.name)
    secret = (PREFECT_DATABASE, PREFECT_DATABASE_TOO, MLFLOW_DATABASE)
    inherited = {name: value for name, value in os.environ.items() if name not in secret}
    with log.open("ab") as output:
        process = subprocess.Popen(
            recipe.command,
            cwd=SOURCE_FOLDER,
            env={**inherited, **recipe.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # else it is a zombie if it ends before us
    try:
        born = birth_of(psutil.Process(process.pid))
    except psutil.NoSuchProcess:
        raise MillraceError(f"{recipe.name} has ended instead of starting. {end_of(str(log))}") from None
    return recipe.started(process.pid, born, log)


def log_of(root: Path, name: str) -> Path:
    """The log of a service, made where it is missing: it may say more than everybody should read."""
    log = root / "stack-logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    log.touch(0o600)
    return log


def wait_until_ready(service: Service) -> None:
    """Wait until the service answers on its port, and is the process that listens there.

    Raises:
        MillraceError: it has ended, or does not answer in time.
    """
    deadline = time.monotonic() + READY_WAIT_S
    while True:
        process = service.process()
        if process is None:
            end = Path(service.log).read_text(errors="replace")[-NUM_LAST_CHARS:]
            kind = PortTakenError if PORT_TAKEN in end else MillraceError
            raise kind(f"{service.name} has ended instead of starting. {end_of(service.log)}")
        if answers(service) and listens(process, service.port):
            return
        if time.monotonic() >= deadline:
            raise MillraceError(f"{service.name} does not answer on port {service.port}. {end_of(service.log)}")
        time.sleep(POLL_S)


def answers(service: Service) -> bool:
    """Whether its page answers; true where it has none."""
    if not service.ready_url:
        return True
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(service.ready_url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def end_server(process: psutil.Process) -> None:
    """SIGTERM, time to end, then SIGKILL to what is left of it and of what it has started."""
    family = [process, *_below(process)]
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    _, left = psutil.wait_procs(family, timeout=END_WAIT_S)
    _kill(left)


def end_worker(process: psutil.Process) -> None:
    """Kill a worker, which would note its flow runs as crashed, and end these; they stay Running for the next `up`."""
    end_flows(_below(process, all_of_them=False), [process])


def end_flows(flows: list[psutil.Process], workers: Sequence[psutil.Process] = ()) -> None:
    """Tell flow runs to end; kill the workers that have started them, and what is left in the end but trainers."""
    family = [*workers, *(member for flow in flows for member in (flow, *_below(flow)))]
    _kill(workers)
    for flow in flows:
        with suppress(psutil.NoSuchProcess):
            flow.terminate()
    _, left = psutil.wait_procs(family, timeout=END_WAIT_S)
    _kill([member for member in left if TRAINER not in _command_of(member)])  # a trainer was told, and is saving


def orphans(root: Path) -> list[psutil.Process]:
    """Flow runs of this root's workers; once those have ended, of workers that were killed and have left them."""
    found, home = [], str(root / "prefect")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).endswith(WORKERS_COMMAND) and process.environ().get("PREFECT_HOME") == home:
                found.append(process)
    return found


def _below(process: psutil.Process, *, all_of_them: bool = True) -> list[psutil.Process]:
    try:
        return process.children(recursive=all_of_them)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_WAIT_S)


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
