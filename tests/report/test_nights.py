"""Nights of an experiment: the verdict on planted runs, against which night it is, and the page of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.evaluation.stats import Interval
from rlcore.report.nights import (
    FILE,
    STEP_S,
    Night,
    judge,
    last_good,
    read_nights,
    slowest_good,
    write_nights,
    write_page,
)
from rlcore.report.record import RunRecord
from tests.evaluation.results import random_result, result
from tests.report.records import record_of


def run(after: ValidationResult | None, *, factor: float = 1.0, num_steps: int = 30) -> RunRecord:
    """A run that ended with this validation; `factor`: of its step times."""
    times = factor * np.random.default_rng(3).gamma(9.0, 0.1, num_steps)
    return record_of({STEP_S: times.tolist()}, validations={} if after is None else {"after": after})


def verdict(now: RunRecord, before: RunRecord | None, *, slower_by: float = 0.1) -> Night:
    return judge(2, now, before, before, slower_by=slower_by)


GOOD = run(random_result(1, 0.6))


@pytest.mark.parametrize(
    ("now", "word"),
    [
        (run(random_result(1, 0.6)), "same"),
        (run(random_result(2, 0.6)), "same"),
        (run(random_result(1, 0.25)), "worse"),
        (run(random_result(1, 0.95)), "better"),
        (run(random_result(1, 0.6), factor=1.3), "slower"),
        (run(random_result(1, 0.6), factor=1.08), "same"),
        (run(random_result(1, 0.25), factor=1.3), "worse"),
        (run(random_result(1, 0.95), factor=1.3), "slower"),
        (run(random_result(1, 0.6), factor=1.3, num_steps=7), "same"),
        (run(None), "broken"),
        (run(random_result(1, 0.6, num_samples=2)), "broken"),
        (run(result(())), "broken"),
    ],
)
def test_the_verdict_in_a_word(now: RunRecord, word: str) -> None:
    assert verdict(now, GOOD).word == word


def test_the_interval_of_a_verdict_is_paired_and_wider_than_a_validations_own() -> None:
    found = verdict(run(random_result(1, 0.4)), GOOD)
    before, after = (np.array([one.mean_score for one in random_result(1, chance).problems]) for chance in (0.6, 0.4))
    assert found.gain is not None
    assert found.gain.value == pytest.approx((after - before).mean())
    half = 2.576 * (after - before).std() / np.sqrt(len(after))
    assert found.gain.low == pytest.approx(found.gain.value - half, abs=0.15 * half)


def test_the_first_night_is_held_against_nothing() -> None:
    found = judge(1, GOOD, None, None, slower_by=0.1)
    assert (found.word, found.is_good, found.reference, found.speed) == ("first", True, "", "not known")


def night(number: int, score: str, step_s: float, speed: str = "not slower", *, accepted: bool = False) -> Night:
    made = Night(number, 1_700_000_000.0 + 86_400 * number, f"run-{number}", "", "same", "not known", "so it is")
    held = None if score == "broken" else Interval(0.5, 0.4, 0.6)
    ratio = Interval(1.0, 0.9, 1.1)
    return replace(
        made, score=score, speed=speed, step_s=step_s, held_out=held, gain=held, ratio=ratio, accepted=accepted
    )


def test_nights_are_held_against_the_last_good_one_and_the_slowest_of_several() -> None:
    nights = [night(1, "first", 1.0), night(2, "same", 1.4), night(3, "worse", 9.0), night(4, "same", 9.0, "slower")]
    good = last_good(nights)
    assert good is not None
    assert good.number == 2
    assert slowest_good(nights) is None, "two good nights do not say how much nights differ"
    slowest = slowest_good([*nights, night(5, "better", 1.2)])
    assert slowest is not None
    assert slowest.number == 2
    accepted = last_good([*nights, night(5, "worse", 1.2, accepted=True)])
    assert accepted is not None
    assert accepted.number == 5
    assert last_good([night(1, "broken", 1.0)]) is None


def test_nights_are_read_as_they_were_written_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    nights = (night(1, "first", 1.0), night(2, "broken", 1.0), night(3, "better", 0.9))
    assert read_nights(tmp_path) == ()
    write_nights(tmp_path, nights)
    assert read_nights(tmp_path) == nights
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace("better", "splendid"))
    with pytest.raises(DataError, match=r"nights.json: cannot be read .2.score.*move it away"):
        read_nights(tmp_path)


def test_the_page_has_every_night_and_the_last_ones_verdict(tmp_path: Path) -> None:
    words = ["first", *["same"] * 8, "worse", "broken", "better"]
    nights = [night(number, word, 1.0) for number, word in enumerate(words, 1)]
    files = write_page("countdown_demo", nights, tmp_path)
    told = json.loads(files.json.read_text())
    assert told["state"] == "better"
    table = told["tables"]["nights"]
    assert [row[table["columns"].index("Verdict")] for row in table["rows"]] == words[::-1]
    page = files.html.read_text()
    assert page.count('<svg class="chart"') == 3
    assert "2023-11-26" in page
    assert "better" in files.summary
    assert nights[9].metrics()["regression/verdict"] == -1.0
    assert "regression/held_out" not in nights[10].metrics()
