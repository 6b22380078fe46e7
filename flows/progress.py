"""What a person sees while a run goes on: a live line on a terminal, plain lines in a log."""

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from unicodedata import category

from flows.work.protocol import CheckpointSaved, Event, Note, Progress, RunEvent, Validated

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_EVERY_S = 10.0
"""Seconds between two progress lines in a log."""
REWARD_NAMES = ("critic/score/mean", "sft/reward")
"""The reward of a training step, and of a measurement in the warm start."""
LOSS_NAMES = {"sft/loss": "loss", "sft/held_out_loss": "held-out loss"}
"""Losses of supervised steps, as a line says them."""


HEADLINE_METRIC = re.compile(r"/reward/(mean@\d+|pass@\d+|greedy)$")
"""Of a validation's figures, those that stand in a line."""


def skipped_suffix(cached: bool) -> str:
    """End of the line of a result that was there already."""
    return ", skipped: done before" if cached else ""


class Display:
    """Where stages and events are shown. This one shows nothing: the log of a flow run under a worker has it all."""

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def event(self, event: Event) -> None:
        """Show an event of the trainer."""

    def close(self) -> None:
        """Erase what is not to stay on the screen."""


class PlainDisplay(Display):
    """Lines for a log: each stage, each checkpoint, and a step now and then."""

    def __init__(self, every_s: float = PLAIN_EVERY_S) -> None:
        self._every_s = every_s
        self._last = float("-inf")

    def line(self, text: str) -> None:
        """Print it at once: a log is read while it is written. Where its disk is full, or its reader gone, the run goes
        on without it."""
        with suppress(OSError):
            print(printable(text), flush=True)

    def event(self, event: Event) -> None:
        """Print an event that needs a line of its own."""
        if isinstance(event, Progress):
            is_end = event.step in (event.to_step, event.total_steps)
            if not is_end and time.monotonic() - self._last < self._every_s:
                return
            self._last = time.monotonic()
        self.line(describe(event))


class LabelledDisplay(Display):
    """Another one, each line of which says what it is of: several runs are shown one after the other."""

    def __init__(self, shown: Display, label: str) -> None:
        self._shown, self._label = shown, label

    def line(self, text: str) -> None:
        """Show a line of what the label names."""
        self._shown.line(f"{self._label}  {text}")

    def event(self, event: Event) -> None:
        """Show an event of what the label names."""
        if isinstance(event, Progress):
            self._shown.event(replace(event, stage=f"{self._label}  {event.stage}"))
        else:
            self.line(describe(event))


class LiveDisplay(Display):
    """One line at the bottom that moves, and above it the lines that stay."""

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._bars = Bars(*columns, console=console, transient=True)
        self._bars.start()
        self._task = self._bars.add_task("", visible=False, figures="")
        if "prefect" in sys.modules:
            for handler in logging.getLogger("prefect").handlers + logging.getLogger().handlers:
                if hasattr(handler, "console"):  # Prefect's warnings are printed above the live line, not into it
                    handler.console = console

    def line(self, text: str) -> None:
        """Print a line above the live line."""
        self._bars.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        """Move the live line, or print above it."""
        if not isinstance(event, Progress):
            self.line(describe(event))
            return
        self._bars.update(
            self._task,
            visible=True,
            description=event.stage,
            completed=event.step,
            total=event.total_steps,
            figures=metrics_text(event),
        )

    def close(self) -> None:
        """Erase the live line."""
        self._bars.stop()


def describe(event: Event) -> str:
    """An event as a line of text."""
    match event:
        case Progress():
            return f"{event.stage}: step {event.step}/{event.total_steps}  {metrics_text(event)}".rstrip()
        case Note(text):
            return text
        case CheckpointSaved(step, path):
            return f"checkpoint after step {step}: {path}"
        case Validated(name, step, summary):
            found = {key.rpartition("/")[2]: value for key, value in summary.items() if HEADLINE_METRIC.search(key)}
            # With weights a reward may be above 1, while pass@k is a share of problems.
            rewards = ", ".join(f"{key} {value:.3f}" for key, value in found.items() if not key.startswith("pass@"))
            shares = ", ".join(f"{key} {value:.3f}" for key, value in found.items() if key.startswith("pass@"))
            return f"validation {name} (step {step}): reward {rewards}; share solved {shares}"
        case RunEvent(_, {"text": text}):
            return str(text)
        case RunEvent(name, data):
            return f"{name}: " + ", ".join(f"{key} {value}" for key, value in data.items())


def metrics_text(progress: Progress) -> str:
    """Reward, speed and time left, as far as they are known."""
    parts = [f"{word} {progress.metrics[name]:.3f}" for name, word in LOSS_NAMES.items() if name in progress.metrics]
    reward = next((progress.metrics[name] for name in REWARD_NAMES if name in progress.metrics), None)
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if progress.tokens_per_s is not None:
        parts.append(format_speed(progress.tokens_per_s, progress.num_devices))
    if progress.eta_s is not None:
        parts.append(f"ETA {'at most ' * progress.may_end_early}{format_duration(progress.eta_s)}")
    return "  ".join(parts)


def format_speed(tokens_per_s: float, num_devices: int) -> str:
    """Tokens a second of each device, and of all of them where there are several.

    >>> format_speed(9_000.4, 1), format_speed(9_000.4, 2)
    ('9,000 tokens/s', '9,000 tokens/s a GPU, 18,001 in all')
    """
    if num_devices == 1:
        return f"{tokens_per_s:,.0f} tokens/s"
    return f"{tokens_per_s:,.0f} tokens/s a GPU, {num_devices * tokens_per_s:,.0f} in all"


def format_duration(seconds: float) -> str:
    """Seconds as people say them.

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
    """Where this process shows its progress."""
    return _display


@contextmanager
def use_display(new: Display) -> Iterator[None]:
    """Show progress there inside the block."""
    global _display
    old, _display = _display, new
    try:
        yield
    finally:
        _display = old
        new.close()


def display_for_console() -> Display:
    """The live line on a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console()
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()


PIPED_WIDTH = 250
"""Columns of a table that goes to a file or a pipe."""


def console_for_tables() -> "Console":
    """The terminal in its width; elsewhere one in which no row of a table is cut. A line of text stays one line."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


def printable(text: str) -> str:
    """The text without what a terminal would act on, or show in another order.

    >>> printable("a\\x1b[2Jb\\nc\\td")
    'a\\\\x1b[2Jb\\nc\\td'
    """
    return "".join(c if c.isprintable() or c in "\n\t\u200d" or category(c) == "Zs" else repr(c)[1:-1] for c in text)
