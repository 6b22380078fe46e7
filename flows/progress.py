"""The display of a run's progress. It is a live line on a terminal, and plain lines in a log."""

import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category

from flows.work.protocol import CheckpointSaved, Event, Note, Progress, RunEvent, Validated

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24  # columns of the live line's bar, if the terminal has room for them
PLAIN_EVERY_S = 10.0  # seconds between two progress lines in a log
REWARD_NAMES = ("critic/score/mean", "sft/reward")  # reward of a training step, and of a measurement in the warm start
LOSS_NAMES = {"sft/loss": "loss", "sft/held_out_loss": "held-out loss"}  # losses of supervised steps by metric name
HEADLINE_METRIC = re.compile(r"/reward/(mean_at_\d+|pass_at_\d+|greedy)$")  # validation metrics that are printed


def skipped_suffix(cached: bool) -> str:
    """Return a note that a stage was skipped because its result existed before, or '' if `cached` is false."""
    return ", skipped: done before" if cached else ""


class Display:
    """The base class of all displays. It shows nothing.

    Flow runs of a Prefect worker use this class, because they log to Prefect.
    """

    def line(self, text: str) -> None:
        """Print a permanent line."""

    def event(self, event: Event) -> None:
        """Show an event of the trainer."""

    def close(self) -> None:
        """Erase the live line."""


class PlainDisplay(Display):
    """A display for logs. It prints lines for stages and checkpoints, and a progress line every few seconds."""

    _last = float("-inf")

    def line(self, text: str) -> None:
        with suppress(OSError):  # a full disk or a closed pipe does not stop the run
            print(printable(text), flush=True)

    def event(self, event: Event) -> None:
        if isinstance(event, Progress):
            is_end = event.step in (event.to_step, event.total_steps)
            if not is_end and time.monotonic() - self._last < PLAIN_EVERY_S:
                return
            self._last = time.monotonic()
        self.line(describe(event))


class LabeledDisplay(Display):
    """A display that labels each line with the current run of a sweep.

    `later_s` is the expected time in seconds for all runs after the current run, or None if it is unknown.
    """

    def __init__(self, shown: Display, label: str, later_s: float | None = None) -> None:
        self._shown, self._label, self._later_s = shown, label, later_s

    def line(self, text: str) -> None:
        self._shown.line(f"{self._label}  {text}")

    def event(self, event: Event) -> None:
        if isinstance(event, Progress):
            left = None
            if self._later_s is not None and event.eta_s is not None and event.stage == "train":
                left = event.eta_s + self._later_s
            self._shown.event(replace(event, stage=f"{self._label}  {event.stage}", sweep_eta_s=left))
        else:
            self.line(describe(event))


class LiveDisplay(Display):
    """A display with a live line at the bottom of the terminal and permanent lines above it."""

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self._bar, text = BarColumn(), TextColumn("{task.description}", markup=False)
        self._bars = Bars(self._bar, text, console=console, transient=True)
        self._bars.start()
        self._task = self._bars.add_task("", visible=False)
        if "prefect" in sys.modules:
            for handler in logging.getLogger("prefect").handlers + logging.getLogger().handlers:
                if hasattr(handler, "console"):  # print Prefect's warnings above the live line
                    handler.console = console

    def line(self, text: str) -> None:
        self._bars.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        if not isinstance(event, Progress):
            self.line(describe(event))
            return
        step, total, width = event.step, event.total_steps, self._bars.console.width - 2
        texts = [metrics_text(one) for one in (event, replace(event, tokens_per_s=None))]
        lines = [f"{event.stage} {step}/{total}  {text}" for text in texts]
        line = next((one for one in lines if len(one) < width), lines[-1])
        self._bar.bar_width = max(1, min(BAR_WIDTH, width - len(line)))
        self._bars.update(self._task, visible=True, description=line, completed=step, total=total)

    def close(self) -> None:
        self._bars.stop()


def describe(event: Event) -> str:
    """Return a line of text that describes an event."""
    match event:
        case Progress():
            return f"{event.stage}: step {event.step}/{event.total_steps}  {metrics_text(event)}".rstrip()
        case Note(text):
            return text
        case CheckpointSaved(step, path):
            return f"checkpoint after step {step}: {path}"
        case Validated(name, step, summary):
            found = {key: f"{value:.3f}" for key, value in summary.items() if HEADLINE_METRIC.search(key)}
            return f"validation {name} (step {step}): {_metrics_by_kind(found)}"
        case RunEvent(_, {"text": text}):
            return str(text)
        case RunEvent(name, data):
            return f"{name}: " + ", ".join(f"{key} {value}" for key, value in data.items())


