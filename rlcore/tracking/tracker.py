"""What the trainer writes its metrics to. Nothing here waits for MLflow."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.tracking.attempts import (
    ATTEMPTS_FILE,
    Attempt,
    AttemptLog,
    Commit,
    Destination,
    FinalStatus,
    Finish,
    Owner,
    last_attempt,
    read_acts,
)
from rlcore.tracking.companion import Companion
from rlcore.tracking.connection import resolve_uri
from rlcore.tracking.journal import JOURNAL_FILE, Journal
from rlcore.tracking.lineage import lineage_tags
from rlcore.tracking.state import read_state

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for its last values to reach MLflow. The first use of a store takes some."""


class Tracker:
    """The journal of a run and, beside it, the process that carries it to MLflow.

    Every call returns at once: values go to a local file. A trainer calls, in this order, `resume_at` (with 0, 0 on a
    fresh start), then `log_step` and `log_event`, at each checkpoint `journal_bytes` (which it stores in the
    checkpoint), after publishing it `commit`, and in the end `finish`. Lines logged between `journal_bytes` and
    `commit` are not the checkpoint's: they are cut off by a resume from it.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, tags: Mapping[str, str]) -> None:
        """`tags` are set on the MLflow run, besides those of lineage (`lineage_tags`), which they override."""
        self._run_dir = run_dir
        self._config = config
        self._tags = dict(tags)
        self._journal = Journal(run_dir / JOURNAL_FILE)
        self._attempts = AttemptLog(run_dir / ATTEMPTS_FILE)
        self._companion: Companion | None = None
        self._begun = False
        self._checkpoint_bytes = 0

    def resume_at(self, step: int, journal_bytes: int) -> None:
        """Go back to a checkpoint: what the journal has after it is cut off (and kept beside).

        Where something is cut, a new attempt begins. A journal that is shorter than the checkpoint says was changed
        from outside; training goes on with what there is.
        """
        try:
            abandoned = self._journal.truncate(journal_bytes)
        except TrackingError as error:
            log.warning("%s", error)
            abandoned = None
        if abandoned is not None:
            self._begun = False
        self._begin(step, abandoned)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. May be called again for the same step with other metrics."""
        self._begin(step, None)
        self._journal.append_step(step, metrics)

    def log_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Write something that happened and is no number."""
        self._begin(step, None)
        self._journal.append_event(name, step, data)

    def require_written(self) -> None:
        """Write the values that found no room before.

        Raises:
            DiskSpaceError: values are still in memory because the disk is full.
        """
        self._journal.require_written()

    @property
    def journal_bytes(self) -> int:
        """Size of the journal, after forcing it to the disk: a checkpoint stores it.

        Raises:
            DiskSpaceError: values are still in memory because the disk is full.
        """
        self._checkpoint_bytes = self._journal.sync()
        return self._checkpoint_bytes

    def commit(self, step: int) -> None:
        """The checkpoint with the last `journal_bytes` is published: these values will never be taken back."""
        self._begin(step, None)
        self._attempts.add(Commit(step, self._checkpoint_bytes))
        self._carry()

    def finish(self, status: FinalStatus, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """End the attempt. The only call that waits, at most so long, for MLflow to have everything.

        Returns:
            Whether MLflow has everything. If not, nothing is lost: `millrace sync` delivers it later.
        """
        if not self._begun and self._has_nothing_to_tell(status):
            return True
        self._journal.close()
        size = self._journal.path.stat().st_size
        self._attempts.add(Finish(status, size, round(time.time(), 3)))
        self._attempts.close()
        companion = self._carry()
        if companion is None:
            return False
        delivered = companion.close(timeout_s)
        if not delivered:
            log.warning("MLflow has not got all of this run yet. To deliver it: millrace sync %s", self._run_dir)
        return delivered

    def _has_nothing_to_tell(self, status: FinalStatus) -> bool:
        """Whether an attempt that wrote nothing leaves the run's end as it is.

        It does where there never was a run, and where the end is known already: only FINISHED is news after another
        end, or after an end that MLflow has not been told.
        """
        acts = [act for act, _ in read_acts(self._attempts.path)]
        if not acts:
            return True
        last = acts[-1]
        if not isinstance(last, Finish):
            return False
        return status != "FINISHED" or (last.status == status and self._is_settled())

    def _is_settled(self) -> bool:
        try:
            return read_state(self._run_dir).settled
        except TrackingError as error:
            log.warning("%s", error)
            return False

    def _begin(self, step: int, abandoned: Path | None) -> None:
        """Note, once an attempt, who writes from where on, and start the delivery."""
        if self._begun:
            return
        self._begun = True
        before = last_attempt(self._attempts.path)
        self._checkpoint_bytes = self._journal.size_bytes
        self._attempts.add(
            Attempt(
                number=1 if before is None else before.number + 1,
                step=step,
                journal_bytes=self._checkpoint_bytes,
                abandoned=None if abandoned is None else abandoned.name,
                time=round(time.time(), 3),
                owner=Owner.this_process(),
                destination=destination_of(self._run_dir, self._config, self._tags),
            )
        )
        # The process of the attempt before, if it was ours, sees that and ends.
        self._companion = None
        self._carry()

    def _carry(self) -> Companion | None:
        """The running process beside us; None where the settings want none."""
        tracking = self._config.tracking
        if self._companion is None and tracking.enabled:
            self._companion = Companion(self._run_dir, every_s=tracking.ship_every_s)
        if self._companion is not None:
            self._companion.ensure_running()
        return self._companion


def destination_of(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> Destination:
    """Where the values of a run go and how it is described there; its name is its folder's."""
    root = Path(config.paths.root).absolute()
    return Destination(
        uri=resolve_uri(config.tracking, root),
        experiment=config.tracking.experiment,
        artifact_root=os.fspath(root),
        run_id=run_dir.name,
        tags={**lineage_tags(config, stage="train", run_id=run_dir.name), **tags},
        settings=config.model_dump(mode="json"),
    )
