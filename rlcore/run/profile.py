"""The window of steps that `runtime.profile` asks for: a trace of each step and rank in the run's folder."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rlcore.config.trainer import ProfileConfig
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker


class ProfileWindow:
    """Called before and after each step. A trace that gets too large ends the window."""

    def __init__(
        self,
        settings: ProfileConfig,
        folder: Path,
        group: WorkerGroup,
        report: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._group = group
        self._report = report
        self._ended = settings.first_step is None

    def holds(self, step: int) -> bool:
        """Whether the step is in the window."""
        first = self._settings.first_step
        return not self._ended and first is not None and first <= step < first + self._settings.num_steps

    def begin(self) -> None:
        """Record from here on every rank."""
        self._group.each(Worker.start_profile)

    def end(self, step: int) -> None:
        """Write what was recorded."""
        limit = self._settings.max_mb
        sizes = self._group.each(Worker.stop_profile, str(self._folder), step, limit)
        text = f"profile of step {step}: {max(sizes):.1f} MB a rank, in {self._folder}"
        if max(sizes) > limit:
            self._ended = True
            text = (
                f"profile of step {step}: {max(sizes):.1f} MB is over runtime.profile.max_mb={limit:g}: the trace is "
                "not kept and no further step is profiled. Raise it, or profile a run with fewer or shorter answers"
            )
        self._report({"event": "note", "text": text})
