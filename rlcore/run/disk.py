"""A run's room on disk: estimates of what it will write, and the wait for room before a chunk and a checkpoint.

Where any other write finds the disk full the run ends, and the same command resumes it from its last checkpoint.

The estimates are made from the settings, rows of files and hub datasets by those of GSM8K and MATH. They are too high
rather than too low; only checkpoints are large. No torch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import CheckpointConfig, DataConfig, RunConfig
from rlcore.config.data import parts_of
from rlcore.config.model import SMOLLM2
from rlcore.config.suite import suite_settings
from rlcore.errors import DiskSpaceError, StopRequestedError
from rlcore.run.inputs import given_model
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
BYTES_PER_TOKEN = 12
"""Of an answer in a validation's result: its text, with room for JSON."""
BYTES_PER_KEPT_TOKEN = 20
"""Of an answer with everything that is known of its tokens, packed: id, text, three log-probabilities, advantage."""
BYTES_PER_ANSWER = 500
"""Besides tokens: the problem's numbers, ids and scores."""
BYTES_PER_ROW = 400
"""Of a dataset, compressed."""
BYTES_PER_PASS_RATE = 150
"""Of a row in a table of pass rates."""
BYTES_PER_STEP_LINE = 8_000
"""A step's line in the journal: some 120 metrics."""
ROWS_OF_FIXED_SETS = {"gsm8k": (7_473, 1_319)}
ROWS_OF_OTHERS = (15_000, 5_000)
"""More than GSM8K and MATH have for training and held out."""

Happened = Callable[[str, int, Mapping[str, object]], None]
"""Takes an event's name, its step and its data; `text` in the data is for display."""


@dataclass(frozen=True, slots=True)
class Room:
    """Waits for room before a chunk and before a checkpoint. `happened`: called at the pause and at its end; `stop`:
    whether the run was told to stop; `prune`: deletes what the retention rule does not keep."""

    config: CheckpointConfig
    happened: Happened
    stop: Callable[[], bool]
    prune: Callable[[], object]

    def wait(self, needed_bytes: int, *, step: int, path: Path) -> None:
        """Return when there is room for `needed_bytes` and the reserve at `path`: delete what is not kept, then wait.

        Raises:
            DiskSpaceError: no room came in `checkpoint.wait_for_room_s`.
            StopRequestedError: a stop was asked for while the run waited. What is committed stays.
        """
        report = self.look(path, needed_bytes)
        if not report.enough:
            self.prune()
            report = self.look(path, needed_bytes)
        if report.enough:
            return
        deadline = time.monotonic() + self.config.wait_for_room_s
        self.happened(PAUSED, step, _as_event(report))
        while not (report := self.look(path, needed_bytes)).enough:
            self._wait(deadline, report)
        self.happened(GOES_ON, step, {"text": f"{path}: there is room again, going on", "path": str(path)})

    def look(self, path: Path, needed_bytes: int) -> RoomReport:
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
    has_start_model: bool,
) -> tuple[DiskNeed, ...]:
    """Everything from the dataset to the export. `checkpoints_bytes`: what checkpoints will take more than now."""
    weights = BYTES_PER_WEIGHT * num_weights
    num_train, num_held_out = _rows(config.data)
    judged = _num_judged(config, steps_left)
    of_suites = [suite_settings(config, suite) for suite in config.validation.suites]
    kept = num_train + num_held_out + sum(_rows(seen.data)[1] for seen in of_suites)
    results = sum(_num_judged(seen, steps_left) * _result_bytes(seen) for seen in (config, *of_suites))
    journal = steps_left * BYTES_PER_STEP_LINE
    needs = [
        DiskNeed("checkpoints", layout.checkpoints, checkpoints_bytes),
        DiskNeed("weights for others", layout.exported_model, weights),
        DiskNeed("journal and validations", layout.run_dir, journal + results),
        DiskNeed("answers", layout.answers, _answer_bytes(config, steps_left, judged)),
        DiskNeed("dataset and its filtered rows", layout.root / "datasets", 2 * kept * BYTES_PER_ROW),
    ]
    if config.pass_rates.samples:
        # The parts stay until the whole table is written.
        needs.append(DiskNeed("pass rates", layout.root / "pass-rates", 2 * num_train * BYTES_PER_PASS_RATE))
    warm, path = config.warm_start, config.model.path
    if not has_start_model and (warm.enabled or path is None):
        needs.append(DiskNeed("start model", layout.root / "models", weights))
    if path == SMOLLM2 and not given_model(config).is_dir():
        needs.append(DiskNeed("SmolLM2's weights", layout.root / "models", weights))
    if not has_start_model and warm.enabled:
        number = num_checkpoints_at_once(
            config.checkpoint, total_steps=warm.max_steps, steps_per_chunk=warm.steps_per_chunk
        )
        taken = number * checkpoint_bytes(num_weights)  # gone when it ends
        needs.append(DiskNeed("checkpoints of the warm start", layout.root / "warm-starts", taken))
    if config.tracking.enabled:
        needs.append(DiskNeed("MLflow's database and artifacts", layout.root, journal + weights))
    if config.runtime.backend == "ray" and config.runtime.ray_address is None:
        needs.append(DiskNeed("Ray's object store", ray_folder(), spilled_bytes(config)))
    return tuple(needs)


def _answer_bytes(config: RunConfig, steps_left: int, num_judged: int) -> int:
    """Bytes of the answers that are kept: those of training up to `answers.max_gb`, and those of validations."""
    settings = config.answers
    if not settings.every_steps:
        return 0
    each = BYTES_PER_ANSWER + BYTES_PER_KEPT_TOKEN * config.rollout.max_response_tokens
    each += BYTES_PER_TOKEN * config.filter.max_prompt_tokens
    a_step = config.trainer.batch_size * config.rollout.samples_per_prompt * each
    training = min(int(settings.max_gb * BYTES_PER_GB), steps_left // settings.every_steps * a_step)
    return training + num_judged * each


def _num_judged(config: RunConfig, steps_left: int) -> int:
    """Answers of all validations, greedy ones too."""
    settings = config.validation
    validations = 3 + (steps_left // settings.every_steps if settings.every_steps else 0)
    rows = _rows(config.data)[1]
    return validations * min(rows, settings.max_problems or rows) * (settings.samples_per_problem + settings.greedy)


def _result_bytes(config: RunConfig) -> int:
    """Bytes of an answer in a validation's result."""
    return BYTES_PER_ANSWER + BYTES_PER_TOKEN * (config.filter.max_prompt_tokens + config.rollout.max_response_tokens)


def _rows(data: DataConfig) -> tuple[int, int]:
    """Rows for training and held out, of all parts of a mixture."""
    num_train = num_held_out = 0
    for part in (part.data for part in parts_of(data)):
        train, held_out = ROWS_OF_FIXED_SETS.get(part.task, ROWS_OF_OTHERS)
        num_train += getattr(part, "train_size", train)
        num_held_out += getattr(part, "validation_size", held_out)
    return num_train, num_held_out
