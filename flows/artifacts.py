"""What the Prefect UI shows of a run while it goes on, and after. None of it may stop the run."""

import base64
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from flows.server.watch import few_retries
from flows.work.open_run import OpenRun
from flows.work.results import Judgement
from flows.work.runs import Comparison
from rlcore.checkpoint.catalog import scan
from rlcore.tracking.journal import read_journal

BYTES_PER_MB = 1e6
NUM_VALIDATIONS = 4
"""Columns of the table of a run's latest validations; the first one is of step 0."""
REWARD = "critic/score/mean"
LEFT_ALONE_S = 30.0
"""A server that was away."""


def artifact_key(of: str, what: str) -> str:
    """The key of an artifact of a run, a sweep or a comparison, by its id: Prefect shows the history of each key.

    Its letters are lower-case letters, digits and dashes.

    >>> artifact_key("countdown_demo-s1-1bb2114f", "report")
    'countdown-demo-s1-1bb2114f-report'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{of}-{what}".lower()).strip("-")


def show_progress(run: OpenRun, stage: str, percent: float, text: str) -> None:
    """A bar for each stage, one for all its chunks."""
    in_passing(run, lambda: _show_progress(run, stage, percent, text))


def _show_progress(run: OpenRun, stage: str, percent: float, text: str) -> None:
    known = run.shown.progress.get(stage)
    if known is not None:
        update_progress_artifact(known, progress=percent, description=text)
        return
    key = artifact_key(run.run_id, f"progress-{stage}")
    made = create_progress_artifact(percent, key=key, description=text)
    assert isinstance(made, UUID)
    run.shown.progress[stage] = made


def show_latest_validation(run: OpenRun, step: int, summary: Mapping[str, float]) -> None:
    """A table of the validations in training: the first one that this process saw, and the last few."""
    known = run.shown.validations
    known[step] = summary
    shown = sorted(known)[:1] + sorted(known)[1:][-(NUM_VALIDATIONS - 1) :]
    rows = [
        {"figure": figure} | {f"step {step}": _with_interval(known[step], figure) for step in shown}
        for figure in sorted(summary)
        if not figure.endswith(CI_ENDS)
    ]
    key = artifact_key(run.run_id, "latest-validation")
    in_passing(run, lambda: create_table_artifact(rows, key=key, description=f"{run.run_id} at step {step}"))


def show_summary(run: OpenRun, now: str) -> None:
    """Where the run stands, with a curve of its reward."""
    key = artifact_key(run.run_id, "summary")
    in_passing(run, lambda: create_markdown_artifact(_summary(run, now), key=key))


def _summary(run: OpenRun, now: str) -> str:
    records = read_journal(run.layout.journal)
    training = [(record.step, record.metrics[REWARD]) for record in records if REWARD in record.metrics]
    held_out = [
        (record.step, value)
        for record in records
        for name, value in record.metrics.items()
        if name.startswith("val-core/")
        and name.endswith(f"/reward/mean@{run.config.validation.samples_per_problem}")
        and not run.config.validation.is_of_suite(name)
    ]
    page = f"[{run.run_id} in MLflow]({run.shown.mlflow_page})" if run.shown.mlflow_page else ""
    curve = curve_markdown([("reward in training", training), ("reward on held-out problems", held_out)])
    return "\n\n".join(part for part in (f"## {run.run_id}", now, curve, page) if part)


def show_validation(run: OpenRun, judgement: Judgement) -> None:
    """A table of the run's validations: a row for each figure, a column for each validation."""
    run.shown.judgements[judgement.name] = judgement
    known = run.shown.judgements.values()
    figures = sorted({figure for one in known for figure in one.summary if not figure.endswith(CI_ENDS)})
    rows = [{"figure": figure} | {one.name: _with_interval(one.summary, figure) for one in known} for figure in figures]
    steps = ", ".join(f"{one.name}: step {one.step}" for one in known)
    harmless(lambda: create_table_artifact(rows, key=artifact_key(run.run_id, "validation"), description=steps))


CI_ENDS = ("/ci_low", "/ci_high")


def _with_interval(summary: Mapping[str, float], figure: str) -> str:
    if figure not in summary:
        return ""
    low, high = (summary.get(f"{figure}{end}") for end in CI_ENDS)
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[figure]:.3f}{interval}"


def show_checkpoints(run: OpenRun) -> None:
    """A table of the checkpoints on disk."""
    rows = [
        {
            "step": info.step,
            "MB": round(info.size_bytes / BYTES_PER_MB, 1),
            "score": info.score,
            "path": str(info.path),
        }
        for info in scan(run.layout.checkpoints).checkpoints
    ]
    in_passing(run, lambda: create_table_artifact(rows, key=artifact_key(run.run_id, "checkpoints")))


