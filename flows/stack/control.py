"""The commands `millrace up`, `down` and `status` for the local stack of Prefect, MLflow, workers and a Ray head."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import quote

from flows import SOURCE_FOLDER
from flows.commands.settings import with_program_path
from flows.progress import print_table
from flows.server.api import is_reachable
from flows.stack import services
from flows.stack.state import (
    CLIENT_LOGIN,
    SECRET_FILE,
    STACK_ROOT,
    Service,
    StackState,
    login_hint,
    mlflow_database,
    read_stack,
    root_login,
    stack_tracking_uri,
    write_stack,
)
from rlcore.config import TrackingConfig
from rlcore.config.problems import mask_secrets
from rlcore.errors import MillraceError
from rlcore.storage.locks import HeldLock
from rlcore.tracking.connection import connect, has_store
from rlcore.tracking.mlflow_store import MlflowStore

LOCK_WAIT_S = 600.0
PROFILE = "millrace"
UNCHOSEN = (None, "ephemeral", PROFILE)  # active profiles that the user has not chosen; Prefect's own is `ephemeral`
PRIORITY_VARIABLES = ("PREFECT_API_URL", "PREFECT_PROFILE")  # Prefect prefers them to the active profile


def up(
    root: Path,
    *,
    ray: bool = False,
    workers: int = 1,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    notify_block: str | None = None,
) -> None:
    """Start the missing services, apply the deployments, and print the addresses. The command may be repeated.

    After an error, the services that this call has started are stopped. If a port is None, the last used port is tried
    first, then the default port, then any free port. Raises MillraceError if a service does not start.
    """
    root, ports = root.resolve(), {"prefect": prefect_port, "mlflow": mlflow_port}
    try:
        with _stack_lock(root):
            recorded = read_stack(root)
            _require_compatible(root, recorded, ports)
            ran_before = recorded.running()
            try:
                state = _start_services(root, recorded, ports, notify_block, workers, ray=ray)
            except BaseException:
                _stop_services(read_stack(root).running() - ran_before)
                raise
    except MillraceError as error:
        raise MillraceError(mask_secrets(str(error))) from None
    runs_page = MlflowStore(TrackingConfig(uri=stack_tracking_uri(root)), root).runs_url(state.mlflow_url)
    print(f"\nPrefect   {state.prefect_api_url.removesuffix('/api')}\nMLflow    {runs_page}")
    print(f"Log in    with {login_hint(root)}")
    if (head := state.service("ray")) is not None:
        print(f"Ray       {head.url} (runtime=ray runtime.ray_address={head.url})")
    is_used, profile = keep_profile(state.prefect_api_url, root_login(root))
    print(f"Profile   {profile}\n")
    if not is_used:
        print(shell_export(root, state))
    print(with_program_path("prefect deployment run pipeline/countdown-demo --watch"))


def down(root: Path) -> None:
    """Stop the services of `up` and the flow runs, which save first. The next `up` resumes the flow runs."""
    root = root.resolve()
    with _stack_lock(root):
        running = read_stack(root).running()
        _stop_services(service for service in running if service.is_worker)
        flows = services.flow_runs(root)
        services.stop_flows(flows)
        for flow in flows:
            print(f"a flow run (process {flow.pid}) has ended", flush=True)
        _stop_services(running)
        if (server := read_stack(root).service("prefect")) in running and (line := remove_profile(f"{server.url}/api")):
            print(line, flush=True)
    if not running and not flows:
        print(f"nothing is up under {root}", flush=True)


def status(root: Path) -> None:
    """Print a row for each service. The exit code is 0 if all services are up, otherwise 1."""
    stack, states = read_stack(root), service_states(root)
    rows = [(one.name, state, one.url or f"process {one.pid}", str(one.log)) for one, state in states]
    if not states:
        print(f"nothing was started under {root.resolve()}; `millrace up` starts it", file=sys.stderr)
    print_table(("service", "state", "where", "log"), rows)
    if stack.prefect_api_url and sys.stdout.isatty():
        print(f"\nFor Prefect's own commands, in each new shell:\n{shell_export(root.resolve(), stack)}")
    sys.exit(0 if states and all(state == "up" for _, state in states) else 1)


def service_states(root: Path) -> list[tuple[Service, str]]:
    """Return each recorded service with its state: `up`, `does not answer` or `not running`."""
    states = []
    for service in read_stack(root).services:
        state = "up" if services.is_ready(service) else "does not answer"
        states.append((service, "not running" if service.process() is None else state))
    return states


def shell_export(root: Path, state: StackState) -> str:
    """Return the shell line that sets the address and login of this stack for Prefect's own commands."""
    return f'export PREFECT_API_URL={state.prefect_api_url} {CLIENT_LOGIN}="$(cat {quote(str(root / SECRET_FILE))})"'


def _stack_lock(root: Path) -> HeldLock:
    return HeldLock(root / "stack.lock", what=f"the stack of {root}", wait_s=LOCK_WAIT_S)


def _require_compatible(root: Path, state: StackState, ports: Mapping[str, int | None]) -> None:
    """Check that the requested ports are free. Check the version and the port of each running server.

    A running server must have the installed version and the requested port.
    """
    down_first = f"`millrace down --root {quote(str(root))}`"
    for name, port in ports.items():
        service = state.running_service(name)
        if service is None:
            if port is not None and not services.is_free_port(port):
                raise MillraceError(
                    f"--{name}-port: port {port} is in use on this machine (`ss -ltnp` shows its process). Choose "
                    "another one, or leave the option out for a free port."
                )
            continue
        if service.version != version(name):
            raise MillraceError(
                f"{name} is up at {service.url} in version {service.version}, and {version(name)} is installed here. "
                f"{down_first}, then `millrace up` again; both read the database of the older one."
            )
        if port is not None and port != service.port:
            raise MillraceError(
                f"--{name}-port {port}: {name} is up already at {service.url}, and keeps its port. {down_first} first, "
                "or leave the port out."
            )


