"""A sweep's study: which points come, which the pruner drops, and that another process finds the same."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from flows.sweep.study import Study
from rlcore.config.sweep import Point
from rlcore.config.sweep_load import Sweep, load_sweep
from rlcore.errors import ConfigError
from rlcore.evaluation.stats import paired_difference

HEAD = "name: a\nexperiment: debug\noverrides: [validation.every_steps=1, trainer.total_steps=8]\n"
GRID_OF_SIX = "grid: {optim.lr: [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4]}\n"
GRID_OF_24 = f"grid: {{warm_start.max_steps: {[*range(1, 25)]}}}\n"
GRID = "grid: {optim.lr: [1e-4, 2e-4, 3e-4, 4e-4]}\n"
TPE = "optuna: {num_points: 6, startup_points: 3, space: {optim.lr: {low: 1e-5, high: 1e-2, log: true}}}\n"
Table = Mapping[int, Mapping[int, float]]
"""Score of each problem, by point."""


@pytest.fixture
def open_study(tmp_path: Path) -> Callable[..., Study]:
    def open_study(text: str, table: Table | None = None) -> Study:
        return Study(checked(tmp_path, text), tmp_path / "sweep", lambda number, point, step: (table or {})[number])

    return open_study


def checked(folder: Path, text: str) -> Sweep:
    file = folder / "a.yaml"
    file.write_text(HEAD + text)
    return load_sweep(str(file))


def means(table: Table) -> dict[int, float]:
    return {number: float(np.mean(list(scores.values()))) for number, scores in table.items()}


def answers(seed: int, gain: float, num_problems: int = 60) -> dict[int, float]:
    """A point's scores: problems differ much, points by the gain and a little noise."""
    of_problem = np.random.default_rng(0).normal(0, 5, num_problems)
    noise = np.random.default_rng(seed).normal(0, 0.5, num_problems)
    return dict(enumerate((of_problem + noise + gain).tolist()))


TABLE: Table = {1: answers(1, 0.0), 2: answers(2, 1.0), 3: answers(3, 0.95), 4: answers(4, -1.0)}


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.9999])
def test_the_paired_pruner_drops_of_the_worse_half_whom_the_best_beats_beyond_doubt(open_study, direction, confidence):
    text = f"objective: {{direction: {direction}}}\npruning: {{every_steps: 1, confidence: {confidence}}}\n"
    table = {**TABLE, 5: answers(5, 0.97), 6: answers(6, -0.97)}
    study = open_study(GRID_OF_SIX + text, table)
    study.add_points()
    scores, sign = means(table), 1 if direction == "maximize" else -1
    order = sorted(scores, key=lambda number: -sign * scores[number])

    def is_beaten(number: int) -> bool:
        """The twin: mean of the differences, by hand, and the interval of the same bootstrap."""
        lead = [sign * (table[order[0]][problem] - table[number][problem]) for problem in table[order[0]]]
        found = paired_difference([0.0] * len(lead), lead, confidence=confidence)
        return found.difference.low > 0

    expected = {number for number in order[3:] if is_beaten(number)}
    assert study.drop(scores, 1) == expected
    assert study.drop(scores, 1) == expected, "a call that was broken off here decides the same"
    # Far from the best: dropped at any level. The unpaired intervals, as wide as problems differ, tell nobody apart.
    assert expected == ({1, 4, 6} if direction == "maximize" else {2, 3, 5})


def test_the_paired_pruner_leaves_no_fewer_than_successive_halving(open_study):
    table = {number: answers(0, 3.0 * number) for number in range(1, 25)}  # each beats those below it beyond doubt
    study = open_study(GRID_OF_24 + "pruning: {every_steps: 1}\n", table)
    study.add_points()
    scores, left = means(table), []
    for step in range(1, 7):
        dropped = study.drop(scores, step)
        scores = {number: score for number, score in scores.items() if number not in dropped}
        left.append(len(scores))
    assert left == [12, 8, 6, 5, 4, 4]
    assert scores.keys() == {21, 22, 23, 24}


