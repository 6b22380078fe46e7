"""What the stages of a run have left on disk, and whether it is done: by files alone, without Prefect and MLflow."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data import StageResult
from flows.progress import HEADLINE
from rlcore.checkpoint.catalog import by_score, is_exported, name_of, scan
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import JudgingConfig, RunConfig
from rlcore.config.fingerprint import fingerprint, settings_fingerprint
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.inputs import RunInputs, suite_fingerprint
from rlcore.run.layout import RunLayout
from rlcore.run.pass_rates import find_pass_rates
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.connection import resolve_uri
from rlcore.user_code import code_of

if TYPE_CHECKING:
    from flows.plan.plan import RunPlan

SOURCE_FILE = "source.json"
"""Beside the report: the fingerprint of what it was written from."""
SOURCE_SUFFIXES = frozenset({".py", ".jinja", ".j2", ".css", ".html"})
REPORT_SOURCE = Path(__file__).resolve().parents[2] / "rlcore" / "report"
RECORDED_FILE = "recorded.json"


def _skipped(cached: bool) -> str:
    return ", skipped: done before" if cached else ""


def describe_rows(result: StageResult) -> str:
    """Rows of a dataset by split, whether they were there already, and what should be known of them."""
    counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
    return f"{counts} rows{_skipped(result.cached)} ({result.directory})\n{result.warning}".rstrip()


def few_rows(config: RunConfig, rows: int | None, where: str) -> str:
    """What to tell where training rows are fewer than a batch; '' where they are not, or not known."""
    if rows is None or rows >= config.trainer.batch_size:
        return ""
    return (
        f"warning: trainer.batch_size={config.trainer.batch_size:,} is more than the {rows:,} training rows {where}, "
        "so a prompt stands in a batch more than once. Lower it and trainer.mini_batch_size, or give more rows"
    )


@dataclass(frozen=True, slots=True)
class PassRateTable:
    """The table of pass rates, and how many of the training rows it leaves. `spread`: the pass rates, in words."""

    directory: Path
    rows: int
    kept: int
    spread: str
    cached: bool

    def __str__(self) -> str:
        return f"kept {self.kept:,} of {self.rows:,} rows; {self.spread}{_skipped(self.cached)} ({self.directory})"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Training from the checkpoint at `start` to the one at `stop`; `skipped`: it was committed already."""

    start: int
    stop: int
    checkpoint: Path
    skipped: bool
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        reward = self.metrics.get("critic/score/mean")
        score = "" if reward is None else f", reward {reward:.3f}"
        return f"step {self.start}-{self.stop}{score}{_skipped(self.skipped)}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One validation: its figures, and the file that holds every answer."""

    name: str
    step: int
    file: Path
    cached: bool
    summary: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.figures()}{_skipped(self.cached)}"

    def figures(self) -> str:
        """The validation's main figures with their intervals."""
        shown = [name for name in self.summary if HEADLINE.search(name) and f"{name}/ci_low" in self.summary]
        several = len({_source_of(name) for name in shown}) > 1
        labels = {name: f"{_source_of(name)} " if several else "" for name in shown}
        parts = (f"{labels[name]}{name.rpartition('/')[2]} {with_interval(self.summary, name)}" for name in shown)
        return f"{self.name} (step {self.step}): {', '.join(parts)}"


CI_ENDS = ("/ci_low", "/ci_high")


def with_interval(summary: Mapping[str, float], figure: str) -> str:
    """A figure of a validation with its confidence interval, if it has one; '' where the validation has no such figure.

    >>> with_interval({"a": 0.5, "a/ci_low": 0.41, "a/ci_high": 0.59}, "a")
    '0.500 [0.410, 0.590]'
    """
    if figure not in summary:
        return ""
    low, high = (summary.get(f"{figure}{end}") for end in CI_ENDS)
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[figure]:.3f}{interval}"


