"""Progress as shown to users."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli import exit_code
from flows.progress import (
    LabeledDisplay,
    LiveDisplay,
    PlainDisplay,
    describe,
    display,
    metrics_text,
    print_table,
    use_display,
)
from flows.stages.dataset import show_rows
from flows.work.protocol import CheckpointSaved, Note, Progress, RunEvent
from rlcore.errors import MillraceError


def step(number: int, **more: float) -> Progress:
    return Progress("train", number, 40, {"critic/score/mean": 0.25}, to_step=20, **more)  # type: ignore[arg-type]


def test_events_as_lines():
    assert metrics_text(step(3)) == "reward 0.250"
    assert metrics_text(step(3, eta_s=95.0, tokens_per_s=9_000.4)) == "reward 0.250  9,000 tokens/s  ETA 1:35"
    two = step(3, eta_s=95.0, tokens_per_s=9_000.4, num_devices=2, may_end_early=True)
    assert metrics_text(two) == "reward 0.250  9,000 tokens/s per GPU, 18,001 in total  may end early"
    assert describe(step(3)) == "train: step 3/40  reward 0.250"
    assert describe(Note("hello")) == "hello"
    assert describe(CheckpointSaved(20, "/x/step-000020")) == "checkpoint after step 20: /x/step-000020"
    assert describe(RunEvent("paused", {"missing_bytes": 3})) == "paused: missing_bytes 3"


def test_labeled_display_prefixes_lines(capsys):
    plain = PlainDisplay()
    with use_display(plain), use_display(LabeledDisplay(display(), "point 2 seed 1", later_s=600.0)):
        display().event(step(20, eta_s=25.0))
        display().event(replace(step(20, eta_s=25.0), stage="warm-start"))
        display().event(CheckpointSaved(20, "/x"))
        display().line("done")
    assert capsys.readouterr().out.splitlines() == [
        "point 2 seed 1  train: step 20/40  reward 0.250  ETA 25 s, sweep 10:25",
        "point 2 seed 1  warm-start: step 20/40  reward 0.250  ETA 25 s",
        "point 2 seed 1  checkpoint after step 20: /x",
        "point 2 seed 1  done",
    ]


def test_log_has_chunk_ends_and_few_steps(capsys, monkeypatch):
    monkeypatch.setattr("flows.progress.PLAIN_EVERY_S", 1e9)
    with use_display(PlainDisplay()):
        for number in range(1, 41):
            display().event(step(number))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["1/40", "20/40", "40/40"]


def test_full_log_does_not_end_a_run(monkeypatch):
    """The exit code and the message at the end: tests/flows/test_cli.py."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 its end fails, too
    monkeypatch.setattr(sys, "stdout", full)
    PlainDisplay().line("of a run")
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_control_characters_are_escaped(capsys):
    def fail() -> None:
        raise MillraceError("\x1b]0;mine\x07")

    PlainDisplay().line("wrong: \x1b[2Jnothing")
    out, screen = capsys.readouterr().out, io.StringIO()
    with use_display(LiveDisplay(Console(file=screen, force_terminal=True))):
        display().line("wrong: \x1b[2Jnothing")
    assert out == "wrong: \\x1b[2Jnothing\n"
    assert out in screen.getvalue()
    assert exit_code(fail) == 1
    assert capsys.readouterr().err == "\\x1b]0;mine\\x07\n"


def test_terminal_has_live_and_permanent_lines():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with use_display(LiveDisplay(console)):
        display().event(step(3, eta_s=7.0))
        display().line("dataset: [4,767 rows]")
        display().event(Note("a note"))
    text = screen.getvalue()
    for words in ("3/40", "ETA 7 s", "a note"):
        assert words in text
    assert "dataset: [4,767 rows]\n" in text.replace("\x1b[2K", "").replace("\r", "")
    assert "\x1b[?25h" in text[-40:]


@pytest.mark.parametrize(("width", "speed"), [(80, ""), (120, "  9,000 tokens/s")])
def test_live_line_of_a_sweep_fits_the_terminal(width, speed):
    screen, label = io.StringIO(), "point 1/2 seed 1 (run 1/4)"
    console = Console(file=screen, force_terminal=True, width=width)
    with use_display(LiveDisplay(console)), use_display(LabeledDisplay(display(), label, 600.0)):
        display().event(step(12, eta_s=95.0, tokens_per_s=9_000.4))
    assert f" {label}  train 12/40  reward 0.250{speed}  ETA 1:35, sweep 11:35" in screen.getvalue()


def test_filter_reports_progress(capsys):
    with use_display(PlainDisplay()):
        show_rows("train", 2_000, 2_000)
        assert capsys.readouterr().out == ""
        show_rows("train", 1_000, 2_000)
    assert "filter, rows of train: step 1000/2000" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80])
def test_notes_of_a_table_are_never_cut(width, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("flows.progress.console_for_tables", lambda: Console(width=width, soft_wrap=True))
    note = "its process has ended; the same command resumes it"
    print_table(("run", "state", "note"), [("debug-s1-0a1b2c3d", "lost", note), ("debug-s2-0a1b2c3d", "finished", "")])
    shown = capsys.readouterr().out
    assert (f"debug-s1-0a1b2c3d: {note}" in shown, "note" in shown.splitlines()[0]) == (width == 40, width == 80)
    assert set(note.split()) <= set(shown.split())
    assert "debug-s2-0a1b2c3d:" not in shown
