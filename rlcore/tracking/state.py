"""Where a run stands in MLflow: `tracking.json` in its folder, replaced whole, read and changed under a lock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from rlcore.errors import TrackingError
from rlcore.storage.documents import read_ordinary
from rlcore.storage.locks import HeldLock
from rlcore.storage.publish import write_text_atomically
from rlcore.tracking.attempts import FinalStatus

STATE_FILE = "tracking.json"
"""Name of the file in a run's folder."""

FOLDER_FILE = "tracking.id"
"""Name of the file with the folder's own id: it stays where the state is moved away."""

LOCK_WAIT_S = 60.0
"""Seconds to wait for a process that is making the run in MLflow."""

FORMAT_VERSION = 1
"""Of `tracking.json`. Another version is refused by name."""


@dataclass(frozen=True, slots=True)
class TrackingState:
    """What has been delivered, and to which MLflow runs.

    `control_bytes` counts what has been heeded of `attempts.jsonl`; `main_bytes` and `live_bytes` what has been
    delivered of `metrics.jsonl` to the run itself and to the nested run of the attempt. `delivered_ahead` lists
    (step, metric) pairs that the run itself has already although the journal was cut before them. `final_status` is
    how the attempt ended, as far as it is known, and `settled` whether MLflow knows it.
    """

    format_version: int = FORMAT_VERSION
    uri: str = ""
    mlflow_run_id: str | None = None
    superseded_run_ids: tuple[str, ...] = ()
    attempt: int = 0
    attempt_run_id: str | None = None
    lost_attempt_run_ids: tuple[str, ...] = ()
    described_attempt: int = 0
    control_bytes: int = 0
    committed_bytes: int = 0
    main_bytes: int = 0
    live_bytes: int = 0
    delivered_ahead: tuple[tuple[int, str], ...] = ()
    final_status: FinalStatus | None = None
    final_time: float | None = None
    settled: bool = False
    num_failures: int = 0

    @property
    def num_bytes_waiting(self) -> int:
        """Committed bytes of the journal that are not yet in the run itself."""
        return max(0, self.committed_bytes - self.main_bytes)


_STATE = TypeAdapter(TrackingState)


def read_state(run_dir: Path) -> TrackingState:
    """The state of a run; a fresh one if nothing has been delivered yet.

    Raises:
        TrackingError: the file is of another format version or damaged.
    """
    path = run_dir / STATE_FILE
    try:
        state = _STATE.validate_json(read_ordinary(path))
    except FileNotFoundError:
        return TrackingState()
    except OSError as error:
        raise TrackingError(f"{path}: cannot be read ({error}). Move the file away.") from error
    except ValidationError as error:
        raise TrackingError(
            f"{path}: damaged ({error.errors()[0]['msg']}). Move the file away: the run is then found in MLflow by its "
            "tag, and the journal is delivered once more (values that are there already stay single)."
        ) from error
    if state.format_version != FORMAT_VERSION:
        raise TrackingError(
            f"{path}: format version {state.format_version}, this Millrace knows {FORMAT_VERSION}. Use the Millrace "
            "that wrote it, or move the file away: the journal is then delivered once more."
        )
    return state


def change_state(run_dir: Path, change: Callable[[TrackingState], TrackingState]) -> TrackingState:
    """Replace the state by `change` of the state on disk, and return the new one."""
    with state_lock(run_dir):
        state = change(read_state(run_dir))
        write_text_atomically(run_dir / STATE_FILE, _STATE.dump_json(state).decode() + "\n")
        return state


def folder_id(run_dir: Path) -> str | None:
    """The id that tells this folder from another of the same run, somebody else's perhaps; None: it has none yet."""
    try:
        return (run_dir / FOLDER_FILE).read_text().strip()
    except FileNotFoundError:
        return None


def ensure_folder_id(run_dir: Path) -> str:
    """The folder's id, made where it has none. Under the state's lock."""
    known = folder_id(run_dir)
    if known is None:
        known = uuid4().hex
        write_text_atomically(run_dir / FOLDER_FILE, known + "\n")
    return known


@contextmanager
def state_lock(run_dir: Path) -> Iterator[None]:
    """Hold off every other process that wants to change the state or to create the run in MLflow."""
    lock = run_dir / "tracking.lock"
    with HeldLock(lock, what=f"the MLflow run of {run_dir.name}", wait_s=LOCK_WAIT_S, error=TrackingError):
        yield