def _source_of(name: str) -> str:
    """The data source in a held-out metric's name.

    >>> _source_of("val-core/openai/gsm8k/reward/mean@4")
    'openai/gsm8k'
    """
    return name.partition("/")[2].rpartition("/reward/")[0]


@dataclass(frozen=True, slots=True)
class Export:
    """The trained weights as a transformers directory."""

    directory: Path
    step: int
    cached: bool

    def __str__(self) -> str:
        return f"step {self.step}{_skipped(self.cached)} ({self.directory})"


@dataclass(frozen=True, slots=True)
class Report:
    """The report's page, and whether it was current already."""

    html: Path
    cached: bool

    def __str__(self) -> str:
        return f"{self.html}{', skipped: it is current' if self.cached else ''}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What MLflow has of a run: by which settings, which report, whose weights and under which registered name."""

    mlflow_run_id: str = ""
    url: str = ""
    ui_command: str = ""
    settings: str = ""
    report: str = ""
    models: str = ""

    @classmethod
    def read(cls, layout: RunLayout) -> "Recorded":
        """What is on disk; nothing where that is nothing."""
        try:
            return cls(**parse_json(read_ordinary(layout.run_dir / RECORDED_FILE)))
        except (OSError, ValueError, TypeError):
            return cls()

    def is_whole(self, config: RunConfig, layout: RunLayout, last: Export, best: Export) -> bool:
        """Whether MLflow has all of the run."""
        wanted = (settings_digest(config), report_fingerprint(layout), models_digest(config, last, best))
        return (self.settings, self.report, self.models) == wanted

    def write(self, layout: RunLayout) -> "Recorded":
        """Write the result into the run's folder."""
        write_json_atomically(layout.run_dir / RECORDED_FILE, asdict(self))
        return self


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a run has come to, and where to look. `report` None: none was asked for."""

    run_id: str
    run_dir: Path
    judgements: list[Judgement]
    report: Path | None
    weights: Path
    mlflow: Recorded


def known_pass_rates(config: RunConfig, inputs: RunInputs) -> PassRateTable | None:
    """The run's table of pass rates, if it is there.

    Raises:
        DataError: it keeps too few rows, or a given one is damaged or lacks rows.
    """
    found = find_pass_rates(config, inputs)
    if found is None:
        return None
    found.require_enough(config.trainer.batch_size)
    kept = sum(int(part.sum()) for part in found.kept)
    return PassRateTable(found.directory, sum(found.part_sizes), kept, f"pass rates {found.spread()}", cached=True)


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Where the run's checkpoints are kept."""
    layout = RunLayout.of(config)
    return CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)


def committed_step(config: RunConfig) -> int:
    """Step of the newest whole checkpoint of the run; 0 without one.

    Raises:
        CheckpointError: all are broken, or it is of other settings.
    """
    found = checkpoint_store(config).latest(verify=False)
    return 0 if found is None else found.step


def checkpoint_name(checkpoint: str) -> str:
    """A bare step as the name of its folder; other names as they are.

    >>> checkpoint_name("40"), checkpoint_name("best")
    ('step-000040', 'best')
    """
    return name_of(int(checkpoint)) if checkpoint.isdecimal() else checkpoint


def known_judgement(config: RunConfig, layout: RunLayout, name: str, step: int) -> Judgement | None:
    """A validation of this step that was made with these settings."""
    file = layout.validation / f"{name}.json"
    if (known := _known_result(file, step, config.validation)) is None:
        return None
    summary = dict(known.summary())
    if config.validation.suites:
        try:
            suites = known_suites(config, layout, RunInputs.read(layout), name, step)
        except DataError:
            return None
        if suites is None:
            return None
        for one in suites:
            summary |= one.summary()
    return Judgement(name, step, file, cached=True, summary=summary)


