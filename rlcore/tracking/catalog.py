"""The definitions of metrics, read from the table rows in `metrics.md`.

In a name, `{a,b}` means one of the words, `<k>` and `<i>` mean a number, and `<x>` means any text.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

METRICS_FILE = Path(__file__).with_name("metrics.md")
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)
FIRST_HEADING, REFERENCE_HEADING = "\n## The run\n", "\n## The reference log\n"


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """The definition of a metric or of a family of metrics. `pattern` matches the names of these metrics."""

    name: str
    unit: str
    definition: str
    pattern: re.Pattern[str]


@cache
def metric_docs() -> tuple[MetricDoc, ...]:
    """Return the definitions of all metrics, in the order of metrics.md."""
    page = METRICS_FILE.read_text(encoding="utf-8").partition(FIRST_HEADING)[2].partition(REFERENCE_HEADING)[0]
    rows = ((name, *rest.replace("\\|", "|").split(" | ", 1)) for name, rest in ROW.findall(page))
    return tuple(MetricDoc(name, unit, definition, _pattern(name)) for name, unit, definition in rows)


@lru_cache(maxsize=4096)
def describe(name: str) -> MetricDoc | None:
    """Return the definition of a metric from the first row that matches its name, or None if no row matches."""
    return next((doc for doc in metric_docs() if doc.pattern.fullmatch(name)), None)


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.sub(r"<[ki]>", r"\\d+", re.escape(name))
    pattern = re.sub(r"<\w+>", ".+", pattern)
    return re.compile(re.sub(r"\\{(.*?)\\}", lambda words: f"(?:{words[1].replace(',', '|')})", pattern))
