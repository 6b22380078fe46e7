"""The contents of a run's folder, read once. Missing files are listed and raise no error."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from rlcore.checkpoint.catalog import STATE, CheckpointInfo, TrainerState, journal_problem, scan
from rlcore.config import RunConfig
from rlcore.config.data import ALL_SOURCES
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import CheckpointError, DataError, MillraceError
from rlcore.evaluation.result import Comparison, ValidationResult, compare
from rlcore.evaluation.stats import Interval
from rlcore.report.plots import Series, without_first_step
from rlcore.tracking.journal import (
    JOURNAL_FILE,
    WORKERS,
    EventRecord,
    JournalContents,
    StepRecord,
    gpu_seconds,
    load_journal,
    missing_steps,
)
from rlcore.tracking.lineage import Origin, read_origin

MAX_CACHED_VALIDATIONS = 32
_CORE = re.compile(r"val-core/(?P<source>.+)/reward/mean_at_(?P<k>\d+)")


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder. `missing`: a sentence about each file or result that is missing or damaged."""

    run_dir: Path
    config: RunConfig
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    validations: Mapping[str, ValidationResult]
    lineage: Origin
    missing: tuple[str, ...]
    suites: Mapping[str, Mapping[str, ValidationResult]] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """Return the id of the run, which is the name of its folder."""
        return self.run_dir.name

    @cached_property
    def training_steps(self) -> tuple[StepRecord, ...]:
        """Return the steps after step 0. Step 0 has only a validation."""
        return tuple(record for record in self.steps if record.step > 0)

    @property
    def last_step(self) -> int:
        """Return the newest training step, or 0 if there is none."""
        return self.training_steps[-1].step if self.training_steps else 0

    @property
    def is_complete(self) -> bool:
        """Return whether the run has reached its last step (`trainer.total_steps`)."""
        return self.last_step >= max(1, self.config.trainer.total_steps)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Return all metrics as a table. Rows are steps, columns are names, and a missing value is NaN."""
        return pd.DataFrame([record.metrics for record in self.steps], [record.step for record in self.steps])

    def series(self, name: str) -> Series | None:
        """Return a metric over the steps, or None if the run has no such metric."""
        return self.metrics[name].dropna() if name in self.metrics else None

    @cached_property
    def tokens(self) -> Series | None:
        """Return the cumulative number of prompt and response tokens at each step."""
        found = self.series("perf/total_num_tokens")
        return None if found is None else found.cumsum()

    @cached_property
    def seconds(self) -> Series | None:
        """Return the cumulative seconds of the training steps, which exclude validations and checkpoints."""
        found = self.series("perf/time_per_step")
        return None if found is None else found.cumsum()

    @cached_property
    def gpu_seconds(self) -> float | None:
        """Return the GPU-seconds of all attempts of the run, or None if the run used no GPU."""
        return gpu_seconds(self.run_dir / JOURNAL_FILE)

    @property
    def reward_gain(self) -> float:
        """Return the rise of the held-out reward from the first to the last validation, or 0 without a validation."""
        found = self.held_out(self.reward_statistic)
        return found[-1][1].value - found[0][1].value if found else 0.0

    @cached_property
    def step_s(self) -> float | None:
        """Return the mean seconds of a training step. The first step, a warm-up, is left out unless it is the only
        step."""
        series = self.series("timing_s/step")
        return None if series is None else float(without_first_step(series).mean())

    @property
    def workers(self) -> Mapping[str, Any]:
        """Return what the journal records about the ranks at their latest start, such as their number, device and model
        size. Return an empty mapping if the journal records no start."""
        return next((event.data for event in reversed(self.events) if event.name == WORKERS), {})

    @cached_property
    def supervised_steps(self) -> tuple[StepRecord, ...]:
        """Return the steps of the supervised stage that trained the initial policy, or () if there was no such
        stage."""
        stages = self.lineage.stages
        root = self.run_dir.resolve().parent.parent  # see rlcore.run.initial_policy.stage_layout
        files = [root / "warm-starts" / f"warm-start-{stage.fingerprint}" / JOURNAL_FILE for stage in stages]
        return next((_read_journal(file, []).steps for file in files if file.is_file()), ())

    @cached_property
    def data_source(self) -> str | None:
        """Return the name of the data set of the held-out problems, or None if no validation is recorded."""
        if self.validations:
            return next(iter(self.validations.values())).data_source
        found = {match["source"] for match in self._core_names}
        return ALL_SOURCES if ALL_SOURCES in found else next(iter(sorted(found)), None)

    @cached_property
    def num_samples(self) -> int:
        """Return the number of sampled responses per problem in the newest validation, or 0 if no responses
        were sampled."""
        if self.validations:
            return max(self.validations.values(), key=lambda result: result.step).num_samples
        return next((int(match["k"]) for match in self._core_names), 0)

    @cached_property
    def _core_names(self) -> list[re.Match[str]]:
        """Return regex matches of the held-out reward metrics in the journal, with the groups `source` and `k`. Names
        from the newest steps come first."""
        is_of_suite = self.config.validation.is_of_suite
        names = dict.fromkeys(name for record in reversed(self.steps) for name in record.metrics)
        return [found for name in names if not is_of_suite(name) and (found := _CORE.fullmatch(name))]

    @cached_property
    def before(self) -> ValidationResult | None:
        """Return the validation named `before`, or the validation of step 0 if none has this name."""
        return self.validations.get("before") or self.validations.get("step-000000")

    @cached_property
    def after(self) -> ValidationResult | None:
        """Return the newest validation after training. If two have the same step, the one named `after` is returned."""
        named = self.validations.get("after")
        later = [result for result in self.validations.values() if result.step > 0 and result is not self.before]
        newest = max(later, key=lambda result: result.step, default=named)
        return newest if named is None or newest is None or newest.step > named.step else named

    @property
    def before_and_after(self) -> dict[str, ValidationResult]:
        """Return the available validations before and after training, by the labels `before` and `after`."""
        both = {"before": self.before, "after": self.after}
        return {label: result for label, result in both.items() if result is not None}

    @cached_property
    def paired(self) -> tuple[Comparison, ...]:
        """Return the paired comparison of the validations before and after training, or () if they cannot be paired."""
        try:
            return compare(*self.before_and_after.values()) if len(self.before_and_after) == 2 else ()
        except DataError:
            return ()

    def held_out(self, statistic: str) -> tuple[tuple[int, Interval], ...]:
        """Return a statistic such as `reward/mean_at_4` with its interval at each validated step. The values come from
        the journal and the validation files."""
        name = f"val-core/{self.data_source}/{statistic}"
        found = {
            result.step: result.intervals[statistic]
            for result in self.validations.values()
            # later files were left by an abandoned part of the run
            if statistic in result.intervals and (result.step <= self.last_step or not self.training_steps)
        } | {
            record.step: Interval(*(record.metrics.get(name + end, value) for end in ("", "/ci_low", "/ci_high")))
            for record in self.steps
            if (value := record.metrics.get(name)) is not None
        }
        return tuple(sorted(found.items()))

    @property
    def reward_statistic(self) -> str:
        """Return the name of the statistic that the report uses as held-out reward, such as `reward/mean_at_4`."""
        return self.core_statistics[0]

    @property
    def core_statistics(self) -> tuple[str, ...]:
        """Return the names of the main held-out statistics, such as `reward/mean_at_4` and `reward/greedy`. The report
        uses the first one as the held-out reward."""
        k = self.num_samples
        return (*(f"reward/{name}_at_{k}" for name in ("mean", "pass", "maj") if k), "reward/greedy")


Runs = Mapping[str, RunRecord]
"""Runs by id, or by folder if two runs have the same id."""


def read_run(run_dir: Path) -> RunRecord:
    """Read a run's folder. Raises DataError if the folder does not contain the settings of a run."""
    missing: list[str] = []
    if (origin := read_origin(run_dir)) is None:
        raise DataError(
            f"{run_dir / RUN_FILE}: cannot be read (it is not there); name the folder of a run, as artifacts/runs/<id>"
        )
    checkpoints: tuple[CheckpointInfo, ...] = ()
    try:  # checkpoints first, since journal lines precede their checkpoint
        catalog = scan(run_dir / "checkpoints")
        checkpoints, missing = catalog.checkpoints, [refusal.reason for refusal in catalog.refusals]
    except CheckpointError as error:
        missing.append(str(error))
    journal = _read_journal(run_dir / JOURNAL_FILE, missing)
    suites = [suite.name for suite in origin.settings.validation.suites]
    missing += _journal_gaps(run_dir / JOURNAL_FILE, journal, checkpoints)
    record = RunRecord(
        run_dir,
        origin.settings,
        tuple(sorted(journal.steps, key=lambda record: record.step)),
        journal.events,
        _read_validations(run_dir / "validation", missing),
        origin,
        (),
        {name: _read_validations(run_dir / "suites" / name, missing) for name in suites},
    )
    return replace(record, missing=(*missing, *_missing_parts(record)))


