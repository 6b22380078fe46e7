"""A run's room on disk: estimates of what it will write, and the wait for room before a chunk and a checkpoint.

Where any other write finds the disk full the run ends, and the same command resumes it from its last checkpoint.

The estimates are made from the settings, and too high rather than too low. No torch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import CheckpointConfig, RunConfig
from rlcore.config.model import SMOLLM2
from rlcore.errors import DiskSpaceError, StopRequestedError
from rlcore.run.inputs import configured_model
from rlcore.run.layout import RunLayout
from rlcore.runtime.cluster import ray_folder, spilled_bytes
from rlcore.storage.disk import (
    BYTES_PER_GB,
    DiskNeed,
    RoomReport,
    check_room,
    checkpoint_bytes,
    num_checkpoints_at_once,
    reserve_bytes,
    size,
)

PAUSED, GOES_ON = "paused_for_disk", "disk_room"
"""Events between which the run waits for room on a disk."""
POLL_S = 1.0
"""Seconds between two measurements of a full disk."""

BYTES_PER_WEIGHT = 4
"""Weights for others are written as float32, the master weights."""
BYTES_PER_TOKEN = 20
"""Of a kept answer: id, text, three log-probabilities, advantage, packed."""
BYTES_PER_RESPONSE = 500
"""Besides tokens: the problem's numbers, ids and scores."""

EventSink = Callable[[str, int, Mapping[str, object]], None]
"""Takes an event's name, its step and its data; `text` in the data is for display."""


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Waits for room before a chunk and before a checkpoint. `happened`: called at the pause and at its end; `stop`:
    whether the run was told to stop; `prune`: deletes what the retention rule does not keep."""

    config: CheckpointConfig
    log_event: EventSink
    stop: Callable[[], bool]
    prune: Callable[[], object]

    def wait(self, needed_bytes: int, *, step: int, path: Path) -> None:
        """Return when there is room for `needed_bytes` and the reserve at `path`: delete what is not kept, then wait.

        Raises:
            DiskSpaceError: no room came in `checkpoint.wait_for_room_s`.
            StopRequestedError: a stop was asked for while the run waited. What is committed stays.
        """
        report = self.check(path, needed_bytes)
        if not report.enough:
            self.prune()
            report = self.check(path, needed_bytes)
        if report.enough:
            return
        deadline = time.monotonic() + self.config.wait_for_room_s
        self.log_event(PAUSED, step, _as_event(report))
        while not (report := self.check(path, needed_bytes)).enough:
            self._wait(deadline, report)
        self.log_event(GOES_ON, step, {"text": f"{path}: there is room again, going on", "path": str(path)})

    def check(self, path: Path, needed_bytes: int) -> RoomReport:
        """Room for so many bytes and the reserve at `path`."""
        return check_room(path, needed_bytes, reserve_bytes(self.config))

    def _wait(self, deadline: float, report: RoomReport) -> None:
        if self.stop():
            raise StopRequestedError(f"stopped while the run waited for room on a disk: {report}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise DiskSpaceError(
                f"{report} Waited {self.config.wait_for_room_s:.0f} s for room (checkpoint.wait_for_room_s). What is "
                "committed stays; the same command goes on from there."
            )
        time.sleep(min(left, POLL_S))


def _as_event(report: RoomReport) -> Mapping[str, object]:
    what = size(report.missing_bytes) if report.missing_bytes else "inodes"
    return {
        "text": f"paused: {what} are missing at {report.path}: {report}",
        "path": str(report.path),
        "missing_bytes": report.missing_bytes,
        "needed_bytes": report.needed_bytes + report.reserve_bytes,
        "free_bytes": report.free_bytes,
    }


def disk_needs(
    config: RunConfig,
    layout: RunLayout,
    *,
    checkpoints_bytes: int,
    num_weights: int,
    steps_left: int,
    has_initial_policy: bool,
) -> tuple[DiskNeed, ...]:
    """What is large: weights, checkpoints, kept answers. `checkpoints_bytes`: what checkpoints will take more than now.
    Journal, rows and validations are within the reserve."""
    weights = BYTES_PER_WEIGHT * num_weights
    needs = [
        DiskNeed("checkpoints", layout.checkpoints, checkpoints_bytes),
        DiskNeed("weights for others", layout.exported_model, weights),
        DiskNeed("answers", layout.answers, _response_bytes(config, steps_left)),
    ]
    warm, path = config.warm_start, config.model.path
    if not has_initial_policy and (warm.enabled or path is None):
        needs.append(DiskNeed("start model", layout.root / "models", weights))
    if path == SMOLLM2 and not configured_model(config).is_dir():
        needs.append(DiskNeed("SmolLM2's weights", layout.root / "models", weights))
    if not has_initial_policy and warm.enabled:
        number = num_checkpoints_at_once(
            config.checkpoint, total_steps=warm.max_steps, steps_per_chunk=warm.steps_per_chunk
        )
        taken = number * checkpoint_bytes(num_weights)  # gone when it ends
        needs.append(DiskNeed("checkpoints of the warm start", layout.root / "warm-starts", taken))
    if config.tracking.enabled:
        needs.append(DiskNeed("MLflow's artifacts", layout.root, weights))
    if config.runtime.backend == "ray" and config.runtime.ray_address is None:
        needs.append(DiskNeed("Ray's object store", ray_folder(), spilled_bytes(config)))
    return tuple(needs)


def _response_bytes(config: RunConfig, steps_left: int) -> int:
    """Bytes of the answers of training that are kept."""
    settings = config.answers
    if not settings.every_steps:
        return 0
    longest = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
    num_answers = steps_left // settings.every_steps * config.trainer.batch_size * config.rollout.samples_per_prompt
    return min(int(settings.max_gb * BYTES_PER_GB), num_answers * (BYTES_PER_RESPONSE + BYTES_PER_TOKEN * longest))
