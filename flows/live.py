"""A run as it stands: curves of its journal, its last answers. For the page that follows it and Prefect's artifacts.

What is given out is bounded, whatever the run's length, and holds no setting: settings may name places and people.
"""

import base64
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.answers.store import parts_of
from rlcore.config import RunConfig
from rlcore.config.data import ALL_SOURCES
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import open_ordinary
from rlcore.tracking.journal import StepRecord, iter_lines

REWARD = "critic/score/mean"
ALONE = {
    "answer length, tokens": "response_length/mean",
    "entropy, nats a token": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "tokens a second": "perf/throughput",
}
"""Metrics that have a curve of their own, by its title."""
MOST_ANSWERS = 6
"""Answers that are shown, each to another prompt."""
COLUMNS = ["prompt_id", "step", "validation", "score", "prompt", "answer"]
MOST_CHARACTERS = 600
"""Characters that are shown of a prompt's end and of an answer's beginning."""


class Followed:
    """The curves of a run that goes on: each look reads what its journal has got since the last one."""

    def __init__(self, config: RunConfig, journal: Path) -> None:
        self._config, self._journal = config, journal
        self._offset = 0
        self._last = b""
        """The last line that was read."""
        self._points: dict[str, dict[int, float]] = {}

    def curves(self) -> list[tuple[str, str]]:
        """Title and picture of each curve that has values; a run without a journal has none."""
        with suppress(FileNotFoundError):
            self._look()
        over_all = f"val-core/{ALL_SOURCES}/reward/mean@{self._config.validation.samples_per_problem}"
        held_out = over_all if over_all in self._points else next(filter(self._is_held_out, self._points), "")
        lines = {"reward": {"in training": REWARD, "on held-out problems": held_out}}
        lines |= {title: {title: metric} for title, metric in ALONE.items()}
        drawn = [
            (title, picture([(name, sorted(self._points.get(metric, {}).items())) for name, metric in those.items()]))
            for title, those in lines.items()
        ]
        return [(title, address) for title, address in drawn if address]

    def _look(self) -> None:
        with open_ordinary(self._journal) as file:
            if os.pread(file.fileno(), len(self._last), self._offset - len(self._last)) != self._last:
                self._offset, self._points, self._last = 0, {}, b""  # cut: the run goes on from an older checkpoint
            for record, end in iter_lines(file.fileno(), self._offset):
                self._last = os.pread(file.fileno(), end - self._offset, self._offset)
                self._offset = end
                if isinstance(record, StepRecord):
                    self._add(record)

    def _add(self, record: StepRecord) -> None:
        for name, value in record.metrics.items():
            if name == REWARD or name in ALONE.values() or self._is_held_out(name):
                self._points.setdefault(name, {})[record.step] = value

    def _is_held_out(self, name: str) -> bool:
        validation = self._config.validation
        ours = name.startswith("val-core/") and name.endswith(f"/reward/mean@{validation.samples_per_problem}")
        return ours and not validation.is_of_suite(name)


def last_answers(layout: RunLayout) -> list[dict[str, Any]]:
    """`COLUMNS` of the newest answers on record, the newest first; they are written at the end of each chunk."""
    import pyarrow.parquet as pq

    with suppress(OSError, ValueError):  # there is no part yet, or it is deleted at this moment
        newest = max(parts_of(layout.answers), key=lambda part: part.stat().st_mtime)
        with pq.ParquetFile(newest) as file:
            rows = file.read_row_group(file.metadata.num_row_groups - 1, columns=COLUMNS).to_pylist()
        each_prompt = {row["prompt_id"]: row for row in rows}
        return [_shortened(row) for row in list(each_prompt.values())[: -MOST_ANSWERS - 1 : -1]]
    return []


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    prompt, answer = str(row["prompt"] or ""), str(row["answer"])
    if len(prompt) > MOST_CHARACTERS:
        prompt = f"… {prompt[-MOST_CHARACTERS:]}"
    if len(answer) > MOST_CHARACTERS:
        answer = f"{answer[:MOST_CHARACTERS]} …"
    return {**row, "prompt": prompt, "answer": answer}


WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 200, 70, 24, 24
"""Pixels: of the picture, and of its margins for numbers (`-0.1235` is the longest) and names."""
FONT_SIZE = 16
"""Pixels; a page with several pictures side by side shows them at about two thirds of their size."""
MOST_POINTS = 300
"""Points of a curve at most: more cannot be seen, and the picture is part of the artifact's text."""
COLOURS = ("#3b82f6", "#f97316")
"""Both are seen on a light page and on a dark one; so is GREY."""
GREY = "#8b93a1"

Line = Sequence[tuple[int, float]]


def picture(lines: Sequence[tuple[str, Line]]) -> str:
    """The address of a picture of values over steps, each line with its name; '' where there is nothing to draw."""
    drawn = [(name, _thinned(points)) for name, points in lines if points]
    return f"data:image/svg+xml;base64,{base64.b64encode(curve_svg(drawn).encode()).decode()}" if drawn else ""


def curve_svg(lines: Sequence[tuple[str, Line]]) -> str:
    """The picture itself.

    >>> curve_svg([("reward", [(0, 0.0), (10, 1.0)])]).count("<polyline")
    1
    """
    from rlcore.report.numbers import short  # numpy, which a command's start does without

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
        _text(LEFT - 4, TOP + 4, short(high), "end"),
        _text(LEFT - 4, bottom, short(low), "end"),
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
        parts.append(_text(LEFT + 8 + 200 * number, 16, name, "start", colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>'


def _text(x: int, y: int, text: str, anchor: str, colour: str = GREY) -> str:
    return f'<text x="{x}" y="{y}" font-size="{FONT_SIZE}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def _thinned(points: Line) -> Line:
    """Every n-th point, and the last one."""
    every = -(-len(points) // MOST_POINTS)
    return [*points[:-1:every], points[-1]]
