"""The slots of a workspace, which limit the number of concurrent trainers, and the queue of runs that wait for slots.

A slot is a locked file. The trainer process inherits the lock, so the kernel frees the slot when the flow and its
trainer have ended. A run in the queue also locks a file, which shows that the run still waits. Runs are served by
priority, then by the time of their request. Between chunks of steps (`trainer.steps_per_chunk`), a run gives up its
slots if runs of higher priority need them. docs/decisions/0015 explains why Prefect's concurrency limits are not used.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError, MillraceError, RunInUseError
from rlcore.storage.documents import read_ordinary
from rlcore.storage.locks import FileLock, HeldLock
from rlcore.storage.publish import write_json_atomically

POLL_S = 0.5  # seconds between two checks of a waiting run
MUTEX_WAIT_S = 60.0  # seconds to wait for other processes that read or acquire slots, which takes milliseconds each


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """The request of a run for `number` slots. `since` is the time of the first request, in seconds since the epoch."""

    run_id: str
    number: int
    priority: int
    since: float
    pid: int

    @classmethod
    def of(cls, config: RunConfig, run_id: str) -> "SlotRequest":
        """Return a request for one slot per rank of a run. The time of the request is now."""
        return cls(run_id, config.runtime.num_workers, config.runtime.priority, time.time(), os.getpid())

    @property
    def order(self) -> tuple[int, float, str]:
        """The sort key of the request. The request with the smallest key is served first."""
        return -self.priority, self.since, self.run_id

    def __str__(self) -> str:
        return f"{self.run_id} (priority {self.priority})"


_REQUEST = TypeAdapter(SlotRequest)
_DEVICES = TypeAdapter(tuple[str, ...])


@dataclass(frozen=True, slots=True)
class SlotState:
    """The slots of a workspace at one moment. `devices` has the GPU of each slot, or '' if it has no assigned GPU.

    `holders` maps the number of each used slot to the request that holds the slot. `waiting` has the waiting requests.
    The request that is served next is first.
    """

    devices: tuple[str, ...]
    holders: Mapping[int, SlotRequest]
    waiting: tuple[SlotRequest, ...]

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self.devices) - len(self.holders)

    def num_requested_before(self, request: SlotRequest) -> int:
        """Return the number of slots that the requests ahead of `request` in the queue need."""
        return sum(other.number for other in self.waiting if other.order < request.order)

    def must_yield(self, request: SlotRequest) -> bool:
        """Return whether runs with a higher priority than `request` wait for more slots than are free."""
        return sum(other.number for other in self.waiting if other.priority > request.priority) > self.num_free

    def wait_reason(self, request: SlotRequest) -> str:
        """Return a text with the runs that hold slots and the runs that are ahead of `request` in the queue."""
        held = ", ".join(sorted({str(holder) for holder in self.holders.values()}))
        ahead = [str(other) for other in self.waiting if other.order < request.order]
        behind = f"; before it: {', '.join(ahead)}" if ahead else ""
        return (
            f"waits for {request.number} of {len(self.devices)} slots with priority {request.priority}: "
            f"{self.num_free} free, held by {held or 'no run'}{behind}"
        )


class Slots:
    """The slots of a workspace, which are stored as files."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "slots"
        self._file = self.folder / "slots.json"

    def devices(self) -> tuple[str, ...]:
        """Return the device of each slot, or () if the workspace has no slots and therefore no limit on trainers."""
        try:
            return _DEVICES.validate_json(read_ordinary(self._file))
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            raise DataError(f"{self._file}: is damaged. Write it again with `millrace slots --set N`.") from error

    def require(self, number: int) -> None:
        """Raise ConfigError if a run needs more slots than the workspace has, because the run would wait forever."""
        devices = self.devices()
        if devices and number > len(devices):
            raise ConfigError(
                f"runtime.num_workers: must be at most the slots of {self.folder.parent}, which has {len(devices)}; "
                f"got {number}. Use fewer workers, or give the workspace more slots (millrace slots --set N)"
            )

    def set_devices(self, devices: Sequence[str]) -> None:
        """Set the devices of the slots. A run that already holds slots keeps them until its trainer ends."""
        with self.mutex():
            write_json_atomically(self._file, list(devices))

    def mutex(self) -> HeldLock:
        """Return the lock for reading and acquiring slots."""
        return HeldLock(self.folder / "mutex.lock", what=f"the list of slots in {self.folder}", wait_s=MUTEX_WAIT_S)

    def read_state(self) -> SlotState:
        """Return the current state of the slots."""
        if not self.devices():
            return SlotState((), {}, ())
        with self.mutex():
            return self._state()

    def _state(self) -> SlotState:
        devices = self.devices()
        holders = {number: request for number in range(len(devices)) if (request := _holder(self.path(number)))}
        waiting = [request for file in (self.folder / "waiting").glob("*.json") if (request := _holder(file))]
        return SlotState(devices, holders, tuple(sorted(waiting, key=lambda request: request.order)))

    def path(self, number: int) -> Path:
        """Return the lock file of a slot."""
        return self.folder / f"slot-{number}.lock"

    def waiting_path(self, run_id: str) -> Path:
        """Return the file that a run locks while it waits."""
        return self.folder / "waiting" / f"{run_id}.json"

    def wait_reason(self, run_id: str) -> str:
        """Return a text that explains why a run waits for slots, or '' if it does not wait."""
        if not self.waiting_path(run_id).exists():
            return ""
        try:
            state = self.read_state()
        except (MillraceError, OSError):  # this user has no write permission
            return "waits for slots"
        return next((state.wait_reason(request) for request in state.waiting if request.run_id == run_id), "")

    def acquire(self, request: SlotRequest, on_wait: Callable[[str], None]) -> "HeldSlots":
        """Wait for the run's turn and acquire its slots. `on_wait` is called often with the reason for the wait. An
        exception from `on_wait` ends the wait. Raises ConfigError when the workspace has fewer slots than requested.
        """
        if not self.devices():
            return HeldSlots(self, request, {}, ())
        file = self.waiting_path(request.run_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as line:
            with self.mutex():
                line.callback(_lock(file, request).release)
                line.callback(file.unlink, missing_ok=True)
            while True:
                with self.mutex():
                    self.require(request.number)
                    state = self._state()
                    if not state.devices or state.num_free >= state.num_requested_before(request) + request.number:
                        return self._acquire_free(request, state)
                on_wait(state.wait_reason(request))
                time.sleep(POLL_S)

    def _acquire_free(self, request: SlotRequest, state: SlotState) -> "HeldSlots":
        free = [number for number in range(len(state.devices)) if number not in state.holders]
        with ExitStack() as undo:
            locks = {}
            for number in free[: request.number]:
                locks[number] = _lock(self.path(number), request)
                undo.callback(locks[number].release)
            undo.pop_all()
        return HeldSlots(self, request, locks, state.devices)


class HeldSlots:
    """The slots that a run has acquired. `descriptors` has the file descriptors of the slots' lock files.

    A trainer inherits the descriptors. `environment` limits the trainer to the slots' devices (`CUDA_VISIBLE_DEVICES`).
    """

    def __init__(
        self, slots: Slots, request: SlotRequest, locks: Mapping[int, FileLock], devices: Sequence[str]
    ) -> None:
        self._slots, self._request, self._locks = slots, request, list(locks.values())
        named = [devices[number] for number in locks if devices[number]]
        self.environment = {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(named))} if named else {}
        self.descriptors = [lock.fileno() for lock in self._locks]

    def must_yield(self) -> bool:
        """Return whether waiting runs of higher priority need the slots of this run."""
        try:
            return bool(self._locks) and self._slots.read_state().must_yield(self._request)
        except (MillraceError, OSError):  # unreadable files must not end a trainer
            return False

    def release(self) -> None:
        """Release the slots. A running trainer keeps them until it ends. Repeated calls have no effect."""
        while self._locks:
            self._locks.pop().release()


def _holder(file: Path) -> SlotRequest | None:
    lock = FileLock(file)
    try:
        if lock.try_acquire(create=False):
            lock.release(everywhere=True)
            return None
        return _REQUEST.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return SlotRequest("a run that has just begun", 1, 0, 0.0, 0)


def _lock(path: Path, request: SlotRequest) -> FileLock:
    lock = FileLock(path)
    if not lock.try_acquire():
        raise RunInUseError(f"{lock.path}: is locked by another process out of turn. Start again.")
    try:
        lock.write(json.dumps(asdict(request)).encode())
    except OSError:  # the disk is full
        lock.release()
        raise
    return lock
