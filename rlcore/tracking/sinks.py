"""TensorBoard and Weights & Biases as additional trackers. The process that delivers to MLflow sends them the whole
journal at each start. Failures of these trackers never affect the trainer or MLflow."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Any

from rlcore.config import TrackingConfig
from rlcore.config.problems import mask_secrets
from rlcore.errors import ConfigError
from rlcore.storage.documents import open_ordinary
from rlcore.tracking.attempts import Attempt
from rlcore.tracking.journal import JOURNAL_FILE, StepRecord, iter_lines

log = logging.getLogger(__name__)
TENSORBOARD_FOLDER = "tensorboard"  # in the run's folder

INIT_TIMEOUT_S = 10.0  # Seconds for W&B's server to accept a run. MLflow receives nothing in this time.


class TensorBoardSink:
    """A writer of event files in the folder `tensorboard/` of a run. It first deletes the files of an earlier
    process."""

    def __init__(self, run_dir: Path, attempt: Attempt) -> None:
        from tensorboard.summary import Writer

        folder = run_dir / TENSORBOARD_FOLDER
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        self._writer = Writer(os.fspath(folder))

    def log(self, record: StepRecord) -> None:
        """Write each metric of a step as a scalar."""
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, wall_time=record.time)

    def flush(self) -> None:
        """Write buffered scalars to the event file."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """A run in Weights & Biases, configured by W&B's environment variables. W&B ignores a step that it already has."""

    def __init__(self, run_dir: Path, attempt: Attempt) -> None:
        import wandb

        where = attempt.destination
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False,
            init_timeout=INIT_TIMEOUT_S,
        )  # fmt: skip
        self._run = wandb.init(
            project=where.experiment,
            id=run_dir.name,
            name=run_dir.name,
            dir=run_dir,
            config=dict(where.settings),
            group=str(where.settings["name"]),
            resume="allow",
            settings=settings,
        )

    def log(self, record: StepRecord) -> None:
        """Send the metrics of a step. W&B merges lines of the same step."""
        self._run.log(dict(record.metrics), step=record.step)

    def flush(self) -> None:
        """Do nothing, because W&B's own process already has the metrics."""

    def close(self, *, failed: bool) -> None:
        """Send the remaining metrics and end the run in W&B."""
        self._run.finish(exit_code=int(failed))


Sink = TensorBoardSink | WandbSink
SINKS: Mapping[str, Callable[[Path, Attempt], Sink]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink}
"""The sinks by their names in `tracking.report_to`."""


def require_trackers(config: TrackingConfig) -> None:
    """Check the packages and the login that `tracking.report_to` needs. Raises ConfigError if one is missing."""
    for name in config.report_to:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name in the working directory has no origin
            raise ConfigError(
                f"tracking.report_to: {name} needs the package {name}, which is not installed here. Install it with "
                f"`pip install {name}`, or leave {name} out."
            )
    if "wandb" in config.report_to:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "tracking.report_to: wandb needs a login, and this machine has none. Run `wandb login`, set "
                "WANDB_API_KEY, or set WANDB_MODE=offline."
            )


class Sinks:
    """The trackers that `tracking.report_to` names. A tracker that fails receives no further metrics."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._attempt: Attempt | None = None
        self._sinks: dict[str, Sink] = {}
        self._cursor = 0

    def catch_up(self, attempt: Attempt) -> None:
        """Send the new complete lines of the journal. For a new attempt, send the whole journal. Raises OSError if the
        journal cannot be read. An error of a tracker is logged, not raised."""
        if attempt != self._attempt:
            self.close(failed=False)
            self._attempt, self._cursor = attempt, 0
            tracking: Any = attempt.destination.settings.get("tracking", {})
            for name in tracking.get("report_to", ()):
                self._guard(name, partial(self._open, name, attempt))
        if not self._sinks:
            return
        with open_ordinary(self._run_dir / JOURNAL_FILE) as file:
            for record, end in iter_lines(file.fileno(), self._cursor):
                self._cursor = end
                if isinstance(record, StepRecord):
                    self._each(methodcaller("log", record))
        self._each(methodcaller("flush"))

    def close(self, *, failed: bool) -> None:
        """End the run in each tracker."""
        self._each(methodcaller("close", failed=failed))
        self._sinks.clear()

    def _open(self, name: str, attempt: Attempt) -> None:
        self._sinks[name] = SINKS[name](self._run_dir, attempt)

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in [*self._sinks.items()]:
            self._guard(name, partial(do, sink))

    def _guard(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # any error of a tracker, its files or the network
            self._sinks.pop(name, None)
            reason = mask_secrets(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            text = "%s receives no more metrics of this run (%s). When it works again: millrace sync %s"
            log.warning(text, name, reason, self._run_dir)