def _read_journal(file: Path, missing: list[str]) -> JournalContents:
    try:
        contents = load_journal(file)
    except OSError as error:
        why = "does not exist: no step has been trained yet" if not file.exists() else f"cannot be read ({error})"
        missing.append(f"{file.name} {why}, so there are no curves.")
        return JournalContents((), (), 0, 0)
    if contents.num_damaged_lines:
        missing.append(f"{file.name} has {contents.num_damaged_lines} unreadable lines; their steps are omitted.")
    return contents


def _journal_gaps(file: Path, journal: JournalContents, checkpoints: Sequence[CheckpointInfo]) -> Iterable[str]:
    """Yield a sentence about trained steps that have no line in the journal `file`. Then yield a sentence about each
    mismatch between the journal and a checkpoint."""
    refused = {
        str(event.data.get("path")): datetime.fromtimestamp(event.time, UTC).isoformat("T", "microseconds")
        for event in journal.events
        if event.name == "checkpoint_refused"
    }
    known = [info for info in checkpoints if info.created >= refused.get(str(info.path), "")]  # not abandoned
    last = max([record.step for record in journal.steps] + [info.step for info in known], default=0)
    if gap := missing_steps(journal, last):
        yield f"{file.name} has no line for {gap}: the metrics of these trained steps are lost."
    yield from (str(event.data["text"]) for event in journal.events if event.name == "journal_mismatch")
    if known:
        try:
            problem = journal_problem(TrainerState.read(known[-1].path / STATE), file)
        except CheckpointError as error:
            problem = str(error)
        if problem:
            yield f"{problem}. Its metrics may differ from the measured ones."


