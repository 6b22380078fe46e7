"""A run that this process works on: its lock, its folder, its settings and code on disk, its trainer process."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from flows.stack.state import FLOW_RUN, log_in
from flows.work.checkpoints import committed_step
from flows.work.judgement import Judgement
from flows.work.origin import require_same
from flows.work.protocol import Event
from flows.work.slots import Slots, Wish
from flows.work.trainer import TrainerProcess
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import DataError, MillraceError, is_stop
from rlcore.run.faults import fault_of, note_fault, read_faults
from rlcore.run.inputs import RunInputs
from rlcore.run.layout import RunLayout
from rlcore.run.model_digests import model_digests
from rlcore.run.stop import locked_run
from rlcore.storage.locks import Holder
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.connection import resolve_uri
from rlcore.tracking.lineage import Origin, read_origin
from rlcore.user_code import code_of, kept_code, working_by

log = logging.getLogger(__name__)

EVALUATION = "eval"
"""`name` of an evaluation, which is a run without steps."""
STOP_FILE = "stop.json"
"""Which process was told to stop last, and when: a second signal would end it without a save."""
END_WAIT_S = 60.0
"""Beyond `runtime.stop_deadline_s`: by then a trainer that was told to stop has ended by itself, and its last metrics
are delivered."""


@dataclass(slots=True)
class Shown:
    """What Prefect shows of the run: artifacts by their names, validations, its page in MLflow once known.

    `validations`: in training, by step. `judgements`: by name. `summary_at`: when the summary was last written.
    `again_at`: when a server that was away is asked again.
    """

    artifacts: dict[str, UUID] = field(default_factory=dict)
    validations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    judgements: dict[str, Judgement] = field(default_factory=dict)
    mlflow_page: str = ""
    summary_at: float = float("-inf")
    again_at: float = float("-inf")


class OpenRun:
    """A run: settings, folders, and the trainer process once it is open.

    `command`: the line that works on it, noted with it. `title`: the run in the names of tasks. `seen`: see
    `RunSettings`.
    """

    def __init__(
        self, config: RunConfig, command: Sequence[str] = (), title: str = "", *, seen: RunConfig | None = None
    ) -> None:
        self.config = config
        self.seen = config if seen is None else seen
        self.command = tuple(command)
        self.title = title or config.name
        self.layout = RunLayout.of(config)
        self.shown = Shown()
        self.inputs: RunInputs | None = None
        """What the training takes from the stages of the rows, once these are done (`flows.stages.rows.inputs_of`)."""
        self.is_origin_complete = False
        """Whether this process has recorded how the training was started."""
        stop_wait_s = config.runtime.stop_deadline_s + END_WAIT_S
        slots, wish = Slots(self.layout.root), Wish.of(config, self.run_id)
        self.trainer = TrainerProcess(self.layout.run_dir, stop_wait_s=stop_wait_s, slots=slots, wish=wish)

    @property
    def run_id(self) -> str:
        """Name of the run's folder."""
        return self.layout.run_dir.name

    @cached_property
    def committed(self) -> int:
        """Step of the newest whole checkpoint when this was first asked; 0 without one.

        Raises:
            CheckpointError: all are broken, or it is of other settings.
        """
        return committed_step(self.config)

    @cached_property
    def settings_fingerprint(self) -> str:
        """Fingerprint of the settings, which each stage of the training names."""
        return settings_fingerprint(self.config)

    @cached_property
    def origin(self) -> Origin:
        """The record in the run's folder; in a new run, its settings alone."""
        return read_origin(self.layout.run_dir) or Origin(self.config)

    def note(self, **changes: Any) -> None:
        """Change fields of the record in the run's folder. The run must be open."""
        changed = replace(self.origin, **changes)
        if changed != self.origin or not self.layout.run_json.is_file():
            changed.write(self.layout.run_dir)
        self.origin = changed

    @property
    def is_trained(self) -> bool:
        """Whether the run had come to its last step when this was first asked."""
        return self.committed >= self.config.trainer.total_steps

    @property
    def is_evaluation(self) -> bool:
        """Whether it is an evaluation: it has no rows but those of suites, and no steps."""
        return self.config.name == EVALUATION

    @contextmanager
    def heard_by(
        self,
        on_event: Callable[[Event], None],
        on_line: Callable[[str], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Pass the trainer's events and log lines there inside the block; `on_wait` may end the wait for it."""
        trainer = self.trainer
        before = trainer.on_event, trainer.on_line, trainer.on_wait
        trainer.on_event, trainer.on_line, trainer.on_wait = on_event, on_line, on_wait
        try:
            yield
        finally:
            trainer.on_event, trainer.on_line, trainer.on_wait = before


def anchored(config: RunConfig, layout: RunLayout) -> RunConfig:
    """The settings with an absolute root and MLflow store: they may be read from another working directory."""
    tracking = config.tracking
    if tracking.uri is not None:
        tracking = tracking.model_copy(update={"uri": resolve_uri(tracking, layout.root)})
    paths = config.paths.model_copy(update={"root": str(layout.root)})
    return config.model_copy(update={"paths": paths, "tracking": tracking})


@contextmanager
def open_run(
    config: RunConfig, command: Sequence[str] = (), title: str = "", *, say: Callable[[str], None] = log.warning
) -> Iterator[OpenRun]:
    """Open a run for the block. See `OpenRun`. A trainer whose command has ended is waited for, which `say` reports.

    Raises:
        RunInUseError: another command works on it, or such a trainer has not ended in time.
        CheckpointError: it has begun with other code, data or models, or has more steps than it is to have.
        DataError: its folder cannot be written, or its record cannot be read.
    """
    layout = RunLayout.of(config)
    if config.tracking.uri is not None:  # other settings may have been composed since
        log_in(config.tracking.uri, layout.root)

    def report(event: Mapping[str, object]) -> None:
        say(str(event["text"]))

    with locked_run(layout.run_dir, report, lambda: False, is_holder_waited_for=False) as lock:
        require_same(config, layout)
        _keep_code(config, layout)
        run = OpenRun(config, command, title)
        models = {} if run.is_evaluation else {**run.origin.models, **model_digests(config)}  # that one's id has them
        run.note(settings=anchored(config, layout), models=models)
        run.trainer.lock = lock.fileno()
        with (
            _noted_before_the_first_step(layout.run_dir),
            working_by(layout.code),  # an edit meanwhile is for the next start
            run.trainer,
        ):
            yield run


def _keep_code(config: RunConfig, layout: RunLayout) -> None:
    code = code_of(config)
    try:
        is_kept = kept_code(layout.code) == code
    except DataError:  # damaged before the run has begun
        is_kept = False
    if not is_kept:
        code.keep(layout.code)


def note_told(run_dir: Path, worker: Holder) -> None:
    """Remember that a process was told to stop, and the flow run that Prefect's worker started it for, if one did."""
    told: dict[str, Any] = {"process": [worker.pid, worker.born], "time": round(time.time(), 3)}
    with suppress(psutil.Error):
        if (process := worker.process()) is not None and (flow_run := process.environ().get(FLOW_RUN)):
            told["flow_run"] = flow_run
    write_json_atomically(run_dir / STOP_FILE, told)


@contextmanager
def _noted_before_the_first_step(run_dir: Path) -> Iterator[None]:
    """Note why the block ends early, where no trainer has begun that would note it."""
    began = time.time()
    try:
        yield
    except BaseException as error:
        if not read_attempts(run_dir):
            with suppress(MillraceError, OSError):  # what ends the block matters more
                if is_stop(error):
                    note_told(run_dir, Holder.me())
                elif isinstance(error, Exception) and not any(fault.time >= began for fault in read_faults(run_dir)):
                    note_fault(run_dir, fault_of(error, "", 0))
        raise
