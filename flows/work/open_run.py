"""A run that this process has opened, and the run's lock, folder, checkpoints, code and trainer process."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from data.tasks import input_digests, inputs_of
from flows.progress import ValidationSummary
from flows.stack.state import FLOW_RUN_ID, set_mlflow_login
from flows.work.protocol import Event
from flows.work.runs import STOP_FILE
from flows.work.slots import SlotRequest, Slots
from flows.work.trainer import TrainerProcess
from rlcore.checkpoint.catalog import name_of, scan
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_id, settings_fingerprint
from rlcore.errors import CheckpointError, DataError, MillraceError, is_stop
from rlcore.run.initial_policy import model_digests, model_paths
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.run.stop import locked_run
from rlcore.run.watchdog import append_failure, failure_from, read_failures
from rlcore.storage.documents import content_digest
from rlcore.storage.locks import Holder
from rlcore.storage.manifest import FILE_SHA256, read_manifest
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.connection import resolve_uri
from rlcore.tracking.lineage import Origin, read_origin
from rlcore.user_code import code_for_run, code_patch, read_code, run_code


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Return the checkpoint store of a run."""
    layout = RunLayout.of(config)
    return CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)


def committed_step(config: RunConfig) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is no checkpoint. Raises CheckpointError if all
    checkpoints are broken, or if the newest one was written with other settings.
    """
    found = checkpoint_store(config).latest(verify=False)
    return 0 if found is None else found.step


def checkpoint_name(checkpoint: str) -> str:
    """Return the folder name of a checkpoint. A name that is not a step is returned unchanged.

    >>> checkpoint_name("40"), checkpoint_name("best")
    ('step-000040', 'best')
    """
    return name_of(int(checkpoint)) if checkpoint.isdecimal() else checkpoint


ABSENT = "absent"
SHOWN_DIGITS = 16  # hex digits of a digest in a message


def require_same_inputs(config: RunConfig, layout: RunLayout, inputs: RunInputs | None = None) -> None:
    """Raise CheckpointError if the code, data or models of a run differ from the run's record, or if the run has more
    steps than `trainer.total_steps`. The message lists the changes. `inputs` has the current inputs. If it is None, the
    filtered rows are not compared.
    """
    steps = [info.step for info in scan(layout.checkpoints).checkpoints]
    if not steps and not any(layout.validation.glob("*.json")):  # the run has not begun
        return
    total, this = config.trainer.total_steps, run_id(config)
    if steps and steps[-1] > total:
        start = max((step for step in steps if step <= total), default=steps[-1])
        raise CheckpointError(
            f"trainer.total_steps: must be at least {steps[-1]}, the steps that run {this} already has; got "
            f"{total}. Set it to {steps[-1]} or more; for fewer steps start another run, from these weights "
            f"(--fork {this}@{start}) or from step 0, with another name or run_id."
        )
    origin = read_origin(layout.run_dir)
    changes = _changed_code(config, layout)
    if origin is not None:
        then = RunInputs.of(origin)
        changes += [] if then is None else _changed_files(config, then)
        changes += _changed_models(config, origin)
        changes += [] if then is None or inputs is None else _changed_rows(then, inputs)
    if changes:
        fork = f"from these weights (--fork {this}@{steps[-1]}) or from step 0" if steps else "from step 0"
        raise CheckpointError(
            f"{layout.run_dir}: has begun with other code, data or models, and cannot resume with these:\n"
            + "\n".join(changes)
            + f"\nRestore what has changed (the run's code is in {layout.code}; data.revision names the commit of a "
            f"hub dataset), or start another run with the current inputs, {fork}, with a separate run_id."
        )


def _changed_code(config: RunConfig, layout: RunLayout) -> list[str]:
    """Return a list with the patch from the run's recorded code to its current code, or [] if both are equal.

    Custom functions that only one of the two versions uses, because suites were added or removed, are ignored.
    """
    now, then = code_for_run(config), read_code(layout.code)
    if then is None:
        return []
    then, now = then.shared_with(now), now.shared_with(then)
    return [code_patch(then, now)] if then.digests != now.digests else []


def _changed_files(config: RunConfig, inputs: RunInputs) -> list[str]:
    then = {} if inputs.dataset_directory is None else inputs_of(inputs.dataset_directory)
    now = input_digests(config.data) if then else {}
    shown, file = inputs.demonstrations_directory, config.warm_start.demonstrations
    manifest = None if shown is None or file is None else read_manifest(shown)
    if manifest is not None and FILE_SHA256 in manifest.values:
        name, path = "warm_start.demonstrations", Path(str(file)).expanduser()
        then |= {name: manifest.values[FILE_SHA256]}
        now |= {name: content_digest(path)} if path.is_file() else {}
    return _digest_changes("", then, now)


def _changed_models(config: RunConfig, origin: Origin) -> list[str]:
    """Return a line for each changed model file. A model that is or was missing on this machine is skipped."""
    changes, paths = [], model_paths(config)
    for key, now in model_digests(config).items():
        place = Path(str(paths[key])).expanduser().resolve()
        changes += _digest_changes(f"{key}, {place}: ", origin.models.get(key, now), now)
    return changes


def _changed_rows(then: RunInputs, now: RunInputs) -> list[str]:
    from rlcore.run.pass_rates import row_digests

    if then.filtered_directory.name == now.filtered_directory.name:
        return []
    files = [[*inputs.train_parquets, *inputs.validation_parquets] for inputs in (then, now)]
    if not all(file.is_file() for file in files[0]):  # the first rows are deleted
        return []
    before, after = ([row_digests(file) for file in each] for each in files)
    return [] if before == after else [f"  rows: {then.filtered_directory} then, {now.filtered_directory} now"]


def _digest_changes(where: str, then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"  {where}{name}: {then.get(name, ABSENT)[:SHOWN_DIGITS]} then, {now.get(name, ABSENT)[:SHOWN_DIGITS]} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


log = logging.getLogger(__name__)

EVALUATION = "eval"  # `name` of an evaluation, which is a run without steps
END_WAIT_S = 60.0  # seconds after `runtime.stop_deadline_s` for the last metrics of a stopping trainer


@dataclass(slots=True)
class PrefectView:
    """The state of the run's artifacts in Prefect. `assets` has the asset keys of finished stages.

    `validations` has the metrics of each validated step. `retry_at` is the earliest time of the next request after a
    failure.
    """

    artifacts: dict[str, UUID] = field(default_factory=dict)
    assets: list[str] = field(default_factory=list)
    validations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    final_validations: dict[str, ValidationSummary] = field(default_factory=dict)
    mlflow_page: str = ""
    summary_at: float = float("-inf")
    retry_at: float = float("-inf")


class OpenRun:
    """A run that is open in this process. The names of its Prefect tasks contain `title`.

    For `planning_config`, see `RunSettings`.
    """

    def __init__(
        self,
        config: RunConfig,
        command: Sequence[str] = (),
        title: str = "",
        *,
        planning_config: RunConfig | None = None,
    ) -> None:
        self.config = config
        self.planning_config = config if planning_config is None else planning_config
        self.command = tuple(command)
        self.title = title or config.name
        self.layout = RunLayout.of(config)
        self.prefect_view = PrefectView()
        self.inputs: RunInputs | None = None  # set by `flows.stages.dataset.inputs_of`
        self.is_origin_complete = False
        stop_wait_s = config.runtime.stop_deadline_s + END_WAIT_S
        slots, request = Slots(self.layout.root), SlotRequest.of(config, self.run_id)
        self.trainer = TrainerProcess(
            self.layout.run_dir, stop_wait_s=stop_wait_s, slots=slots, request=request, python=config.runtime.python
        )

    @property
    def run_id(self) -> str:
        """The name of the run's folder."""
        return self.layout.run_dir.name

    @cached_property
    def committed(self) -> int:
        """The step of the newest complete checkpoint, or 0. The value is cached. For errors, see `committed_step`."""
        return committed_step(self.config)

    @cached_property
    def settings_fingerprint(self) -> str:
        """The fingerprint of the run's settings."""
        return settings_fingerprint(self.config)

    @cached_property
    def origin(self) -> Origin:
        """The run's record in `run.json` (see `Origin`). The record of a new run has only the settings."""
        return read_origin(self.layout.run_dir) or Origin(self.config)

    def note(self, **changes: Any) -> None:
        """Change fields of `origin` and write it to `run.json`. The run must be open."""
        changed = replace(self.origin, **changes)
        if changed != self.origin or not self.layout.run_json.is_file():
            changed.write(self.layout.run_dir)
        self.origin = changed

    @property
    def is_trained(self) -> bool:
        """True if `committed` (cached) is the last step. The value does not change during training."""
        return self.committed >= self.config.trainer.total_steps

    @property
    def is_evaluation(self) -> bool:
        """True if the run is an evaluation, which tests a model on suites and has no training steps."""
        return self.config.name == EVALUATION

    @contextmanager
    def route_events(
        self,
        on_event: Callable[[Event], None],
        on_line: Callable[[str], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Inside the block, call `on_event` with each event of the trainer and `on_line` with each line of its log.

        `on_wait` is called often while a command waits for the trainer. An exception in `on_wait` stops the trainer.
        """
        trainer = self.trainer
        before = trainer.on_event, trainer.on_line, trainer.on_wait
        trainer.on_event, trainer.on_line, trainer.on_wait = on_event, on_line, on_wait
        try:
            yield
        finally:
            trainer.on_event, trainer.on_line, trainer.on_wait = before


def with_absolute_paths(config: RunConfig, layout: RunLayout) -> RunConfig:
    """Return settings that are valid in any folder, with absolute paths of workspace, MLflow store and interpreter."""
    tracking = config.tracking
    if tracking.uri is not None:
        tracking = tracking.model_copy(update={"uri": resolve_uri(tracking, layout.root)})
    paths = config.paths.model_copy(update={"root": str(layout.root)})
    python = config.runtime.python
    if python is not None:
        python = os.path.abspath(shutil.which(python) or python)  # noqa: PTH100 - a link to it is in its environment
    runtime = config.runtime.model_copy(update={"python": python})
    return config.model_copy(update={"paths": paths, "tracking": tracking, "runtime": runtime})


@contextmanager
def open_run(
    config: RunConfig, command: Sequence[str] = (), title: str = "", *, report: Callable[[str], None] = log.warning
) -> Iterator[OpenRun]:
    """Open a run inside the block. If the trainer of an earlier command still runs, call `report` and wait.

    Raises RunInUseError if another command uses the run or the earlier trainer does not end. Raises
    CheckpointError if the inputs have changed, and DataError if the run's folder cannot be written or read.
    """
    layout = RunLayout.of(config)
    if config.tracking.uri is not None:  # other settings may have been composed since
        set_mlflow_login(config.tracking.uri, layout.root)

    with locked_run(
        layout.run_dir, lambda event: report(str(event["text"])), lambda: False, waits_for_holder=False
    ) as lock:
        require_same_inputs(config, layout)
        code, kept = code_for_run(config), None
        with suppress(DataError):  # damaged before the run has begun
            kept = read_code(layout.code)
        if kept != code:
            code.save(layout.code)
        run = OpenRun(config, command, title)
        # The id of an evaluation contains its models.
        models = {} if run.is_evaluation else {**run.origin.models, **model_digests(config)}
        run.note(settings=with_absolute_paths(config, layout), models=models)
        run.trainer.lock = lock.fileno()
        with (
            _record_early_end(layout.run_dir),
            run_code(layout.code),  # an edit during the run counts for the next start
            run.trainer,
        ):
            yield run


def record_stop_request(run_dir: Path, worker: Holder) -> None:
    """Record in the run's folder that the process `worker`, which works on the run, was asked to stop.

    If a Prefect worker started the process `worker`, also record the id of its flow run.
    """
    request: dict[str, Any] = {"process": [worker.pid, worker.born], "time": round(time.time(), 3)}
    with suppress(psutil.Error):
        if (process := worker.process()) is not None and (flow_run := process.environ().get(FLOW_RUN_ID)):
            request["flow_run"] = flow_run
    write_json_atomically(run_dir / STOP_FILE, request)


def has_untrained_steps(run_dir: Path) -> bool:
    """Return whether the run has no attempt yet, or its last attempt has not finished the training."""
    attempts = read_attempts(run_dir)
    end = attempts[-1][1] if attempts else None
    return end is None or end.status != "FINISHED"


@contextmanager
def _record_early_end(run_dir: Path) -> Iterator[None]:
    """Record in the run's folder that an error or a stop has ended the block, if the trainer cannot record this.

    The trainer can record neither an end before its first attempt nor a stop after the last step.
    """
    began = time.time()
    try:
        yield
        if not has_untrained_steps(run_dir):
            (run_dir / STOP_FILE).unlink(missing_ok=True)  # the request ended an earlier call
    except BaseException as error:
        if not read_attempts(run_dir) or (is_stop(error) and not has_untrained_steps(run_dir)):
            with suppress(MillraceError, OSError):  # the error that ends the block matters more
                if is_stop(error):
                    record_stop_request(run_dir, Holder.me())
                elif isinstance(error, Exception) and not any(
                    failure.time >= began for failure in read_failures(run_dir)
                ):
                    append_failure(run_dir, failure_from(error, "", 0))
        raise
