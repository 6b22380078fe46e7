"""The status of the runs of a root, read from their files and locks without Prefect and MLflow."""

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flows.progress import REWARD_NAMES
from flows.stack.state import FLOW_RUN_COMMAND
from flows.work.open_run import STOP_FILE
from flows.work.slots import Slots
from rlcore.checkpoint.catalog import scan
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import CheckpointError, DataError
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import read_failures
from rlcore.storage.disk import PAUSED, RESUMED
from rlcore.storage.documents import READ_BLOCK_BYTES, open_ordinary, parse_json, read_ordinary
from rlcore.storage.locks import RUN_LOCK, Holder, holder_of, read_holder
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.cost import GPU_SECONDS
from rlcore.tracking.journal import EventRecord, StepRecord, iter_lines

State = Literal["running", "waiting", "stopping", "finished", "stopped", "failed", "lost", "not begun"]
"""The state of a run. `running`, `waiting` (for disk space or slots) and `stopping` have a living process.

A `stopped` run saved after a stop request. A `lost` run ended without a record. `not begun` has had no trainer so far.
"""
STATES: tuple[State, ...] = get_args(State)

SAME_COMMAND = "the same command resumes it"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run. `score` is the mean held-out reward of the newest checkpoint that has one.

    `reward` is the training reward of the last step. `changed` is in seconds since the epoch. `note` explains the
    state. `gpu_seconds` is None without a GPU. `tokens_per_s` is the speed of each device in the last step.
    """

    run_id: str
    run_dir: str
    name: str
    state: State
    step: int
    total_steps: int | None
    score: float | None
    reward: float | None
    changed: float
    size_bytes: int
    note: str
    gpu_seconds: float | None = None
    tokens_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values, with the seconds since the last change."""
        return asdict(self) | {"age_s": round(time.time() - self.changed, 1)}


def status_of(run_dir: Path) -> RunStatus:
    """Return the status of one run, read from its folder. Unreadable files count as absent."""
    layout = RunLayout(run_dir.parents[1], run_dir)
    step, reward, pause, changed, gpu_seconds, tokens_per_s = _read_journal_end(layout.journal)
    with suppress(OSError):  # deleted during the call
        changed = changed or (run_dir / RUN_FILE).stat().st_mtime
    found = _read_json(run_dir / RUN_FILE).get("settings")
    settings = found if isinstance(found, dict) else {}
    trainer, warm = settings.get("trainer"), settings.get("warm_start")
    total = trainer.get("total_steps") if isinstance(trainer, dict) else None
    if total == 0 and isinstance(warm, dict):  # only supervised steps
        total = warm.get("max_steps")
    state, note = _state(run_dir, pause or Slots(run_dir.parents[1]).wait_reason(run_dir.name))
    return RunStatus(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        name=str(settings.get("name", "")),
        state=state,
        step=step,
        total_steps=total,
        score=_score(run_dir),
        reward=reward,
        changed=changed,
        size_bytes=size_of(run_dir),
        note=note,
        gpu_seconds=gpu_seconds,
        tokens_per_s=tokens_per_s,
    )


def failure_of(run_dir: Path) -> str:
    """Return `failed: reason` or `lost: reason` if the run is failed or lost, otherwise ''."""
    state, note = _state(run_dir, "")
    return f"{state}: {note}" if state in ("failed", "lost") else ""


def worker_of(run_dir: Path) -> Holder | None:
    """Return the process that uses a run, or None. It is a command, a flow, or a trainer that is still saving."""
    return holder_of(run_dir / RUN_LOCK)


def is_stop_requested(run_dir: Path, worker: Holder | None) -> bool:
    """Return whether a stop of the process `worker` was requested, for example by `millrace stop`."""
    return worker is not None and _read_json(run_dir / STOP_FILE).get("process") == [worker.pid, worker.born]


def resume_hint(run_dir: Path) -> str:
    """Return a text that explains how to resume a run that has ended: by the same command or by a retry in Prefect."""
    last = read_holder(run_dir / RUN_LOCK)
    if last is None or not last.command.endswith(FLOW_RUN_COMMAND):
        return SAME_COMMAND
    flow_run = _read_json(run_dir / STOP_FILE).get("flow_run") if is_stop_requested(run_dir, last) else None
    return f"`prefect flow-run retry {flow_run or 'ID'}` resumes it, or Retry on its page"


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder. Files that vanish during the call are skipped."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(at, name).lstat().st_size
    return total


def _state(run_dir: Path, pause: str) -> tuple[State, str]:
    worker = worker_of(run_dir)
    if worker is not None:
        state: State = "stopping" if is_stop_requested(run_dir, worker) else "waiting" if pause else "running"
        return state, pause or f"process {worker.pid} on {worker.host}"
    attempts, failures = read_attempts(run_dir), read_failures(run_dir)
    end = attempts[-1][1] if attempts else None
    status = None if end is None else end.status
    if not attempts:  # the run ended before the first step
        stopped_at = _read_json(run_dir / STOP_FILE).get("time")
        stopped_at = stopped_at if isinstance(stopped_at, int | float) else 0.0
        status = "KILLED" if stopped_at > (failures[-1].time if failures else 0.0) else "FAILED" if failures else None
        if status is None:
            return "not begun", ""
    if status == "FINISHED":
        stopped_at = _read_json(run_dir / STOP_FILE).get("time")
        if end is None or not isinstance(stopped_at, int | float) or stopped_at <= end.time:
            return "finished", ""
        return "stopped", f"all steps are trained, and results are missing; {resume_hint(run_dir)}"
    if status == "KILLED":
        return "stopped", resume_hint(run_dir)
    why = f"{failures[-1]}: {failures[-1].message.partition(chr(10))[0]}" if failures else ""
    return ("failed" if status == "FAILED" else "lost"), why or f"its process has ended; {resume_hint(run_dir)}"


def _read_journal_end(journal: Path) -> tuple[int, float | None, str, float, float | None, float | None]:
    """Return the last step, its reward, the reason of a wait, the time of the last line, the GPU-seconds and the speed
    of each device, all from the end of the journal.
    """
    step, reward, pause, changed, gpu_seconds, tokens_per_s = 0, None, "", 0.0, None, None
    with suppress(OSError, DataError), open_ordinary(journal) as file:
        size = os.fstat(file.fileno()).st_size
        for record, _ in iter_lines(file.fileno(), max(0, size - READ_BLOCK_BYTES)):
            match record:
                case StepRecord():
                    step, pause = record.step, ""
                    reward = next((record.metrics[name] for name in REWARD_NAMES if name in record.metrics), reward)
                    gpu_seconds = record.metrics.get(GPU_SECONDS, gpu_seconds)
                    tokens_per_s = record.metrics.get("perf/throughput", tokens_per_s)
                case EventRecord(name=name, data=data):
                    pause = str(data.get("text", "")) if name == PAUSED else "" if name == RESUMED else pause
                case None:
                    continue
            changed = record.time
    return step, reward, pause, changed, gpu_seconds, tokens_per_s


def _score(run_dir: Path) -> float | None:
    with suppress(CheckpointError):
        scores = [info.score for info in scan(RunLayout(run_dir.parents[1], run_dir).checkpoints).checkpoints]
        return next((score for score in reversed(scores) if score is not None), None)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_ordinary(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
