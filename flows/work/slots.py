"""Slots of a root: how many trainers work at a time, and which run is next.

A slot is a locked file that the trainer process inherits, so the kernel frees it when the flow and its trainer have
both ended, however they end; there is no scheduler process. Runs that wait lock a file each, too. Whoever looks reads
only files whose locks are held: what a killed process left behind counts for nothing.

The order is by priority, then by whose process asked first. Nobody passes a run that waits for more slots than are
free, so a run of several ranks is not kept waiting by small ones. At the end of a chunk a run gives its slots back
where one of a higher priority waits for more than are free, and waits in its turn for the next chunk.

Why not Prefect's concurrency limits: docs/decisions/0015.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError, MillraceError, RunInUseError
from rlcore.storage.documents import read_ordinary
from rlcore.storage.locks import FileLock, HeldLock
from rlcore.storage.publish import write_json_atomically

POLL_S = 0.5
"""Seconds between two looks of a run that waits."""
MUTEX_WAIT_S = 60.0
"""Seconds to wait for other processes that look at the slots; each takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a run asks for. `number`: of slots. `since`: seconds since the epoch when its process first
    asked."""

    run_id: str
    number: int
    priority: int
    since: float
    pid: int

    @classmethod
    def of(cls, config: RunConfig, run_id: str) -> "Wish":
        """A slot for each rank of a run, asked for now."""
        return cls(run_id, config.runtime.num_workers, config.runtime.priority, time.time(), os.getpid())

    @property
    def order(self) -> tuple[int, float, str]:
        """The first in line is the smallest."""
        return -self.priority, self.since, self.run_id

    def __str__(self) -> str:
        return f"{self.run_id} (priority {self.priority})"

    def encoded(self) -> bytes:
        """What the file of a slot or of a waiting run says."""
        return json.dumps(asdict(self)).encode()


_WISH = TypeAdapter(Wish)
_DEVICES = TypeAdapter(tuple[str, ...])


@dataclass(frozen=True, slots=True)
class State:
    """The slots of a root at one moment. `devices`: of each slot, '' on a CPU. `holders`: by slot, as far as they are
    taken. `waiting`: first in line first."""

    devices: tuple[str, ...]
    holders: Mapping[int, Wish]
    waiting: tuple[Wish, ...]

    @property
    def num_free(self) -> int:
        """Number of slots that no run holds."""
        return len(self.devices) - len(self.holders)

    def num_wanted_before(self, wish: Wish) -> int:
        """Slots that those before it in line wait for."""
        return sum(other.number for other in self.waiting if other.order < wish.order)

    def reason(self, wish: Wish) -> str:
        """Tells why a run waits."""
        held = ", ".join(sorted({str(holder) for holder in self.holders.values()}))
        ahead = [str(other) for other in self.waiting if other.order < wish.order]
        behind = f"; before it in line: {', '.join(ahead)}" if ahead else ""
        return (
            f"waits for {wish.number} of {len(self.devices)} slots with priority {wish.priority}: "
            f"{self.num_free} free, held by {held or 'nobody'}{behind}"
        )

    def must_yield(self, mine: Wish) -> bool:
        """Whether runs of higher priority wait for more slots than are free."""
        return sum(wish.number for wish in self.waiting if wish.priority > mine.priority) > self.num_free


class Slots:
    """The slots of a root."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "slots"
        self._file = self.folder / "slots.json"

    def devices(self) -> tuple[str, ...]:
        """The device of each slot; empty where the root has no slots, and any number of runs may train.

        Raises:
            DataError: the file that says so is damaged.
        """
        try:
            return _DEVICES.validate_json(read_ordinary(self._file))
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            raise DataError(f"{self._file}: is damaged. `millrace slots --set N` writes it anew.") from error

    def require(self, number: int) -> None:
        """Require that there are so many slots.

        Raises:
            ConfigError: there are fewer, so a run with so many ranks would wait for ever.
        """
        devices = self.devices()
        if devices and number > len(devices):
            raise ConfigError(
                f"runtime.num_workers: must be at most the slots of {self.folder.parent}, which are {len(devices)}; "
                f"got {number}. Use fewer workers, or give the root more slots (millrace slots --set N)"
            )

    def set_devices(self, devices: Sequence[str]) -> None:
        """Give the root so many slots. Runs that have one keep it until their trainer ends."""
        with self.mutex():
            write_json_atomically(self._file, list(devices))

    def mutex(self) -> HeldLock:
        """Held while slots are looked at or taken."""
        return HeldLock(self.folder / "mutex.lock", what=f"the list of slots in {self.folder}", wait_s=MUTEX_WAIT_S)

    def look(self) -> State:
        """The slots as they are now."""
        if not self.devices():
            return State((), {}, ())
        with self.mutex():
            return self.state()

    def state(self) -> State:
        """The slots as they are now; the caller holds the mutex."""
        devices = self.devices()
        holders = {number: wish for number in range(len(devices)) if (wish := _live(self.path(number)))}
        waiting = [wish for file in (self.folder / "waiting").glob("*.json") if (wish := _live(file))]
        return State(devices, holders, tuple(sorted(waiting, key=lambda wish: wish.order)))

    def path(self, number: int) -> Path:
        """File of a slot."""
        return self.folder / f"slot-{number}.lock"

    def waiting_path(self, run_id: str) -> Path:
        """The file that a run holds while it waits."""
        return self.folder / "waiting" / f"{run_id}.json"

    def reason_of(self, run_id: str) -> str:
        """Why a run waits; '' for one that does not."""
        if not self.waiting_path(run_id).exists():
            return ""
        try:
            state = self.look()
        except (MillraceError, OSError):  # who may only read here cannot take the mutex
            return "waits for slots"
        return next((state.reason(wish) for wish in state.waiting if wish.run_id == run_id), "")

    def take(self, wish: Wish, on_wait: Callable[[str], None]) -> "HeldSlots":
        """Wait for the run's turn and free slots. `on_wait`, called often with the reason, may raise to end that.

        Raises:
            ConfigError: the root has fewer slots than the run needs, perhaps since it waits.
        """
        if not self.devices():
            return HeldSlots(self, wish, {}, ())
        began = time.monotonic()
        with _in_line(self, wish):
            while True:
                with self.mutex():
                    self.require(wish.number)
                    state = self.state()
                    if not state.devices or state.num_free >= state.num_wanted_before(wish) + wish.number:
                        locks = _taken(self, wish, state)
                        self.note("took", wish, slots=list(locks), waited_s=round(time.monotonic() - began, 3))
                        return HeldSlots(self, wish, locks, state.devices)
                on_wait(state.reason(wish))
                time.sleep(POLL_S)

    def note(self, what: str, wish: Wish, **more: object) -> None:
        """One line in the slots' log: who took or gave back which of them, and when. A full disk has no such line."""
        line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "what": what, **asdict(wish), **more}
        with suppress(OSError), (self.folder / "log.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def _live(file: Path) -> Wish | None:
    """Who holds a file's lock; None where it is free. A holder that has not written yet counts as one of no run."""
    lock = FileLock(file)
    try:
        if lock.try_acquire(create=False):
            lock.release(everywhere=True)
            return None
        return _WISH.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return Wish("a run that has just begun", 1, 0, 0.0, 0)


class HeldSlots:
    """Slots in hand, none where the root has none. A trainer inherits `descriptors` and `environment`, its devices."""

    def __init__(self, slots: Slots, wish: Wish, locks: Mapping[int, FileLock], devices: Sequence[str]) -> None:
        self._slots = slots
        self._wish = wish
        self._locks = dict(locks)
        named = [devices[number] for number in self._locks if devices[number]]
        self.environment = {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(named))} if named else {}
        self.descriptors = [lock.fileno() for lock in self._locks.values()]

    def must_yield(self) -> bool:
        """Whether runs of higher priority need these slots."""
        if not self._locks:
            return False
        try:
            return self._slots.look().must_yield(self._wish)
        except (MillraceError, OSError):  # the slots' files cannot be read: no reason to end a trainer
            return False

    def release(self) -> None:
        """Give them back; a trainer that lives keeps them until it ends. Safe to call twice."""
        locks, self._locks = self._locks, {}
        if locks:
            self._slots.note("ended", self._wish, slots=list(locks))
        for lock in locks.values():
            lock.release()


def _taken(slots: Slots, wish: Wish, state: State) -> dict[int, FileLock]:
    free = [number for number in range(len(state.devices)) if number not in state.holders][: wish.number]
    locks = {number: FileLock(slots.path(number)) for number in free}
    try:
        for lock in locks.values():
            _lock(lock, wish)
    except BaseException:
        for lock in locks.values():
            lock.release()
        raise
    return locks


def _lock(lock: FileLock, wish: Wish) -> None:
    if not lock.try_acquire():
        raise RunInUseError(f"{lock.path}: was locked by another process outside of its turn. Start again.")
    try:
        lock.write(wish.encoded())
    except OSError:  # the disk is full
        lock.release()
        raise


@contextmanager
def _in_line(slots: Slots, wish: Wish) -> Iterator[None]:
    file = slots.waiting_path(wish.run_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    with slots.mutex():
        _lock(lock, wish)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()
