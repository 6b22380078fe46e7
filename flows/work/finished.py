"""What a run has come to, and whether all of it is there already: known from files alone, without Prefect."""

from dataclasses import dataclass
from pathlib import Path

from flows.plan.plan import RunPlan
from flows.work import stages
from flows.work.mlflow_record import Recorded
from flows.work.open_run import settings_text
from flows.work.report import known_report
from flows.work.stages import Judgement
from rlcore.config import RunConfig
from rlcore.run.layout import RunLayout


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a run has come to, and where to look."""

    run_id: str
    run_dir: Path
    judgements: list[Judgement]
    report: Path
    weights: Path
    mlflow: Recorded


def finished(config: RunConfig, plan: RunPlan) -> PipelineResult | None:
    """The result of a run in which no stage has anything to do or to write; None where one has, or may have.

    Args:
        config: as the flow would take it, with the stack's store.
        plan: of this moment.
    """
    layout = RunLayout.of(config)
    if not plan.is_done or _text(layout.settings_json) != settings_text(config, layout):
        return None
    last = stages.found_export(layout.exported_model, plan.committed_step)
    best_step = stages.best_step_wanted(config, layout, plan.committed_step)
    best = last if best_step is None else stages.found_export(layout.exported_best, best_step)
    report, recorded = known_report(layout), Recorded.read(layout)
    ends = {"before": 0, "after": plan.committed_step}
    judged = [stages.known_judgement(config, layout, name, step) for name, step in ends.items()]
    judgements = [one for one in judged if one is not None]
    if last is None or best is None or report is None or len(judgements) < len(judged):
        return None
    if config.tracking.enabled and not recorded.is_whole(config, layout, last, best):
        return None
    return PipelineResult(plan.run_id, layout.run_dir, judgements, report.html, last.directory, recorded)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
