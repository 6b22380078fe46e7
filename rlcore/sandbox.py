"""Execution of a Python program that a model wrote, inside a sandbox.

bubblewrap gives the program separate user, network, pid, ipc and mount namespaces, read-only /usr and Python, a bounded
/tmp, and no environment variables. A seccomp filter allows one process with any number of threads. Kernel limits bound
memory, files and output (docs/decisions/0014-programs-run-under-bubblewrap.md)."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from rlcore.config.rollout import SandboxConfig
from rlcore.errors import ConfigError

_VARIABLE = "MILLRACE_SANDBOX"
_USER_ID = "65534"
_PROGRAM = "/program/main.py"
_DENIED_SYSCALLS = (
    "ptrace", "process_vm_readv", "process_vm_writev", "mount", "umount2", "pivot_root", "setns", "unshare", "keyctl",
    "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "fork", "vfork", "socketpair",
    "memfd_create", "shmget", "msgget",
)  # fmt: skip
_CLONE_THREAD = 0x10000
_AF_UNIX = 1


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The output and exit code of a program. `stop_reason` explains why the sandbox ended the program, or is ''."""

    stdout: str
    stderr: str
    code: int
    stop_reason: Literal["", "time", "output"]


def set_limits(settings: SandboxConfig) -> None:
    """Set the limits for programs that this process and its children run in the sandbox."""
    os.environ[_VARIABLE] = settings.model_dump_json()


def current_limits() -> SandboxConfig:
    """Return the limits that this process or a parent process has set, or the defaults if none has."""
    return SandboxConfig.model_validate_json(os.environ.get(_VARIABLE, "{}"))


def require_sandbox(settings: SandboxConfig) -> None:
    """Raise ConfigError if this machine lacks a requirement of the sandbox, unless `sandbox.allow_weak` is set."""
    if not settings.allow_weak and (missing := _missing_requirement()):
        raise ConfigError(
            f"sandbox.allow_weak: programs of a model cannot be shut in on this machine: {missing}. Fix that, or set "
            "sandbox.allow_weak=true where nothing on it is worth protecting. Then only time, memory and files of each "
            "process are limited, other sessions are not ended, and a program reaches the network and this user's files"
        )


def run_python(program: str, stdin: str = "", time_s: float | None = None) -> ProgramResult:
    """Run a program under the current limits. Raises ConfigError if this machine cannot run the sandbox."""
    settings = current_limits()
    require_sandbox(settings)
    with ExitStack() as opened:
        source, reading, out, err = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(4))  # unnamed files
        _write_and_rewind(source, program.encode("utf-8", "replace"))
        _write_and_rewind(reading, stdin.encode("utf-8", "replace"))
        # If the parent is killed, bubblewrap ends the program. Without bubblewrap, setpriv ends it.
        command = ["/usr/bin/setpriv", "--pdeathsig", "KILL", *_python_command(settings), f"/dev/fd/{source.fileno()}"]
        descriptors = [source.fileno()]
        if not _missing_requirement():
            rules = opened.enter_context(tempfile.TemporaryFile())
            _write_and_rewind(rules, _seccomp_filter())
            command = _sandbox_command(settings, source.fileno(), rules.fileno())
            descriptors.append(rules.fileno())
        process = subprocess.Popen(
            command, stdin=reading, stdout=out, stderr=err, pass_fds=descriptors, env={}, cwd=tempfile.gettempdir(),
            start_new_session=True,
        )  # fmt: skip
        try:
            code, timed_out = process.wait(settings.time_s if time_s is None else time_s), False
        except subprocess.TimeoutExpired:
            code, timed_out = -signal.SIGKILL, True
        finally:  # ends the pid namespace of bubblewrap, or the session
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        most = 1024 * settings.output_kb
        (stdout, is_cut), (stderr, _) = _read_output(out, most), _read_output(err, most)
        return ProgramResult(stdout, stderr, code, "time" if timed_out else "output" if is_cut else "")


def _write_and_rewind(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.seek(0)


def _read_output(file: IO[bytes], most: int) -> tuple[str, bool]:
    file.seek(0)
    raw = file.read(most + 1)
    return raw[:most].decode("utf-8", "replace"), len(raw) > most


def _python_command(settings: SandboxConfig) -> list[str]:
    megabyte = 2**20
    return [
        "/usr/bin/prlimit", f"--as={settings.memory_mb * megabyte}", f"--fsize={settings.file_mb * megabyte}",
        f"--cpu={int(settings.time_s) + 1}", "--core=0", "--nofile=64", "--stack=8388608",
        os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8",
    ]  # fmt: skip


def _sandbox_command(settings: SandboxConfig, source: int, rules: int) -> list[str]:
    words = [
        str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
        "--new-session", "--clearenv", "--uid", _USER_ID, "--gid", _USER_ID, "--hostname", "sandbox",
        "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev",
        "--remount-ro", "/dev", "--size", str(settings.file_mb * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp",
        "--ro-bind-data", str(source), _PROGRAM, "--seccomp", str(rules),
    ]  # fmt: skip
    for name in ("lib", "lib64", "bin"):
        place = Path("/") / name
        if place.is_symlink():
            words += ["--symlink", f"usr/{name}", str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    base = sys.base_prefix
    if not Path(base).is_relative_to("/usr"):
        words += ["--ro-bind", base, base]
    return [*words, "--remount-ro", "/", "--", *_python_command(settings), _PROGRAM]


@cache
def _missing_requirement() -> str:
    """Return the requirement that this machine lacks, or '' if the sandbox runs a test program."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    try:
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as rules:
            _write_and_rewind(source, b"print('in')")
            _write_and_rewind(rules, _seccomp_filter())
            done = subprocess.run(
                _sandbox_command(SandboxConfig(), source.fileno(), rules.fileno()),
                pass_fds=[source.fileno(), rules.fileno()], env={}, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=60,
            )  # fmt: skip
    except (ImportError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        remedy = "pip install -c constraints.txt -e '.[sandbox]' in the checkout, apt-get install libseccomp2"
        return f"{type(error).__name__}: {error} ({remedy})"
    if done.stdout != b"in\n":
        return f"bubblewrap failed ({done.stderr.decode(errors='replace').strip()[:300]}); user namespaces may be off"
    return ""


@cache
def _seccomp_filter() -> bytes:
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in _DENIED_SYSCALLS:
        rules.add_rule(seccomp.ERRNO(errno.EPERM), name)
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags are in memory. The C library falls back to clone
    rules.add_rule(seccomp.ERRNO(errno.EPERM), "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0))
    rules.add_rule(seccomp.ERRNO(errno.EPERM), "socket", seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
