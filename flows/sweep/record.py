"""What is known of a sweep's points and runs, read from the runs' own folders, and kept as `sweep.json`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import JsonValue

from flows.parameters import RunSettings
from flows.stack.state import in_stack
from flows.work.checkpoints import committed_step
from flows.work.origin import require_same
from rlcore.checkpoint.catalog import name_of
from rlcore.config import RunConfig
from rlcore.config.compose import judge_settings
from rlcore.config.fingerprint import run_id
from rlcore.config.problems import Problem
from rlcore.config.sweep import Point, shown_point
from rlcore.config.sweep_load import Sweep
from rlcore.errors import DataError, MillraceError
from rlcore.evaluation.result import ValidationResult, per_problem
from rlcore.run.layout import RunLayout
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.journal import read_journal

FORMAT_VERSION = 1
SWEEP_FILE = "sweep.json"
RunState = Literal["to do", "done", "failed", "not begun"]
PointState = Literal["to do", "finished", "stopped early", "failed", "not begun"]


@dataclass(slots=True)
class Member:
    """One run of a point: its seed. `step`: how far it has come; `score`: at its point's last comparison."""

    seed: int
    settings: RunSettings
    step: int = 0
    score: float | None = None
    state: RunState = "to do"
    error: str = ""

    @property
    def config(self) -> RunConfig:
        """The run's settings, typed."""
        return self.settings.config

    @property
    def run_id(self) -> str:
        """Id of the run: the name of its folder."""
        return run_id(self.config)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return RunLayout.of(self.config).run_dir

    def look(self, metric: str, step: int) -> bool:
        """Read from its folder whether it has come to a step, and with which score."""
        self.step = committed(self.config)
        self.score = score_at(self.config, metric, step) if self.step >= step else None
        return self.score is not None


@dataclass(slots=True)
class PointRecord:
    """One point: its settings, its runs, and its score (mean over seeds) at each comparison."""

    number: int
    settings: Point
    members: list[Member]
    state: PointState = "to do"
    scores: dict[int, float] = field(default_factory=dict)
    error: str = ""

    @property
    def label(self) -> str:
        """The point's settings in one line."""
        return shown_point(self.settings)

    @property
    def score(self) -> float | None:
        """At the last comparison that it was in."""
        return self.scores[max(self.scores)] if self.scores else None

    def problem_scores(self, metric: str, step: int) -> dict[int, float]:
        """The mean over seeds of a held-out figure of each problem that all of them have answered, by its id."""
        found = [problem_scores_of(member.config, metric, step) for member in self.members]
        shared = set.intersection(*(set(one) for one in found))
        return {problem: fmean(one[problem] for one in found) for problem in shared}

    def to_json(self) -> dict[str, JsonValue]:
        """The record as it stands in `sweep.json`."""
        runs: list[JsonValue] = [
            {"seed": one.seed, "run_id": one.run_id, "run_dir": str(one.run_dir), "state": one.state, "step": one.step,
             "score": one.score, "error": one.error}
            for one in self.members
        ]  # fmt: skip
        scores: dict[str, JsonValue] = {str(step): score for step, score in self.scores.items()}
        return {"point": self.number, "settings": dict(self.settings), "state": self.state, "score": self.score,
                "scores": scores, "error": self.error, "runs": runs}  # fmt: skip


def members_of(sweep: Sweep, point: Point) -> tuple[list[Member], Sequence[Problem]]:
    """The runs of a point, one a seed, and what is wrong in its settings."""
    overrides = [sweep.overrides_of(point, seed) for seed in sweep.spec.seeds]
    judged = judge_settings(overrides, experiment=sweep.spec.experiment)
    members = [
        Member(seed, RunSettings(in_stack(config), tuple(texts), sweep.spec.experiment))
        for seed, texts, (config, _) in zip(sweep.spec.seeds, overrides, judged, strict=True)
    ]
    return members, judged[0][1]


def committed(config: RunConfig) -> int:
    """How far a run has come; 0 where its checkpoints cannot be read: the run itself says why when it is begun."""
    try:
        require_same(config, RunLayout.of(config))
        return committed_step(config)
    except (MillraceError, OSError):
        return 0


def score_at(config: RunConfig, metric: str, step: int) -> float | None:
    """A held-out figure of a run at a step, from its journal."""
    try:
        records = read_journal(RunLayout.of(config).journal)
    except (MillraceError, OSError):
        return None
    found = {
        name: value
        for record in records
        if record.step == step
        for name, value in record.metrics.items()
        if name.startswith("val-core/") and name.endswith(f"/{metric}") and not config.validation.is_of_suite(name)
    }
    over_all = f"val-core/all/{metric}"  # there where held-out problems come from several sources
    value = found[over_all] if over_all in found else next(iter(found.values()), None)
    return None if value is None else float(value)


def problem_scores_of(config: RunConfig, metric: str, step: int) -> dict[int, float]:
    """The same figure of each held-out problem that has a score, by its id; empty where the answers are not kept."""
    try:
        result = ValidationResult.read(RunLayout.of(config).validation / f"{name_of(step)}.json").with_figures
    except DataError:
        return {}
    ids = [problem.prompt_id for problem in result.problems]
    return dict(zip(ids, map(float, per_problem(result.problems)[metric]), strict=True))


def sweep_directory(sweep: Sweep) -> Path:
    """The sweep's folder."""
    return Path(sweep.base.paths.root).resolve() / "sweeps" / sweep.sweep_id


def best_of(points: Iterable[PointRecord], direction: str) -> PointRecord | None:
    """The finished point with the best score; of equal ones the first."""
    finished = [point for point in points if point.state == "finished" and point.score is not None]
    sign = 1.0 if direction == "maximize" else -1.0
    return max(finished, key=lambda point: (sign * (point.score or 0.0), -point.number), default=None)


def write_record(folder: Path, sweep: Sweep, points: Sequence[PointRecord], more: Mapping[str, JsonValue]) -> None:
    """Replace `sweep.json`, whole or not at all."""
    best = best_of(points, sweep.spec.objective.direction)
    spec = json.loads(sweep.spec.model_dump_json(exclude_none=True))
    document: dict[str, JsonValue] = {
        "format_version": FORMAT_VERSION,
        "sweep_id": sweep.sweep_id,
        "metric": sweep.metric_of(sweep.base),
        "direction": sweep.spec.objective.direction,
        "rungs": list(sweep.rungs),
        "best": None if best is None else best.number,
        **more,
        "points": [point.to_json() for point in points],
        "spec": spec,
        "overrides": list(sweep.overrides),
    }
    write_json_atomically(folder / SWEEP_FILE, document)
