"""Regression nights: an experiment is run anew and compared with its last good run, with a verdict and a page."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from rlcore.errors import DataError
from rlcore.evaluation.result import Comparison, compare
from rlcore.evaluation.stats import Interval, median_ratio
from rlcore.report import numbers
from rlcore.report.build import ReportFiles, write_files
from rlcore.report.document import Cell, Finding, Report, Section, Table, Tone, Value, table
from rlcore.report.plots import Chart, gallery_of, plot_intervals, tidy
from rlcore.report.record import RunRecord
from rlcore.storage.documents import read_document
from rlcore.storage.publish import write_json_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE = 0.99
"""Level of the intervals by which nights are judged: at 0.95 one unchanged night in twenty would be called changed."""
NUM_RESAMPLES = 10_000
"""Resamples of the bootstrap: 50 of them lie beyond each end of a 99% interval."""
MOST_COMPARED, FEWEST_COMPARED = 7, 3
"""Good nights whose step times a night is compared with: a machine's speed varies from night to night."""
STEP_S = "timing_s/step"
FILE = "nights.json"

Score = Literal["first", "better", "same", "worse", "broken"]
Speed = Literal["slower", "not slower", "not known"]
TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "broken": "bad", "slower": "bad", "first": "muted"}


@dataclass(frozen=True, slots=True)
class Night:
    """One night's run with its verdict.

    `reference`: the run that it was held against, '' for none. `held_out`: its held-out reward. `gain`: the paired
    difference of that from the reference's. `step_s`: its median seconds a step. `ratio`: the median, over steps, of
    its seconds to those of the slowest of the last good nights. `accepted`: it is the measure whatever was found.
    """

    number: int
    time: float
    run_id: str
    reference: str
    score: Score
    speed: Speed
    text: str
    held_out: Interval | None = None
    gain: Interval | None = None
    step_s: float | None = None
    ratio: Interval | None = None
    commit: str = ""
    accepted: bool = False

    @property
    def word(self) -> str:
        """The verdict in one word: of the score, or of the speed where the score is no worse."""
        return "slower" if self.score in ("same", "better") and self.speed == "slower" else self.score

    @property
    def is_good(self) -> bool:
        """Whether later nights are held against it."""
        return self.accepted or self.word in ("first", "better", "same")

    def metrics(self) -> dict[str, float]:
        """The night's figures under their names in MLflow."""
        verdict = {"broken": -2.0, "worse": -1.0, "slower": -1.0, "better": 1.0}.get(self.word, 0.0)
        found: dict[str, float | None] = {"verdict": verdict, "step_s": self.step_s}
        for name, one in (("held_out", self.held_out), ("difference", self.gain), ("step_ratio", self.ratio)):
            if one is not None:
                found |= {name: one.value, f"{name}/ci_low": one.low, f"{name}/ci_high": one.high}
        return {f"regression/{name}": value for name, value in found.items() if value is not None}


_NIGHTS = TypeAdapter(tuple[Night, ...])


def read_nights(folder: Path) -> tuple[Night, ...]:
    """The nights so far, oldest first; none where there is no file.

    Raises:
        DataError: the file is damaged.
    """
    remedy = "bring it back, or move it away: the next night is the first one then"
    return read_document(folder / FILE, _NIGHTS, remedy) or ()


def write_nights(folder: Path, nights: Sequence[Night]) -> None:
    """Write the nights' records into the folder."""
    write_json_atomically(folder / FILE, _NIGHTS.dump_python(tuple(nights), mode="json"))


def last_good(nights: Sequence[Night]) -> Night | None:
    """The night that the next one is held against."""
    return next((night for night in reversed(nights) if night.is_good), None)


def slowest_good(nights: Sequence[Night]) -> Night | None:
    """The one of the last good nights whose steps took longest; None where they are too few to say how much that is."""
    timed = [(night.step_s, night) for night in nights if night.is_good and night.step_s is not None][-MOST_COMPARED:]
    return max(timed, key=lambda pair: pair[0])[1] if len(timed) >= FEWEST_COMPARED else None


# ------------------------------------------------------------------ the verdict


def judge(number: int, run: RunRecord, good: RunRecord | None, slowest: RunRecord | None, *, slower_by: float) -> Night:
    """The verdict on a run that is over, against the last good one; `first` where there is none.

    The score is better or worse where the 99% interval of the paired difference of the held-out reward excludes 0. A
    step is slower where the 99% interval of the median ratio of step times to those of `slowest`, paired by step, lies
    above 1 + slower_by. That is not known without `slowest`, and under 8 steps, of which there is no such interval.
    """
    last, series = run.after, run.series(STEP_S)
    night = Night(number, time.time(), run.run_id, "" if good is None else good.run_id, "first", "not known", "")
    commit = "" if run.lineage is None else run.lineage.git_commit
    night = replace(night, commit=commit, step_s=None if series is None else float(series.median()))
    if last is None or not last.with_figures.problems:
        return replace(night, score="broken", text="it has no validation after training, so there is no score")
    statistic = last.reward_statistic
    night = replace(night, held_out=last.intervals[statistic])
    if good is None or good.after is None:
        return replace(night, text=f"the first night: held-out reward {numbers.interval(last.intervals[statistic])}")
    settings = last.settings.model_copy(update={"confidence": CONFIDENCE, "num_resamples": NUM_RESAMPLES})
    surely = replace(last, settings=settings)  # compared by intervals of a verdict, and not of a validation
    try:
        (row,) = (row for row in compare(good.after, surely) if row.statistic == statistic)
    except (DataError, ValueError):
        why = f"it cannot be held against {good.run_id}: judged on other problems, or with another number of samples"
        return replace(night, score="broken", text=why)
    return _spoken(night, row, None if slowest is None else _ratio(slowest, run), slower_by)