def known_suites(
    config: RunConfig, layout: RunLayout, inputs: RunInputs, name: str, step: int
) -> list[ValidationResult] | None:
    """The results of all suites of this name, where each was made of this step with these settings."""
    found = []
    for suite in config.validation.suites:
        if suite.name not in inputs.suites:
            return None
        known = _known_result(layout.suites / suite.name / f"{name}.json", step, suite)
        if known is None or known.suite != suite_fingerprint(config, suite, inputs.suites[suite.name]):
            return None
        found.append(known)
    return found


def _known_result(file: Path, step: int, settings: JudgingConfig) -> ValidationResult | None:
    try:
        known = ValidationResult.read(file)
    except DataError:
        return None
    return known if known.step == step and known.settings.judges_as(settings) else None


def found_export(directory: Path, step: int) -> Export | None:
    """The weights of a step, if they are there; damaged ones are set aside."""
    return Export(directory, step, cached=True) if is_exported(directory, step) else None


def best_step_wanted(config: RunConfig, layout: RunLayout, last_step: int) -> int | None:
    """Step of the checkpoint with the highest held-out score, if its weights are wanted and not those of the last."""
    if not (config.tracking.enabled and config.tracking.log_best):
        return None
    scored = by_score(scan(layout.checkpoints).checkpoints)
    return scored[-1].step if scored and scored[-1].step != last_step else None


def report_fingerprint(layout: RunLayout, failure: str = "") -> str:
    """What a report depends on: the run's journal, settings and validations, how it failed, and the report's own
    source."""
    files = [layout.journal, layout.settings_json, *sorted(layout.validation.glob("*.json"))]
    files += sorted(layout.suites.glob("*/*.json"))
    files += [layout.run_dir / name for name in ("lineage.json", "memory_plan.json")]
    ours = {path.name: sha256_of(path) for path in sorted(REPORT_SOURCE.rglob("*")) if path.suffix in SOURCE_SUFFIXES}
    read = {str(path.relative_to(layout.run_dir)): sha256_of(path) for path in files if path.is_file()}
    return fingerprint("report", {"read": read, "source": ours} | ({"failure": failure} if failure else {}))


def known_report(layout: RunLayout, failure: str = "") -> Report | None:
    """The report on disk, if it says what the run's files say."""
    try:
        known = parse_json(read_ordinary(layout.run_dir / "report" / SOURCE_FILE))
        found = Report(layout.run_dir / "report" / Path(known["html"]).name, cached=True)  # it may be a copy
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_current = found.html.is_file() and known.get("fingerprint") == report_fingerprint(layout, failure)
    return found if is_current else None


def settings_digest(config: RunConfig) -> str:
    """What the first part of the run's page in MLflow depends on, and where that page is."""
    uri = resolve_uri(config.tracking, Path(config.paths.root).absolute())
    place = fingerprint("page", [uri, config.tracking.experiment])[:8]
    return f"{settings_fingerprint(config)}-{config.trainer.total_steps}-{code_of(config).fingerprint}-{place}"


def models_digest(config: RunConfig, last: Export, best: Export) -> str:
    """What the weights in MLflow depend on."""
    return f"last {last.step}, best {best.step}, registered {config.tracking.registered_model}"


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


def finished(config: RunConfig, plan: "RunPlan") -> PipelineResult | None:
    """The result of a run in which no stage has anything to do or to write; None where one has, or may have.

    Args:
        config: with the stack's store.
        plan: of this moment.
    """
    layout = RunLayout.of(config)
    if not plan.is_done or _text(layout.settings_json) != settings_text(config, layout):
        return None
    last = found_export(layout.exported_model, plan.committed_step)
    best_step = best_step_wanted(config, layout, plan.committed_step)
    best = last if best_step is None else found_export(layout.exported_best, best_step)
    report, recorded = known_report(layout), Recorded.read(layout)
    ends = {"before": 0, "after": plan.committed_step}
    judged = [known_judgement(config, layout, name, step) for name, step in ends.items()]
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
