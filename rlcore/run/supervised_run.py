"""A run that ends after its supervised stage: the models before and after the stage, the journal and the export."""

import shutil
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from rlcore.checkpoint.catalog import is_exported
from rlcore.errors import CheckpointError, DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.initial_policy import InitialPolicy, known_initial_policy, stage_layout
from rlcore.run.inputs import RunInputs
from rlcore.run.record import RunRecord
from rlcore.run.supervised import Demonstrations, WarmStart
from rlcore.storage.documents import open_ordinary
from rlcore.storage.line_file import iter_json
from rlcore.storage.manifest import MANIFEST
from rlcore.storage.publish import published_directory
from rlcore.tracking.journal import load_journal


class SupervisedRun:
    """The models and the export of a run without reinforcement learning. Runs can share one supervised stage."""

    def __init__(self, record: RunRecord, inputs: RunInputs, warm_start: WarmStart) -> None:
        self._record, self._inputs, self._warm_start = record, inputs, warm_start
        self._config, self._layout = record.config, record.layout

    def base(self) -> InitialPolicy:
        """Return the model before the stage. Create it if needed. Raises DataError if there are no demonstrations."""
        Demonstrations.read(self._config, self._inputs)
        return self._warm_start.base()

    def result(self) -> InitialPolicy:
        """Return the model after the stage. Raises DataError if the stage is not done."""
        if (known := known_initial_policy(self._config, self._inputs)) is None:
            raise DataError(f"{self._layout.run_dir}: the supervised stage is not done; start the run again")
        return known

    def export(self) -> Mapping[str, object]:
        """Copy the journal of the stage into the run's journal, and the model after the stage into the run's folder."""
        model, target = self.result(), self._layout.exported_model
        if not is_exported(target, model.steps):
            self._write_journal(model.steps)
            facts: dict[str, JsonValue] = {"kind": "model", "step": model.steps, **model.figures}
            earlier = (target / MANIFEST).is_file()
            with (
                self._record.guard.phase("export"),
                published_directory(target, facts, replace=earlier, error=CheckpointError) as folder,
            ):
                for file in (path for path in model.directory.rglob("*") if path.is_file() and path.name != MANIFEST):
                    copy = folder / file.relative_to(model.directory)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)  # `copytree` would hide a full disk
        return {"directory": str(target), "step": model.steps}

    def _write_journal(self, last_step: int) -> None:
        record, stage = self._record, stage_layout(self._config, self._inputs.filtered_directory)
        if self._layout.journal.is_file() and load_journal(self._layout.journal).steps:  # of a killed process
            record.journal.resume_at(0, 0)
        if stage.journal.is_file():
            with open_ordinary(stage.journal) as file:
                for line, _ in iter_json(file.fileno(), 0):
                    if isinstance(line, dict):
                        record.journal.append(line)
        record.journal.append_step(0, dict(self._metrics("before")))  # merged with the line of the stage
        record.journal.append_step(last_step, dict(self._metrics("after")))

    def _metrics(self, name: str) -> Iterator[tuple[str, float]]:
        folders = [self._layout.validation, *self._layout.suites.glob("*")]
        for file in (folder / f"{name}.json" for folder in folders):
            if file.is_file():
                yield from ValidationResult.read(file).metrics().items()