def _start_services(
    root: Path, state: StackState, ports: Mapping[str, int | None], notify_block: str | None, workers: int, *, ray: bool
) -> StackState:
    """Start the missing services. MLflow and Ray start while the deployments are applied. The workers start last."""
    ran_before = state.running()
    state = _start(root, state, "prefect", partial(services.start_prefect, root, ports["prefect"]))
    database = mlflow_database(root)
    if not has_store(database):
        connect(database)  # atomic, whereas a server that is killed at its start leaves half of the tables
    services.wait_until_ready(_service(state, "prefect"))
    earlier = state.service("mlflow")
    state = _start(root, state, "mlflow", partial(services.start_mlflow, root, ports["mlflow"]))
    if state.service("mlflow") != earlier:
        state = replace(state, mlflow_database=mask_secrets(database))
    if ray:
        state = _start(root, state, "ray", partial(services.start_ray, root))
    _apply_deployments(root, state, notify_block)
    names = [f"worker-{number}" for number in range(1, workers + 1)]
    for name in names:
        state = _start(root, state, name, partial(services.start_worker, root, name))
    for name in ("prefect", "mlflow", *(["ray"] if ray else []), *names):
        service = _service(state, name)
        services.wait_until_ready(service)
        before = " already" if service in ran_before else ""
        print(f"{name} is up{before}: {service.url or f'process {service.pid}'}", flush=True)
    write_stack(root, state)
    return state


def _start(root: Path, state: StackState, name: str, start: Callable[[StackState], Service]) -> StackState:
    """Start a service unless it is running. Record it immediately, so that `down` can stop it after an error."""
    if state.running_service(name) is not None:
        return state
    print(f"starting {name} ...", flush=True)
    others = tuple(service for service in state.services if service.name != name)
    state = replace(state, services=(*others, start(state)))
    write_stack(root, state)
    return state


def _service(state: StackState, name: str) -> Service:
    service = state.service(name)
    assert service is not None
    return service


def _stop_services(ended: Iterable[Service]) -> None:
    """Stop the services. Workers are stopped first, then the servers that their flows use."""
    order = ("worker", "ray", "mlflow", "prefect")
    for service in sorted(ended, key=lambda service: (order.index(service.name.partition("-")[0]), service.name)):
        if (process := service.process()) is None:
            continue
        if service.is_worker:
            services.kill([process])  # after SIGTERM the worker would mark its flow runs as crashed
        else:
            services.stop_server(process)
        print(f"{service.name} (process {service.pid}) has ended", flush=True)


def _apply_deployments(root: Path, state: StackState, notify_block: str | None) -> None:
    """Run `flows.stack.deploy` in a separate process, because Prefect reads its settings at import."""
    environment = os.environ | services.prefect_environment(root, state.prefect_api_url) | {STACK_ROOT: str(root)}
    if notify_block is not None:
        environment[services.NOTIFY_BLOCK] = notify_block
    done = subprocess.run(
        [sys.executable, "-m", "flows.stack.deploy"],
        cwd=SOURCE_FOLDER,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MillraceError(f"the deployments cannot be applied:\n{(done.stdout + done.stderr).strip()[-4_000:]}")
    print(done.stdout.strip(), flush=True)


def keep_profile(url: str, login: str) -> tuple[bool, str]:
    """Write the Prefect profile of a stack, and activate it unless the user has chosen another profile.

    Return two values: whether the `prefect` command uses this stack in a shell with the current environment, and a line
    about the profile. Nothing changes if the profile belongs to another running stack or cannot be written.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        get_current_settings,
        load_profiles,
        save_profiles,
    )

    path = get_current_settings().profiles_path
    assert path is not None  # Prefect has a default
    try:
        profiles = load_profiles(include_defaults=False)
        known = profiles.profiles_by_name.get(PROFILE)
        other = url if known is None else str(known.settings.get(PREFECT_API_URL, url))
        if other != url and is_reachable(other):
            return False, f"{PROFILE} in {path} stays the one of the running stack at {other}"
        profiles.update_profile(PROFILE, {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: login})
        chosen = profiles.active_name
        if chosen in UNCHOSEN:
            profiles.set_active(PROFILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.chmod(0o600)  # it has the login
        save_profiles(profiles)
    except (OSError, ValueError) as error:
        return False, f"is not written to {path}: {error}"
    if chosen not in UNCHOSEN:
        return False, f"{PROFILE} in {path}; {chosen} stays active until `prefect profile use {PROFILE}`"
    is_used = not any(name in os.environ for name in PRIORITY_VARIABLES)
    return is_used, f"{PROFILE} in {path}, which Prefect's commands use in every new shell"


def remove_profile(url: str) -> str:
    """Remove the Prefect profile for the API at `url`. Return a line for the user, or '' if no such profile exists."""
    from prefect.settings import PREFECT_API_URL, load_profiles, save_profiles

    try:
        profiles = load_profiles(include_defaults=False)
        known = profiles.profiles_by_name.get(PROFILE)
        if known is None or known.settings.get(PREFECT_API_URL) != url:
            return ""
        profiles.remove_profile(PROFILE)
        if profiles.active_name == PROFILE:
            profiles.set_active(None)
        save_profiles(profiles)
    except (OSError, ValueError) as error:
        return f"the Prefect profile {PROFILE} is not removed: {error}"
    return f"the Prefect profile {PROFILE} is removed"