def _ratio(slowest: RunRecord, run: RunRecord) -> Interval | None:
    """Median ratio of step times over the steps that both runs have; None where these are too few for an interval."""
    times = [record.series(STEP_S) for record in (slowest, run)]
    if any(each is None for each in times):
        return None
    shared = pd.concat(times, axis="columns", join="inner")
    if shared.empty:
        return None
    ratio = median_ratio(shared.iloc[:, 0], shared.iloc[:, 1], confidence=CONFIDENCE)
    return ratio if np.isfinite(ratio.high) else None


def _spoken(night: Night, row: Comparison, ratio: Interval | None, slower_by: float) -> Night:
    gain = row.paired.difference
    score: Score = "same" if not gain.excludes_zero else "better" if gain.value > 0 else "worse"
    speed: Speed = "not known"
    text = (
        f"held-out reward {numbers.fixed(row.second.value)} after {numbers.fixed(row.first.value)}, "
        f"{numbers.signed_interval(gain)} on the same {row.num_problems} problems: {score}"
    )
    if ratio is not None:
        speed = "slower" if ratio.low > 1 + slower_by else "not slower"
        ends = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
        text += f"; a step takes {ratio.value:.2f} times as long {ends} as in the slowest good night: {speed}"
    return replace(night, score=score, speed=speed, text=text, gain=gain, ratio=ratio)


# ------------------------------------------------------------------ the page


RULE = (
    f"Better or worse: the {CONFIDENCE:.0%} interval of the paired difference of the held-out reward from that of the "
    f"last good run excludes 0. Slower: that of the median ratio of step times to the slowest of the last "
    f"{MOST_COMPARED} good nights ({FEWEST_COMPARED} at least) lies above the allowed share. Broken: the run has "
    "failed, or nothing can be paired."
)


def write_page(name: str, nights: Sequence[Night], folder: Path) -> ReportFiles:
    """Write `regression.html` and `.json` of one night or more into the folder."""
    newest = nights[-1]
    tone = TONES.get(newest.word, "good")
    report = Report(
        genre="regression",
        title=name,
        subtitle=f"{len(nights)} nights, {_date(nights[0])} to {_date(newest)}" if nights[1:] else _date(newest),
        state=newest.word,
        state_tone=tone,
        findings=(Finding("Last night", newest.word, tone, f"{newest.run_id}: {newest.text}.", RULE, {}),),
        sections=(
            Section("curves", "Over the nights", (gallery_of(_charts(nights), folder / "figures"),)),
            Section("nights", "Nights", (_table(nights),)),
        ),
    )
    return write_files(report, folder, "regression", ("nights",))


def _date(night: Night) -> str:
    return datetime.fromtimestamp(night.time, UTC).strftime("%Y-%m-%d %H:%M")


def _charts(nights: Sequence[Night]) -> tuple[Chart, ...]:
    def seconds(night: Night) -> Interval | None:
        return None if night.step_s is None else Interval(night.step_s, night.step_s, night.step_s)

    return (
        Chart("held_out", "Held-out reward", "", partial(_draw, nights, lambda night: night.held_out)),
        Chart("difference", "Difference from the last good run", "", partial(_draw, nights, lambda night: night.gain)),
        Chart("seconds", "Seconds a step", "", partial(_draw, nights, seconds)),
    )


def _draw(nights: Sequence[Night], value: Callable[[Night], Interval | None], figure: "Figure") -> None:
    """Draw a point with its interval for each night: nights as before, better ones and worse ones by colour."""
    axes = figure.subplots()
    for label, words, colour in (
        ("as before", ("first", "same"), "blue"),
        ("better", ("better",), "green"),
        ("worse, slower or broken", ("worse", "slower", "broken"), "red"),
    ):
        shown = [(night.number, one) for night in nights if night.word in words and (one := value(night)) is not None]
        if shown:
            plot_intervals(axes, shown, colour, label, linestyle="none")
    tidy(axes, x="night")


def _table(nights: Sequence[Night]) -> Table:
    rows: list[tuple[Value, ...]] = [
        (
            night.number, _date(night),
            Cell(f"{night.word}{', accepted' if night.accepted else ''}", night.word, TONES.get(night.word, "")),
            night.held_out, night.gain, night.step_s, night.ratio, night.commit[:10], night.run_id, night.text,
        )
        for night in reversed(nights)
    ]  # fmt: skip
    return table(
        "nights",
        "Nights, the newest first",
        {"Night": "number", "Date, UTC": "text", "Verdict": "text", "Held-out reward": "number",
         "Difference": "difference", "Step": "seconds", "Times as long": "number", "Commit": "code", "Run": "code",
         "What was found": "text"},
        rows,
    )  # fmt: skip