def test_of_equal_points_none_is_dropped(open_study):
    table = {number: answers(number, 0.0) for number in range(1, 5)}
    study = open_study(GRID + "pruning: {every_steps: 1}\n", table)
    study.add_points()
    assert not study.drop(means(table), 1)


def test_only_problems_of_both_are_compared(open_study):
    table = {1: {1: 1.0, 2: 1.0, 9: 0.0}, 2: {3: 0.0, 4: 0.0}, 3: {1: 0.0, 2: 0.0}, 4: {9: 0.0, 1: 1.0}}
    study = open_study(GRID + "pruning: {every_steps: 1}\n", table)
    study.add_points()
    # Point 2 shares no problem with the best.
    assert study.drop({1: 0.9, 2: 0.1, 3: 0.0, 4: 0.8}, 1) == {3}


def test_a_pruner_of_optunas_takes_its_options(open_study):
    pruning = "pruning: {pruner: successive_halving, every_steps: 1, options: {min_resource: 1, reduction_factor: 2}}\n"
    study = open_study(GRID + pruning)
    study.add_points()
    # Optuna judges each against those before it: the first goes on, then one of two, and so on.
    assert study.drop({1: 0.1, 2: 0.3, 3: 0.2, 4: 0.4}, 1) == {3}
    assert study.drop({1: 0.5, 2: 0.3, 4: 0.4}, 2) == {2, 4}


@pytest.mark.parametrize("table", [TABLE])
def test_another_process_finds_what_was_decided_and_adds_nothing_twice(open_study, table):
    text = GRID + "pruning: {every_steps: 1}\n"
    first = open_study(text, table)
    first.add_points()
    second = open_study(text, table)  # before anything is decided
    second.add_points()
    assert [one.number for one in second.points()] == [1, 2, 3, 4]
    dropped = first.drop(means(table), 1)
    kept = {number: score for number, score in means(table).items() if number not in dropped}
    assert not first.drop(kept, 2)
    # It has seen the other scores at step 1 too late: the decision stands, whatever it would be now.
    assert second.drop(dict.fromkeys(table, 0.0), 1) == dropped
    first.finish(2, 0.7)
    second.finish(2, 0.1)
    states = [one.state for one in second.points()]
    assert states == ["stopped early", "finished", "to do", "stopped early"]


def test_a_search_that_is_broken_off_draws_what_one_that_is_not_would(open_study, tmp_path):
    def search(folder: str, calls: int) -> list[Point]:
        study = Study(checked(tmp_path, TPE), tmp_path / folder, lambda *_: {})
        for number in range(1, 7):
            if calls > 1:  # a process for each point, killed after it was asked for
                study = Study(checked(tmp_path, TPE), tmp_path / folder, lambda *_: {})
            study.add_points()
            if calls > 1:
                study = Study(checked(tmp_path, TPE), tmp_path / folder, lambda *_: {})
            point = study.points()[-1]
            assert (point.number, point.state) == (number, "to do")
            study.finish(number, -abs(float(np.log(float(point.settings["optim.lr"]) / 1e-3))))
        study.add_points()
        assert len(study.points()) == 6
        return [one.settings for one in study.points()]

    assert search("whole", 1) == search("broken", 2)


def test_a_trial_that_was_being_made_is_no_point(open_study):
    study = open_study(TPE)
    study.add_points()
    study._study.ask()  # killed before it had its settings
    again = open_study(TPE)
    assert [one.number for one in again.points()] == [1]
    again.add_points()
    assert [one.number for one in again.points()] == [1, 2]


@pytest.mark.parametrize(
    ("pruning", "told"),
    [
        ("pruner: percentile", "missing 1 required positional argument: 'percentile'"),
        ("pruner: hyperband, options: {reduction_factr: 2}", "unexpected keyword argument 'reduction_factr'"),
        ("pruner: successive_halving, options: {reduction_factor: 1}", "must be"),
    ],
)
def test_options_that_optuna_does_not_take(open_study, pruning, told):
    with pytest.raises(ConfigError, match=r"pruning\.options: are not what Optuna's") as caught:
        open_study(TPE + f"pruning: {{every_steps: 1, {pruning}}}\n")
    assert told in str(caught.value)