def metrics_text(progress: Progress) -> str:
    """Return the losses, reward, speed and remaining time as text, without the values that are unknown."""
    parts = [f"{word} {progress.metrics[name]:.3f}" for name, word in LOSS_NAMES.items() if name in progress.metrics]
    reward = next((progress.metrics[name] for name in REWARD_NAMES if name in progress.metrics), None)
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if progress.tokens_per_s is not None:
        speed, number = f"{progress.tokens_per_s:,.0f} tokens/s", progress.num_devices
        parts.append(speed if number == 1 else f"{speed} per GPU, {number * progress.tokens_per_s:,.0f} in total")
    if progress.eta_s is not None:
        whole = "" if progress.sweep_eta_s is None else f", sweep {format_duration(progress.sweep_eta_s)}"
        eta = "may end early" if progress.may_end_early else f"ETA {format_duration(progress.eta_s)}"
        parts.append(f"{eta}{whole}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text.

    >>> format_duration(7.4), format_duration(95), format_duration(7_380)
    ('7 s', '1:35', '2:03:00')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_display = Display()


def display() -> Display:
    """Return the current display of this process."""
    return _display


@contextmanager
def use_display(new: Display) -> Iterator[None]:
    """Use a display inside the `with` block. It is closed afterwards, and the previous display is restored."""
    global _display
    old, _display = _display, new
    try:
        yield
    finally:
        _display = old
        new.close()


def display_for_console() -> Display:
    """Return a display with a live line for a terminal, and one with plain lines for other outputs."""
    from rich.console import Console

    console = Console()
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()


PIPED_WIDTH = 250  # columns of a table that is written to a file or a pipe


def console_for_tables() -> "Console":
    """Return a console that does not wrap lines. Outside a terminal, it is wide enough for whole table rows."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


MIN_NOTE_WIDTH = 24  # characters of a table's last column; if there are fewer, its cells are printed below the table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str | None] = ()) -> None:
    """Print rows as a table. Outside a terminal, print each row as a line with tabs between the cells. In a narrow
    terminal, print the cells of the last column below the table."""
    if not sys.stdout.isatty():
        for row in rows:
            print(printable("\t".join(" ".join(cell.split()) for cell in row)))
        return
    from rich.table import Table

    console, table = console_for_tables(), Table(box=None, pad_edge=False, header_style="bold")
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    is_narrow = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], MIN_NOTE_WIDTH) > console.width
    for name in columns[:-1] if is_narrow else columns:
        table.add_column(name, no_wrap=name != columns[-1], overflow="fold")
    for row, style in zip_longest(rows, styles):
        table.add_row(*map(printable, row[: len(table.columns)]), style=style)
    console.print(table, soft_wrap=False)
    for row in rows if is_narrow else ():
        if row[-1]:
            print(printable(f"{row[0]}: {row[-1]}"))


def printable(text: str) -> str:
    r"""Return a text in which control characters and characters that change the direction of text are escaped.

    >>> printable("a\x1b[2Jb\nc\td")
    'a\\x1b[2Jb\nc\td'
    """
    return "".join(c if c.isprintable() or c in "\n\t\u200d" or category(c) == "Zs" else repr(c)[1:-1] for c in text)


CI_SUFFIXES = ("/ci_low", "/ci_high")


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """The metrics of one validation, and the file that holds every response."""

    name: str
    step: int
    file: Path
    cached: bool
    summary: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.headline()}{skipped_suffix(self.cached)}"

    def headline(self) -> str:
        """Return the main metrics with their confidence intervals as text."""
        shown = [name for name in self.summary if HEADLINE_METRIC.search(name) and f"{name}/ci_low" in self.summary]
        found = {name: with_interval(self.summary, name) for name in shown}
        return f"{self.name} (step {self.step}): {_metrics_by_kind(found)}"


def reward_changes(validations: Sequence[ValidationSummary]) -> list[str]:
    """Return how each mean reward changes over the validations, such as `mean_at_4 0.326 -> 0.730`.

    A mean reward is left out if one of the validations lacks it.
    """
    if not validations:
        return []
    means = [name for name in validations[-1].summary if HEADLINE_METRIC.search(name) and "/mean_at_" in name]
    means = [name for name in means if all(name in one.summary for one in validations)]
    return [
        f"{label} {' -> '.join(f'{one.summary[name]:.3f}' for one in validations)}"
        for name, label in _labels(means).items()
    ]


def with_interval(summary: Mapping[str, float], metric: str) -> str:
    """Return a metric as text, with its confidence interval if there is one. Return '' if the metric is absent.

    >>> with_interval({"a": 0.5, "a/ci_low": 0.41, "a/ci_high": 0.59}, "a")
    '0.500 [0.410, 0.590]'
    """
    if metric not in summary:
        return ""
    low, high = (summary.get(f"{metric}{end}") for end in CI_SUFFIXES)
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[metric]:.3f}{interval}"


def _metrics_by_kind(values: Mapping[str, str]) -> str:
    """Return held-out metrics as one line: first the rewards, then the shares of solved problems (pass@k)."""
    labels = _labels(list(values))
    kinds = {"reward": [name for name in values if "/pass_at_" not in name]}
    kinds["share solved"] = [name for name in values if name not in kinds["reward"]]
    texts = {kind: ", ".join(f"{labels[name]} {values[name]}" for name in names) for kind, names in kinds.items()}
    return "; ".join(f"{kind} {text}" for kind, text in texts.items() if text)


def _labels(names: Sequence[str]) -> dict[str, str]:
    several = len({_source_of(name) for name in names}) > 1
    return {name: f"{_source_of(name)} " * several + name.rpartition("/")[2] for name in names}


def _source_of(name: str) -> str:
    return name.partition("/")[2].rpartition("/reward/")[0]
