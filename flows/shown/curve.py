"""A small picture of a run's reward, as Markdown that a Prefect artifact shows."""

import base64
from collections.abc import Sequence

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
