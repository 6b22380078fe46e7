"""Runs a Python program that a model wrote, shut in: it reads nothing of the host and leaves nothing behind.

bubblewrap gives it user, network, pid, ipc and mount namespaces of its own: Python and /usr to read, an empty /tmp of
bounded size, no variables, no network. libseccomp's filter keeps it to one process (threads are free) and away from
tracing, mounting, keys and sockets of the network. Limits of the kernel bound memory, files and output; the clock ends
it. Why these: docs/decisions/0014-programs-run-under-bubblewrap.md. What a run allows is `sandbox` in its settings.
"""

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
    """What a program came to. `ended`: why it was ended, '' where it came to its end; `code` is its exit code then."""

    stdout: str
    stderr: str
    code: int
    stop_reason: Literal["", "time", "output"]


def set_limits(settings: SandboxConfig) -> None:
    """Programs of this process, and of those that it starts, run under these limits."""
    os.environ[_VARIABLE] = settings.model_dump_json()


def current_limits() -> SandboxConfig:
    """The limits that `use` has set here or in a parent; without it the defaults."""
    return SandboxConfig.model_validate_json(os.environ.get(_VARIABLE, "{}"))


def require_sandbox(settings: SandboxConfig) -> None:
    """Programs can be shut in on this machine, or `sandbox.allow_weak` says that they need not be.

    Raises:
        ConfigError: they cannot; with what is missing.
    """
    if not settings.allow_weak and (missing := _missing_requirement()):
        raise ConfigError(
            f"sandbox.allow_weak: programs of a model cannot be shut in on this machine: {missing}. Mend that, or set "
            "sandbox.allow_weak=true where nothing on it is worth protecting: time, memory and files are limited then, "
            "for each process of a program apart; those that it puts into a session of their own are not ended, and it "
            "sees the network and all files of this user"
        )


def run_python(program: str, stdin: str = "", time_s: float | None = None) -> ProgramResult:
    """Run a program under the limits in use, with `stdin` as its standard input; `time_s`: for less than theirs. Raises
    as `require_sandbox` does."""
    settings = current_limits()
    require_sandbox(settings)
    with ExitStack() as opened:
        source, reading, out, err = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(4))  # have no names
        _write_and_rewind(source, program.encode("utf-8", "replace"))
        _write_and_rewind(reading, stdin.encode("utf-8", "replace"))
        # Who started it may be killed: bubblewrap ends the program then, and by itself it would go on.
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
        finally:  # of what is left all in bubblewrap's pid namespace ends with it, else the session
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        most = 1024 * settings.output_kb
        (stdout, is_cut), (stderr, _) = _read_output(out, most), _read_output(err, most)
        return ProgramResult(stdout, stderr, code, "time" if timed_out else "output" if is_cut else "")


def _write_and_rewind(file: IO[bytes], content: bytes) -> None:
    """Write a file that is then read from its beginning."""
    file.write(content)
    file.seek(0)


def _read_output(file: IO[bytes], most: int) -> tuple[str, bool]:
    """The beginning of an output, and whether there was more."""
    file.seek(0)
    raw = file.read(most + 1)
    return raw[:most].decode("utf-8", "replace"), len(raw) > most


def _python_command(settings: SandboxConfig) -> list[str]:
    """Python under limits of the kernel, by prlimit of util-linux."""
    megabyte = 2**20
    return [
        "/usr/bin/prlimit", f"--as={settings.memory_mb * megabyte}", f"--fsize={settings.file_mb * megabyte}",
        f"--cpu={int(settings.time_s) + 1}", "--core=0", "--nofile=64", "--stack=8388608",
        os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8",
    ]  # fmt: skip


def _sandbox_command(settings: SandboxConfig, source: int, rules: int) -> list[str]:
    """The whole command under bubblewrap; `source` and `rules` are descriptors of the program and of the filter."""
    words = [
        str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
        "--new-session", "--clearenv", "--uid", _USER_ID, "--gid", _USER_ID, "--hostname", "sandbox", "--cap-drop", "ALL",
        "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
        "--size", str(settings.file_mb * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp",
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
    """What this machine lacks; '' where programs can be shut in. Tried once, with a program that prints one word."""
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
    """The seccomp filter as a program of the kernel."""
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in _DENIED_SYSCALLS:
        rules.add_rule(seccomp.ERRNO(errno.EPERM), name)
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory: the C library takes clone then
    rules.add_rule(seccomp.ERRNO(errno.EPERM), "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0))
    rules.add_rule(seccomp.ERRNO(errno.EPERM), "socket", seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
