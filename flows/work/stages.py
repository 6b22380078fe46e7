"""The work of each stage, without Prefect: importable functions that take a run and return what they made.

Each is a no-op, and says so, where its result is on disk already. `flows/*.py` wrap them as tasks; `millrace train`
calls them directly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data import StageResult
from flows.shown.progress import display
from flows.trainer.protocol import Progress
from flows.work.begun_with import require_same_code
from flows.work.lineage import record_lineage
from flows.work.open_run import OpenRun
from rlcore.checkpoint.catalog import by_score, checkpoint_path, is_exported, scan
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.inputs import RunInputs, ensure_tokenizer, find_start_model, is_given, planned_start_model
from rlcore.run.layout import RunLayout


@dataclass(frozen=True, slots=True)
class StartModel:
    """The model of step 0. `reward`: sampled on training problems after `steps` supervised steps."""

    directory: Path
    cached: bool
    reward: float
    steps: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Training from the checkpoint at `start` to the one at `stop`; `skipped`: it was committed already."""

    start: int
    stop: int
    checkpoint: Path
    skipped: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Judgement:
    """One validation: its figures, and the file that holds every answer."""

    name: str
    step: int
    file: Path
    cached: bool
    summary: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Export:
    """The trained weights as a transformers directory."""

    directory: Path
    step: int
    cached: bool


def make_dataset(config: RunConfig) -> StageResult:
    """Make the dataset, or find it."""
    from data import build_dataset

    return build_dataset(config.data, seed=config.seed, root=_root(config))


def filter_rows(config: RunConfig) -> StageResult:
    """Tokenize and filter the dataset, which must be there; or find the result."""
    from data import dataset_directory, dataset_fingerprint, filter_dataset

    root = _root(config)
    dataset = dataset_directory(dataset_fingerprint(config.data, config.seed, root), root)
    return filter_dataset(dataset, ensure_tokenizer(config), config.filter, root=root, on_progress=_show_rows)


def _show_rows(split: str, done: int, total: int) -> None:
    """How far the filter is, where that takes more than a moment."""
    if done < total:
        display().event(Progress(f"filter, rows of {split}", done, total, {}))


def prepare_inputs(config: RunConfig) -> RunInputs:
    """What the training takes from the stages before it; made now as far as it is missing."""
    dataset = make_dataset(config)
    return RunInputs(filter_rows(config).directory, ensure_tokenizer(config), dataset.directory)


def warm_start(run: OpenRun, inputs: RunInputs) -> StartModel:
    """Make the model of step 0, or find it."""
    inputs.write(run.layout)
    if (known := known_start_model(run.config, inputs)) is not None:
        return known
    result = run.trainer.call("warm_start")
    return StartModel(Path(result["directory"]), bool(result["cached"]), float(result["reward"]), int(result["steps"]))


def known_start_model(config: RunConfig, inputs: RunInputs) -> StartModel | None:
    """The model of step 0, if it is there and whole."""
    manifest = find_start_model(config, inputs.filtered_directory)
    if manifest is None and not is_given(config):
        return None
    values = {} if manifest is None else manifest.values  # somebody else's model has no manifest of ours
    directory = planned_start_model(config, inputs.filtered_directory)
    return StartModel(directory, True, float(values.get("reward", 0.0)), int(values.get("steps", 0)))


def committed_step(config: RunConfig, *, verify: bool = False) -> int:
    """Step of the newest whole checkpoint of the run; 0 without one.

    Raises:
        CheckpointError: all are broken, or it is of other settings, or the run has begun with other code or data.
    """
    found = _store(config).latest(verify=verify)
    require_same_code(config, RunLayout.of(config))
    return 0 if found is None else found.step


