"""The study of a sweep: its points, pruners, budget and processes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from optuna.trial import Trial, TrialState

from flows.sweep.study import POINT, SETTINGS, BudgetTracker, SweepStudy, problem_scores_key
from rlcore.config.sweep import Budget, Point, load_sweep
from rlcore.evaluation.stats import paired_difference

HEAD = "name: a\nexperiment: debug\noverrides: [validation.every_steps=1, trainer.total_steps=8]\n"
GRID_OF_SIX = "grid: {optim.lr: [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4]}\n"
GRID_OF_12 = f"grid: {{warm_start.max_steps: {[*range(1, 13)]}}}\n"
GRID = "grid: {optim.lr: [1e-4, 2e-4, 3e-4, 4e-4]}\n"
SPACE = "space: {optim.lr: {low: 1e-5, high: 1e-2, log: true}, algo: [grpo, rloo]}"
TPE = f"optuna: {{num_points: 6, startup_points: 3, {SPACE}}}\n"
PAIRED = "pruning: {every_steps: 1}\n"


@pytest.fixture
def open_study(tmp_path: Path) -> Callable[..., SweepStudy]:
    def open_study(text: str, root: str = "", budget: Budget | None = None) -> SweepStudy:
        file = tmp_path / "a.yaml"
        file.write_text(HEAD + text)
        return SweepStudy(load_sweep(str(file), [f"paths.root={tmp_path / root}"], budget=budget))

    return open_study


def ask(study: SweepStudy) -> Trial:
    trial = study.ask()
    assert trial is not None
    return trial


def states_of(study: SweepStudy) -> list[str]:
    return [trial.state.name for trial in study.points().values()]


def answers(seed: int, gain: float, num_problems: int = 60) -> dict[str, float]:
    """Return scores that differ much between problems, and by the gain and a little noise between points."""
    of_problem = np.random.default_rng(0).normal(0, 5, num_problems)
    noise = np.random.default_rng(seed).normal(0, 0.5, num_problems)
    return {str(number): float(score) for number, score in enumerate(of_problem + noise + gain)}


def report(trial: Trial, scores: Mapping[str, float], step: int = 1, mean: float | None = None) -> None:
    trial.set_user_attr(problem_scores_key(step), dict(scores))
    trial.report(float(np.mean(list(scores.values()))) if mean is None else mean, step)


def dropped(study: SweepStudy, table: Mapping[int, Mapping[str, float]]) -> set[int]:
    """Return the points that the pruner drops once all have the scores of their problems in the table."""
    trials = {number: ask(study) for number in table}
    for number, trial in trials.items():
        report(trial, table[number])
    return {number for number, trial in trials.items() if trial.should_prune()}


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.9999])
def test_paired_pruner_drops_beaten_points_of_the_worse_half(open_study, direction, confidence):
    text = f"objective: {{direction: {direction}}}\npruning: {{every_steps: 1, confidence: {confidence}}}\n"
    gains = (0.0, 1.0, 0.95, -1.0, 0.97, -0.97)
    table = {number: answers(number, gain) for number, gain in enumerate(gains, 1)}
    means, sign = (
        {number: np.mean(list(of.values())) for number, of in table.items()},
        1 - 2 * (direction == "minimize"),
    )
    order = sorted(means, key=lambda number: -sign * means[number])

    def is_beaten(number: int) -> bool:
        lead = [sign * (table[order[0]][problem] - table[number][problem]) for problem in table[order[0]]]
        return paired_difference([0.0] * len(lead), lead, confidence=confidence).difference.low > 0

    expected = {number for number in order[3:] if is_beaten(number)}
    assert dropped(open_study(GRID_OF_SIX + text), table) == expected
    # Unpaired intervals, as wide as the problems differ, would separate none.
    assert expected == ({1, 4, 6} if direction == "maximize" else {2, 3, 5})


def test_paired_pruner_keeps_the_best_share(open_study):
    study = open_study(GRID_OF_12 + PAIRED)
    trials = {number: ask(study) for number in range(1, 13)}
    left = []
    for step in range(1, 6):
        for number, trial in trials.items():
            report(trial, answers(0, 3.0 * number), step)
        poor = {number for number, trial in trials.items() if trial.should_prune()}
        for number in poor:
            study.optuna.tell(trials.pop(number), state=TrialState.PRUNED)
        left.append(len(trials))
    assert left == [6, 4, 3, 3, 2]
    assert trials.keys() == {11, 12}


def test_paired_pruner_drops_no_equal_point(open_study):
    assert not dropped(open_study(GRID + PAIRED), {number: answers(number, 0.0) for number in range(1, 5)})


def test_paired_pruner_compares_common_problems(open_study):
    study = open_study(GRID + PAIRED)
    table = {1: {"1": 1.0, "2": 1.0, "9": 0.0}, 2: {"3": 0.0, "4": 0.0}, 3: {"1": 0.0, "2": 0.0}, 4: {"9": 0.0}}
    trials = {number: ask(study) for number in table}
    for number, mean in {1: 0.9, 2: 0.1, 3: 0.0, 4: 0.8}.items():
        report(trials[number], table[number], mean=mean)
    # Point 2 shares no problem with the best.
    assert {number for number, trial in trials.items() if trial.should_prune()} == {3}


def test_paired_pruner_ignores_requeued_attempts(open_study):
    table = {number: answers(number, 1.0 * number) for number in range(1, 5)}
    study = open_study(GRID + PAIRED)
    for _ in range(3):
        trial = ask(study)
        report(trial, table[trial.user_attrs[POINT]])
        study.release(trial)
    assert dropped(open_study(GRID + PAIRED), table) == {1, 2}


def test_processes_share_points_of_a_list(open_study):
    first, second = open_study(GRID), open_study(GRID)
    taken = [ask(study) for study in (first, second, second, first)]
    assert [trial.user_attrs[POINT] for trial in taken] == [1, 2, 3, 4]
    assert (first.ask(), first.num_left()) == (None, 4)
    first.optuna.tell(taken[0], 0.5)
    second.optuna.tell(taken[1], state=TrialState.PRUNED)
    assert (first.num_left(), second.num_left()) == (2, 2)
    assert states_of(second) == ["COMPLETE", "PRUNED", "RUNNING", "RUNNING"]


def test_released_point_is_taken_over_with_its_settings(open_study):
    for text in (GRID, TPE):
        first = open_study(text, text[:4])
        left, kept = ask(first), ask(first)
        second = open_study(text, text[:4])
        first.release(left)
        again = ask(second)
        assert (again.user_attrs, again.params) == (left.user_attrs, left.params)
        assert (again.user_attrs[POINT], kept.user_attrs[POINT]) == (1, 2)
        assert states_of(first)[:2] == ["RUNNING", "RUNNING"]


def test_failed_point_is_retried_only_by_next_call(open_study):
    study = open_study(GRID)
    for _ in range(4):
        trial = ask(study)
        study.optuna.tell(trial, state=TrialState.FAIL)
        study.release(trial)
    assert (study.ask(), study.num_left()) == (None, 0)
    again = open_study(GRID)
    again.retry_failed()
    assert (again.num_left(), ask(again).user_attrs[POINT]) == (4, 1)


def test_interrupted_search_draws_equal_points(open_study):
    def search(root: str, *, is_broken: bool) -> list[Point]:
        study = open_study(TPE, root)
        for number in range(1, 7):
            trial = ask(study)
            if is_broken:  # a process per point, killed after `ask`
                study.release(trial)
                study = open_study(TPE, root)
                trial = ask(study)
            assert trial.user_attrs[POINT] == number
            lr = float(trial.user_attrs[SETTINGS]["optim.lr"])
            assert 1e-5 <= lr <= 1e-2
            study.optuna.tell(trial, -abs(float(np.log(lr / 1e-3))))
            study.release(trial)
        assert study.ask() is None
        return [trial.user_attrs[SETTINGS] for trial in study.points().values()]

    whole = search("whole", is_broken=False)
    assert search("broken", is_broken=True) == whole
    assert len({str(point) for point in whole}) == 6


def test_incomplete_trial_is_not_a_point(open_study):
    study = open_study(TPE)
    study.optuna.ask()  # its process was killed before storing settings
    assert states_of(open_study(TPE)) == []
    assert ask(study).user_attrs[POINT] == 1


def test_values_follow_the_step_of_the_range(open_study):
    decay, size = "{low: 0.2, high: 0.3, step: 0.02}", "{low: 8, high: 32, step: 8}"
    space = f"space: {{optim.weight_decay: {decay}, trainer.batch_size: {size}}}"
    study = open_study(f"optuna: {{num_points: 12, {space}}}\n")
    points = [ask(study).user_attrs[SETTINGS] for _ in range(12)]
    assert {point["optim.weight_decay"] for point in points} <= {round(0.2 + 0.02 * i, 2) for i in range(6)}
    assert {point["trainer.batch_size"] for point in points} <= {8, 16, 24, 32}


@pytest.mark.parametrize(
    ("budget", "begun", "message"),
    [
        (Budget(), [True, True, True, True], ""),
        (Budget(runs=2), [True, True, True, False], "2 runs"),  # the second run is reserved at two comparisons
        (Budget(steps=25), [True, True, False, False], "25 steps"),
        (Budget(runs=1, steps=100), [True, False, False, False], "1 runs"),
        (Budget(hours=1e-12), [False, False, False, False], "1e-12 hours"),
        (Budget(hours=1000), [True, True, True, True], ""),
    ],
)
def test_budget_ends_by_first_exhausted_limit(open_study, budget, begun, message):
    studies = [open_study(GRID, budget=budget) for _ in range(2)]  # two processes of one call
    mine, child = (BudgetTracker(study, "call") for study in studies)
    runs = zip((mine, child) * 2, ("one", "two", "two", "three"), strict=True)
    assert [spending.reserve(run, 10) for spending, run in runs] == begun
    assert mine.read() == child.read()
    assert (mine.read()["ended_by"], mine.read()["steps"]) == (message, 10 * sum(begun))
    assert BudgetTracker(studies[0], "another call").read()["runs"] == []


def test_refunded_steps_may_be_reserved(open_study):
    spending = BudgetTracker(open_study(GRID, budget=Budget(steps=10)), "call")
    assert spending.reserve("one", 10)
    assert spending.estimate_s(30, unfinished=10) is None
    ten, twenty = spending.estimate_s(10), spending.estimate_s(20, unfinished=5)
    assert 0 < 4 * ten <= twenty
    spending.refund(10)
    assert spending.reserve("two", 10)
