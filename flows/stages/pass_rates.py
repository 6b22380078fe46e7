"""The stage that measures the pass rates of the training rows under the initial policy."""

from dataclasses import dataclass, replace
from pathlib import Path

from flows.progress import skipped_suffix
from flows.stages.inputs import call_trainer, has_tokenizer, inputs_of, planned_rows
from flows.stages.stage import Stage, StageStatus, remake_note
from flows.work.open_run import OpenRun
from rlcore.config import RunConfig
from rlcore.run.inputs import RunInputs, planned_tokenizer
from rlcore.run.pass_rates import find_pass_rates, planned_pass_rates
from rlcore.storage.manifest import read_finished_or_reason


@dataclass(frozen=True, slots=True)
class PassRateTable:
    """A table of pass rates, with the number of training rows (`rows`) and the number of rows to train on (`kept`)."""

    directory: Path
    rows: int
    kept: int
    spread: str
    cached: bool

    def __str__(self) -> str:
        return (
            f"kept {self.kept:,} of {self.rows:,} rows; {self.spread}{skipped_suffix(self.cached)} ({self.directory})"
        )


@dataclass(frozen=True)
class PassRates(Stage[PassRateTable]):
    """The stage that measures how often the initial policy solves each training row, unless the result exists."""

    name = "pass-rates"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        source = f"{run.config.pass_rates.samples} responses to each training row"
        rows = planned_rows(run.planning_config) if has_tokenizer(run.planning_config) else None
        if rows is None or read_finished_or_reason(rows)[0] is None:
            return StageStatus(self.name, None, None, False, f"{source}, after the filter")
        place = planned_pass_rates(run.config, rows)
        _, damage = read_finished_or_reason(place)
        known = None if damage else read_pass_rates(run.config, RunInputs(rows, planned_tokenizer(run.config)))
        detail = source if known is None else f"kept {known.kept:,} of {known.rows:,} rows"
        return StageStatus(self.name, place.name, place, known is not None, remake_note(damage) or detail)

    def find(self, run: OpenRun) -> PassRateTable | None:
        return read_pass_rates(run.config, inputs_of(run))

    def make(self, run: OpenRun) -> PassRateTable:
        call_trainer(run, "measure_pass_rates")
        made = self.find(run)
        assert made is not None
        return replace(made, cached=False)

    def describe(self, result: PassRateTable) -> str:
        return f"pass rates: {result}"


def read_pass_rates(config: RunConfig, inputs: RunInputs) -> PassRateTable | None:
    """Return the run's table of pass rates, or None if it does not exist. Raises DataError if too few rows are kept."""
    found = find_pass_rates(config, inputs)
    if found is None:
        return None
    found.require_enough(config.trainer.batch_size)
    kept = sum(int(part.sum()) for part in found.selected)
    return PassRateTable(found.directory, sum(found.part_sizes), kept, f"pass rates {found.spread()}", cached=True)