def chunk_bounds(config: RunConfig, to_step: int | None = None) -> list[tuple[int, int]]:
    """First and last step of each chunk: multiples of `trainer.steps_per_chunk`, and the end (or `to_step`).

    >>> from rlcore.config import TrainerConfig
    >>> chunk_bounds(RunConfig(trainer=TrainerConfig(total_steps=50, steps_per_chunk=20)))
    [(0, 20), (20, 40), (40, 50)]
    """
    size, total = config.trainer.steps_per_chunk, to_step or config.trainer.total_steps
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def train_chunk(run: OpenRun, inputs: RunInputs, start: int, stop: int, at_most: int | None = None) -> Chunk:
    """Train from the newest checkpoint, at best `start`, to `stop`, unless that is committed.

    The trainer goes on while it saves, to `at_most` (None: the run's end).
    """
    store = _store(run.config)
    found = store.latest(verify=False)
    if found is not None and found.step >= stop:
        return Chunk(start, stop, store.path_of(stop), skipped=True, metrics={})
    inputs.write(run.layout)
    record_lineage(run, inputs)
    result = run.trainer.call("train", to_step=stop, **({} if at_most is None else {"at_most": at_most}))
    return Chunk(start, stop, Path(result["checkpoint"]), skipped=False, metrics=result["metrics"])


def validate(run: OpenRun, inputs: RunInputs, checkpoint: str, name: str) -> Judgement:
    """Judge a checkpoint (`start`, `last`, `best`, or its folder's name), or find its result."""
    step = step_of(run.config, checkpoint)
    if (known := known_judgement(run.config, run.layout, name, step)) is not None:
        return known
    inputs.write(run.layout)
    result = run.trainer.call("validate", checkpoint=checkpoint, name=name)
    return Judgement(name, step, Path(result["file"]), cached=False, summary=result["summary"])


def known_judgement(config: RunConfig, layout: RunLayout, name: str, step: int) -> Judgement | None:
    """What was found of this step with these settings, if it has been judged."""
    known = known_result(config, layout, name, step)
    if known is None:
        return None
    return Judgement(name, step, _result_file(layout, name), cached=True, summary=known.summary())


def known_result(config: RunConfig, layout: RunLayout, name: str, step: int) -> ValidationResult | None:
    """A validation that has been made of this step with these settings."""
    try:
        known = ValidationResult.read(_result_file(layout, name))
    except DataError:
        return None
    return known if known.step == step and known.settings == config.validation else None


def _result_file(layout: RunLayout, name: str) -> Path:
    return layout.validation / f"{name}.json"


def checkpoint_name(checkpoint: str) -> str:
    """A bare step as the name of its folder; other names as they are.

    >>> checkpoint_name("40"), checkpoint_name("best")
    ('step-000040', 'best')
    """
    return checkpoint_path(Path(), int(checkpoint)).name if checkpoint.isdecimal() else checkpoint


def step_of(config: RunConfig, checkpoint: str) -> int:
    """Step of a checkpoint by its name; 0 of `start`.

    Raises:
        CheckpointError: there is none of that name.
    """
    return _store(config).step_of(checkpoint, verify=False)


def export(run: OpenRun, inputs: RunInputs) -> Export:
    """Write the newest checkpoint's weights for others, unless that is done."""
    step = committed_step(run.config)
    if (known := found_export(run.layout.exported_model, step)) is not None:
        return known
    inputs.write(run.layout)
    result = run.trainer.call("export", checkpoint="last")
    return Export(Path(result["directory"]), step, cached=False)


def export_best(run: OpenRun, inputs: RunInputs, last: Export) -> Export:
    """Write the weights of the checkpoint with the highest held-out score, unless they are those of `last`.

    `last` where nobody wants them (`tracking.log_best`).
    """
    best_step = best_step_wanted(run.config, run.layout, last.step)
    if best_step is None:
        return last
    if (known := found_export(run.layout.exported_best, best_step)) is not None:
        return known
    inputs.write(run.layout)
    result = run.trainer.call("export", checkpoint="best")
    return Export(Path(result["directory"]), int(result["step"]), cached=False)


def best_step_wanted(config: RunConfig, layout: RunLayout, last_step: int) -> int | None:
    """Step of the checkpoint with the highest held-out score, if its weights are wanted and not those of the last."""
    if not (config.tracking.enabled and config.tracking.log_best):
        return None
    scored = by_score(scan(layout.checkpoints).checkpoints)
    return scored[-1].step if scored and scored[-1].step != last_step else None


def found_export(directory: Path, step: int) -> Export | None:
    """The weights of a step, if they are there; damaged ones are set aside."""
    return Export(directory, step, cached=True) if is_exported(directory, step) else None


def _root(config: RunConfig) -> Path:
    return Path(config.paths.root).resolve()


def _store(config: RunConfig) -> CheckpointStore:
    layout = RunLayout.of(config)
    return CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)
