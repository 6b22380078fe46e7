"""How a run's model does on held-out problems: judged once a step, kept as files, told."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rlcore.checkpoint.catalog import name_of
from rlcore.config import RunConfig
from rlcore.evaluation.result import ValidationResult
from rlcore.run.crew import Crew
from rlcore.run.layout import RunLayout
from rlcore.run.ledger import Ledger
from rlcore.run.news import News


class HeldOut:
    """The validations of one run."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        crew: Crew,
        ledger: Ledger,
        news: News,
        *,
        report: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._config = config
        self._layout = layout
        self._crew = crew
        self._ledger = ledger
        self._news = news
        self._report = report

    def judge(self, name: str, step: int) -> ValidationResult:
        """Judge what the workers hold, and keep the result under this name."""
        result = self._crew.validate(name, step)
        self._report({"event": "validated", "name": name, "step": step, "summary": dict(result.summary())})
        self._news.unscored(step, *self._crew.unscored)
        self._keep(result)
        return result

    def judge_checkpoint(self, checkpoint: str, name: str) -> ValidationResult:
        """The same for a checkpoint, on all held-out problems; what training found out is not found out again."""
        step = self._ledger.step_of(checkpoint)
        known = self._known(step)
        if known is None:
            self._crew.load(checkpoint)
            return self.judge(name, step)
        result = known.renamed(name)
        self._keep(result)
        return result

    def file_of(self, name: str) -> Path:
        """Where a result of this name is kept."""
        return self._layout.validation / f"{name}.json"

    def _keep(self, result: ValidationResult) -> None:
        file = self.file_of(result.name)
        self._ledger.with_room(lambda: result.write(file), step=result.step, path=file)

    def _known(self, step: int) -> ValidationResult | None:
        """The result of this step's validation in training, where that one saw all held-out problems."""
        file = self.file_of(name_of(step))
        if self._config.validation.max_problems or not file.is_file():
            return None
        result = ValidationResult.read(file)
        return result if result.settings == self._config.validation else None