def _read_validations(folder: Path, missing: list[str]) -> dict[str, ValidationResult]:
    found: dict[str, ValidationResult] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            known = file.stat()
            found[file.stem] = _read_validation(file, known.st_mtime_ns, known.st_size)
        except (MillraceError, OSError) as error:
            missing.append(f"validation/{file.name} is omitted: {error}")
    return {name: result for name, result in found.items() if result.problems}


@lru_cache(maxsize=MAX_CACHED_VALIDATIONS)
def _read_validation(file: Path, changed_ns: int, size: int) -> ValidationResult:
    result = ValidationResult.read(file)
    result.metrics()  # computes the intervals, in 0.1 s
    return result


def _missing_parts(record: RunRecord) -> Iterable[str]:
    """Yield a sentence for each part of a complete run that this run lacks."""
    total = record.config.total_steps
    if not record.validations and record.data_source is None:
        yield "No validation on held-out problems yet, so the performance on new problems is unknown."
    elif record.before is None or record.after is None:
        which = "after training" if record.before is not None else "before training"
        yield f"No validation {which} with responses: no paired comparison, and no sample responses."
    for result in record.validations.values():
        if number := len(result.failures):
            yield f"Validation {result.name}: {number} responses have no score, since the scorer or environment failed."
    if not record.is_complete:
        yield f"The run has {record.last_step} of {total} steps so far; held-out metrics are of its last validation."
    if not record.lineage.stages:
        yield "run.json has no stages: the origin of data, model and code is not recorded."
