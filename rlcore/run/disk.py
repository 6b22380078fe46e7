"""Upper bounds of the disk space that a run still needs, and a guard that waits for free space. Imports no torch."""

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
    max_num_checkpoints,
    reserve_bytes,
    size,
)

PAUSED, RESUMED = "paused_for_disk", "disk_room"  # the events at the start and the end of a wait for disk space
POLL_S = 1.0
BYTES_PER_WEIGHT = 4  # the size of one exported weight, which is a float32 master weight
BYTES_PER_TOKEN = 20
"""The compressed bytes of one stored token of a response: id, text, three log-probabilities and advantage."""
BYTES_PER_RESPONSE = 500  # the size of a stored response without its tokens
EventSink = Callable[[str, int, Mapping[str, object]], None]
"""A function that takes an event's name, step and data. The user sees the entry `text` of the event's data."""


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """A guard that waits until the disk of `path` has room for the next writes. `prune`: deletes old checkpoints."""

    path: Path
    config: CheckpointConfig
    log_event: EventSink
    stop: Callable[[], bool]
    prune: Callable[[], object]

    def wait(self, needed_bytes: int, step: int) -> None:
        """Delete old checkpoints, then wait until the disk has room for `needed_bytes` and the reserve. Raises
        DiskSpaceError after `checkpoint.wait_for_room_s`, and StopRequestedError if a stop is requested."""
        report = self.check(needed_bytes)
        if not report.enough:
            self.prune()
            report = self.check(needed_bytes)
        if report.enough:
            return
        deadline = time.monotonic() + self.config.wait_for_room_s
        what = size(report.missing_bytes) if report.missing_bytes else "inodes"
        paused = {
            "text": f"paused: {what} are missing at {report.path}: {report}",
            "path": str(report.path),
            "missing_bytes": report.missing_bytes,
            "needed_bytes": report.needed_bytes + report.reserve_bytes,
            "free_bytes": report.free_bytes,
        }
        self.log_event(PAUSED, step, paused)
        while not (report := self.check(needed_bytes)).enough:
            self._wait(deadline, report)
        text = f"{self.path}: there is room again, the run continues"
        self.log_event(RESUMED, step, {"text": text, "path": str(self.path)})

    def check(self, needed_bytes: int) -> RoomReport:
        """Return a report of the free space, which says whether it suffices for `needed_bytes` and the reserve."""
        return check_room(self.path, needed_bytes, reserve_bytes(self.config))

    def _wait(self, deadline: float, report: RoomReport) -> None:
        if self.stop():
            raise StopRequestedError(f"stopped while the run waited for room on a disk: {report}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise DiskSpaceError(
                f"{report} Waited {self.config.wait_for_room_s:.0f} s for room (checkpoint.wait_for_room_s). Committed "
                "data stays; the same command resumes the run."
            )
        time.sleep(min(left, POLL_S))


def disk_needs(
    config: RunConfig,
    layout: RunLayout,
    *,
    checkpoints_bytes: int,
    num_weights: int,
    steps_left: int,
    has_initial_policy: bool,
) -> tuple[DiskNeed, ...]:
    """Return the disk space that each large output of the run still needs. `checkpoint.reserve_gb` covers small
    outputs. `checkpoints_bytes`: the bytes that future checkpoints add."""
    weights = BYTES_PER_WEIGHT * num_weights
    needs = [
        DiskNeed("checkpoints", layout.checkpoints, checkpoints_bytes),
        DiskNeed("weights for others", layout.exported_model, weights),
        DiskNeed("answers", layout.answers, _response_bytes(config, steps_left)),
    ]
    warm, path = config.warm_start, config.model.path
    if not has_initial_policy and (warm.enabled or path is None):
        needs.append(DiskNeed("initial policy", layout.root / "models", weights))
    if path == SMOLLM2 and not configured_model(config).is_dir():
        needs.append(DiskNeed("SmolLM2's weights", layout.root / "models", weights))
    if not has_initial_policy and warm.enabled:
        number = max_num_checkpoints(
            config.checkpoint, total_steps=warm.max_steps, steps_per_chunk=warm.steps_per_chunk
        )
        taken = number * checkpoint_bytes(num_weights)
        needs.append(DiskNeed("checkpoints of the warm start", layout.root / "warm-starts", taken))
    if config.tracking.enabled:
        needs.append(DiskNeed("MLflow's artifacts", layout.root, weights))
    if config.runtime.backend == "ray" and config.runtime.ray_address is None:
        needs.append(DiskNeed("Ray's object store", ray_folder(), spilled_bytes(config)))
    return tuple(needs)


def _response_bytes(config: RunConfig, steps_left: int) -> int:
    settings = config.answers
    if not settings.every_steps:
        return 0
    longest = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
    count = steps_left // settings.every_steps * config.trainer.batch_size * config.rollout.samples_per_prompt
    return min(int(settings.max_gb * BYTES_PER_GB), count * (BYTES_PER_RESPONSE + BYTES_PER_TOKEN * longest))
