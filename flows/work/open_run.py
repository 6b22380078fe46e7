"""A run that this process works on: its lock, its folder, its settings and code on disk, its trainer process."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from data.tasks import input_digests, inputs_of
from flows.stack.state import FLOW_RUN, log_in
from flows.work.checkpoints import committed_step
from flows.work.judgement import Judgement
from flows.work.protocol import Event
from flows.work.slots import Slots, Wish
from flows.work.trainer import TrainerProcess
from rlcore.checkpoint.catalog import scan
from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_id, settings_fingerprint
from rlcore.errors import CheckpointError, DataError, MillraceError, is_stop
from rlcore.run.faults import fault_of, note_fault, read_faults
from rlcore.run.given_models import changed_models, keep_models, model_paths
from rlcore.run.inputs import FILE_SHA256, RunInputs, content_digest
from rlcore.run.layout import RunLayout
from rlcore.run.stop import locked_run
from rlcore.storage.locks import Holder
from rlcore.storage.manifest import read_manifest
from rlcore.storage.publish import write_json_atomically, write_text_atomically
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.connection import resolve_uri
from rlcore.user_code import code_of, difference, kept_code, working_by

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
        self.has_lineage = False
        """Whether this process has noted where the run comes from."""
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


def settings_text(config: RunConfig, layout: RunLayout) -> str:
    """What is kept of the settings with the run, for programs."""
    return anchored(config, layout).model_dump_json(indent=2) + "\n"


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
    """Open a run for the block. See `OpenRun`. A trainer whose command has ended is waited for, which `say` is told.

    Raises:
        RunInUseError: another command works on it, or such a trainer has not ended in time.
        CheckpointError: it has begun with other code, data or models, or has more steps than it is to have.
        DataError: its folder cannot be written.
    """
    from rlcore.config.documents import to_yaml

    layout = RunLayout.of(config)
    if config.tracking.uri is not None:  # other settings may have been composed since
        log_in(config.tracking.uri, layout.root)

    def report(event: Mapping[str, object]) -> None:
        say(str(event["text"]))

    with locked_run(layout.run_dir, report, lambda: False, is_holder_waited_for=False) as lock:
        _keep_code(config, layout)
        if config.name != EVALUATION:  # that is named by the files of its model
            keep_models(layout.models_json, model_paths(config))
        write_text_atomically(layout.settings_json, settings_text(config, layout))
        write_text_atomically(layout.run_dir / "settings.yaml", to_yaml(anchored(config, layout)))
        run = OpenRun(config, command, title)
        run.trainer.lock = lock.fileno()
        with (
            _noted_before_the_first_step(layout.run_dir),
            working_by(layout.code),  # an edit meanwhile is for the next start
            run.trainer,
        ):
            yield run


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


def _keep_code(config: RunConfig, layout: RunLayout) -> None:
    require_same_run(config, layout)
    code = code_of(config)
    try:
        is_kept = kept_code(layout.code) == code
    except DataError:  # damaged before the run has begun
        is_kept = False
    if not is_kept:
        code.keep(layout.code)


def require_same_run(config: RunConfig, layout: RunLayout) -> None:
    """Require that a run that has begun goes on with the same code (what the settings name as `module:function`), files
    of the dataset and models, and that it has no more steps than `trainer.total_steps`.

    Raises:
        CheckpointError: it would not, or it has; shows what is different.
    """
    if (steps := _steps_if_begun(layout)) is None:
        return
    total = config.trainer.total_steps
    if steps and steps[-1] > total:
        start = max((step for step in steps if step <= total), default=steps[-1])
        raise CheckpointError(
            f"trainer.total_steps: must be at least {steps[-1]}, the steps that run {run_id(config)} has already; got "
            f"{total}. Set it to {steps[-1]} or more; or for fewer start another run, from these weights "
            f"(--fork {run_id(config)}@{start}) or from step 0, with another name or run_id."
        )
    now, then = code_of(config), kept_code(layout.code)
    if then is not None:  # a suite that has come or gone since brings or takes its scorer, and changes no number
        then, now = then.shared_with(now), now.shared_with(then)
    if then is not None and then.digests != now.digests:
        changed, remedy = difference(then, now), f"Put it back (the run's code lies in {layout.code})"
    elif files := _changed_files(config, layout):
        changed, remedy = "\n".join(files), "Put them back (data.revision names the commit of a hub dataset)"
    elif models := changed_models(layout.models_json, model_paths(config)):
        changed, remedy = "\n".join(models), "Put it back (a relative path begins at the working directory)"
    else:
        return
    raise _another_run(config, layout, steps, changed, remedy)


def require_same_rows(config: RunConfig, layout: RunLayout, inputs: RunInputs) -> None:
    """Require that a run that has begun goes on with its rows: a later Millrace may filter otherwise, and a suite that
    `filter.decontaminate` compares them with may be of other rows.

    Raises:
        CheckpointError: it would not.
    """
    if (steps := _steps_if_begun(layout)) is None:
        return
    try:
        then = RunInputs.read(layout)
        if then.filtered_directory.name == inputs.filtered_directory.name or _rows(then) == _rows(inputs):
            return
    except (DataError, OSError, ValueError):  # they are there no more
        return
    changed = f"  rows: {then.filtered_directory} when it began, {inputs.filtered_directory} now"
    raise _another_run(
        config, layout, steps, changed, "Put back what made them (a suite's file, or Millrace's version)"
    )


def _rows(inputs: RunInputs) -> list[list[str]]:
    from rlcore.run.pass_rates import row_digests

    return [row_digests(file) for file in (*inputs.train_parquets, *inputs.validation_parquets)]


def _steps_if_begun(layout: RunLayout) -> list[int] | None:
    """Steps of the run's checkpoints; None: it has not begun. One that was only judged has begun and has none."""
    steps = [info.step for info in scan(layout.checkpoints).checkpoints]
    return steps if steps or any(layout.validation.glob("*.json")) else None


def _another_run(
    config: RunConfig, layout: RunLayout, steps: Sequence[int], changed: str, remedy: str
) -> CheckpointError:
    fork = f"from these weights (--fork {run_id(config)}@{steps[-1]}) or from step 0" if steps else "from step 0"
    return CheckpointError(
        f"{layout.run_dir}: has begun with other code, data or models, so going on would be another run:\n{changed}\n"
        f"{remedy}; or start another run by what is there now, {fork}, with a run_id of its own."
    )


def _changed_files(config: RunConfig, layout: RunLayout) -> list[str]:
    """Files that the run's dataset and its demonstrations were made of and that have other content now, a line each."""
    try:
        inputs = RunInputs.read(layout)
    except DataError:
        return []
    then = {} if inputs.dataset_directory is None else inputs_of(inputs.dataset_directory)
    now = input_digests(config.data) if then else {}
    shown, file = inputs.demonstrations_directory, config.warm_start.demonstrations
    manifest = None if shown is None or file is None else read_manifest(shown)
    if manifest is not None and FILE_SHA256 in manifest.values:
        name, path = "warm_start.demonstrations", Path(str(file)).expanduser()
        then |= {name: manifest.values[FILE_SHA256]}
        now |= {name: content_digest(path)} if path.is_file() else {}
    return [
        f"  {name}: {then.get(name, 'absent')[:16]} when the run's data was made, {now.get(name, 'absent')[:16]} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
