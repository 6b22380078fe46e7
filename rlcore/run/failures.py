"""The failures of a run, in the file `faults.jsonl` of the run's folder. A resume does not truncate the file."""

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rlcore.errors import DeviceMemoryError, HostMemoryError, MillraceError, RankMemoryError
from rlcore.storage.documents import read_ordinary

FAILURES_FILE = "faults.jsonl"
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""The files that count out-of-memory kills, first for this container and then for the host."""
MAX_MESSAGE_CHARS = 1_000
_DEVICE_MEMORY_WORDS = ("cuda out of memory", "cuda error: out of memory")
_HOST_MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "std::bad_alloc")

log = logging.getLogger("rlcore.run.failures")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a run. `stacks`: the file with the stacks of all processes. `time`: seconds since the epoch."""

    kind: str
    phase: str
    step: int
    message: str
    stacks: str | None = None
    time: float = field(default_factory=lambda: round(time.time(), 3))

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        return f"{self.kind}{where} after step {self.step}"


_FAILURE = TypeAdapter(Failure)


def as_known_error(error: Exception, phase: str) -> Exception:
    """Convert an out-of-memory error of a library to a `MillraceError`. Return any other error unchanged."""
    if isinstance(error, RankMemoryError):
        return error
    if isinstance(error, DeviceMemoryError) and _is_host_memory(str(error)):
        return HostMemoryError(str(error))
    if isinstance(error, MillraceError):
        return error
    text, where = f"{type(error).__name__}: {error}", f" in {phase}" if phase else ""
    lowered = text.lower()
    if "torch.OutOfMemoryError" in text or any(words in lowered for words in _DEVICE_MEMORY_WORDS):
        return DeviceMemoryError(
            f"GPU out of memory{where}: {text}\nLower trainer.max_tokens_per_micro_batch or rollout.memory_share; "
            "neither changes the numbers."
        )
    if _is_host_memory(text):
        return HostMemoryError(
            f"host out of memory{where}: {text}\nFree memory on this host, or lower runtime.num_workers or "
            "reward.num_processes."
        )
    return error


def _is_host_memory(text: str) -> bool:
    return "MemoryError" in text or any(words in text.lower() for words in _HOST_MEMORY_WORDS)


def failure_from(error: Exception, phase: str, step: int) -> Failure:
    """Return a `Failure` that describes this error."""
    kind = error.failure_kind if isinstance(error, MillraceError) else MillraceError.failure_kind
    return Failure(kind, phase, step, str(error)[:MAX_MESSAGE_CHARS])


def append_failure(run_dir: Path, failure: Failure) -> None:
    """Append the failure to `faults.jsonl` as a new line. If the file cannot be written, only log a warning."""
    try:
        with (run_dir / FAILURES_FILE).open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            torn = b"\n" if file.read() not in (b"", b"\n") else b""
            file.write(torn + json.dumps(asdict(failure)).encode() + b"\n")
    except OSError as reason:
        log.warning("%s: cannot be written: %s", run_dir / FAILURES_FILE, reason)


def read_failures(run_dir: Path) -> list[Failure]:
    """Return all failures of a run, oldest first. Log and skip damaged lines. Raises OSError for an unreadable file."""
    try:
        lines = read_ordinary(run_dir / FAILURES_FILE).split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in filter(None, lines):
        try:
            found.append(_FAILURE.validate_json(line))
        except ValueError:
            log.warning("%s: a line is damaged and skipped: %.100r", run_dir / FAILURES_FILE, line)
    return found


def num_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory, or 0 if it is unknown."""
    for path in OOM_COUNTERS:
        try:
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0