def show_mlflow_page(run: OpenRun) -> None:
    """A link to it, once it is known."""
    if run.shown.mlflow_link or not run.shown.mlflow_page:
        return

    def create() -> None:
        key = artifact_key(run.run_id, "mlflow")
        create_link_artifact(run.shown.mlflow_page, f"{run.run_id} in MLflow", key=key)
        run.shown.mlflow_link = True

    in_passing(run, create)


def show_report(run_dir: Path, html: Path) -> None:
    """The report's summary as the flow run shows it."""

    def create() -> object:
        from rlcore.report import summary_markdown

        text = f"{summary_markdown(run_dir)}\n\nFull report: `{html}`\n"
        return create_markdown_artifact(text, key=artifact_key(run_dir.name, "report"))

    harmless(create)


def show_comparison(made: Comparison) -> None:
    """A comparison as the flow run shows it, and a link to MLflow's page of the same runs."""
    text = f"{made.summary}\n\nFull comparison: `{made.html}`\n"
    name = f"comparison-{made.html.parent.name}"
    harmless(lambda: create_markdown_artifact(text, key=artifact_key(name, "report")))
    if made.mlflow_page:
        show_link(name, "mlflow", made.mlflow_page, "The same runs in MLflow")


def show_regression(name: str, summary: str, html: Path) -> None:
    """The page of an experiment's nights; the key is the same each night."""
    text = f"{summary}\n\nFull page: `{html}`\n"
    harmless(lambda: create_markdown_artifact(text, key=artifact_key(f"regression-{name}", "nights")))


def show_evaluation(name: str, lines: Sequence[str]) -> None:
    """The table of an evaluation."""
    text = "\n".join(["```", *lines, "```"])
    harmless(lambda: create_markdown_artifact(text, key=artifact_key(name, "evaluation")))


def show_link(name: str, what: str, url: str, text: str) -> None:
    """A link."""
    harmless(lambda: create_link_artifact(url, text, key=artifact_key(name, what)))


def in_passing(run: OpenRun, action: Callable[[], object]) -> None:
    """As `harmless`, while a trainer works. A server that is away is soon given up, and left alone for a while: until
    then nobody hears the trainer, which stops once the pipe to us is full.
    """
    if time.monotonic() < run.shown.again_at:
        return

    def asked() -> None:
        run.shown.again_at = time.monotonic() + LEFT_ALONE_S
        with few_retries(1):
            action()
        run.shown.again_at = float("-inf")

    harmless(asked)


def harmless(action: Callable[[], object]) -> None:
    """Whatever Prefect says to it, the run goes on."""
    try:
        action()
    except Exception as error:
        get_run_logger().warning("Prefect did not take an artifact or event: %s", error)


WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 200, 44, 24, 22
"""Pixels: of the picture, and of its margins for numbers and names."""
MOST_POINTS = 300
"""More are not seen, and the picture travels in the artifact's text."""
COLOURS = ("#3b82f6", "#f97316")
"""Both are seen on a light page and on a dark one; so is GREY."""
GREY = "#8b93a1"

Line = Sequence[tuple[int, float]]


def curve_markdown(lines: Sequence[tuple[str, Line]]) -> str:
    """Values over steps, each line with its name; '' where there is nothing to draw."""
    drawn = [(name, _thinned(points)) for name, points in lines if points]
    if not drawn:
        return ""
    picture = base64.b64encode(curve_svg(drawn).encode()).decode()
    return f"![{', '.join(name for name, _ in drawn)}](data:image/svg+xml;base64,{picture})"


def curve_svg(lines: Sequence[tuple[str, Line]]) -> str:
    """The picture.

    >>> curve_svg([("reward", [(0, 0.0), (10, 1.0)])]).count("<polyline")
    1
    """
    steps = [step for _, points in lines for step, _ in points]
    values = [value for _, points in lines for _, value in points]
    low, high = min(values), max(values)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def place(step: int, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 8)
        return round(x, 1), round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    bottom = HEIGHT - BOTTOM
    parts = [
        f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - 8}" fill="none" stroke="{GREY}"/>',
        _text(LEFT - 4, TOP + 4, f"{high:.3g}", "end"),
        _text(LEFT - 4, bottom, f"{low:.3g}", "end"),
        _text(LEFT, HEIGHT - 6, f"step {first}", "start"),
        _text(WIDTH - 8, HEIGHT - 6, str(last), "end"),
    ]
    for number, (name, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(step, value) for step, value in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(places) <= 12:  # so few are seen as points; one alone is no line
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(_text(LEFT + 8 + 200 * number, 12, name, "start", colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>'


def _text(x: int, y: int, text: str, anchor: str, colour: str = GREY) -> str:
    return f'<text x="{x}" y="{y}" font-size="11" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def _thinned(points: Line) -> Line:
    """Every n-th, and the last."""
    every = -(-len(points) // MOST_POINTS)
    return [point for index, point in enumerate(points) if index % every == 0 or index == len(points) - 1]
