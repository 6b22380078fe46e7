"""Findings about artificial curves."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from rlcore.config import PassRatesConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.report.findings import (
    convergence_finding,
    learning_finding,
    learning_limit,
    speed_limit,
    stability_checks,
    stability_finding,
)
from rlcore.report.plots import series_of, trend_of
from rlcore.report.run_sections import mean_phases
from tests.helpers.reports import record_of
from tests.helpers.validations import problem, random_result, result

STEPS = 120
NOISE = np.random.default_rng(0).normal(0, 0.02, STEPS)
SCORES = {"critic/score/max": np.ones(STEPS), "critic/score/min": np.zeros(STEPS)}
CALM = {
    "critic/score/mean": 0.5 + NOISE,
    "actor/grad_norm": 1 + NOISE,
    "actor/ppo_kl": NOISE / 100,
    "actor/pg_clipfrac": 0.01 + NOISE / 100,
    "actor/entropy": 1 + NOISE,
    "response_length/clip_ratio": np.full(STEPS, 0.01),
    **SCORES,
}


@pytest.mark.parametrize(("first", "second", "verdict"), [(0.3, 0.7, "yes"), (0.5, 0.5, "no change found"),
                                                          (0.7, 0.3, "got worse")])  # fmt: skip
def test_learned_follows_paired_interval(first, second, verdict):
    before = random_result(1, first)
    after = before if first == second else random_result(2, second)
    found = learning_finding(record_of({}, validations={"before": before, "after": after}))
    assert found.verdict == verdict
    gains = [b.mean_score - a.mean_score for a, b in zip(before.problems, after.problems, strict=True)]
    assert found.numbers["difference"]["value"] == pytest.approx(np.mean(gains))
    assert found.numbers["wins"] == sum(gain > 0 for gain in gains)


def test_learned_needs_two_validations():
    assert learning_finding(record_of(CALM)).verdict == "not known"
    before, after = random_result(1, 0.3), random_result(2, 0.5, num_problems=5)
    assert learning_finding(record_of(CALM, validations={"before": before})).verdict == "not known"
    others = replace(after, problems=tuple(replace(each, prompt_id=900 + each.prompt_id) for each in after.problems))
    different = {"before": before, "after": others}
    assert learning_finding(record_of({}, validations=different)).verdict == "not known"


@pytest.mark.parametrize(
    ("slope", "noise", "verdict"),
    [
        (0.0, 1.0, "yes"),
        (0.0, 8.0, "unclear"),  # no trend, but its interval permits a rise
        (0.0002, 0.0, "yes"),  # certain, but 0.008 over the last third
        (0.004, 1.0, "still rising"),
        (-0.004, 1.0, "falling"),
    ],
)
def test_converged_follows_trend(slope, noise, verdict):
    rewards = 0.3 + slope * np.arange(STEPS) + noise * NOISE
    assert convergence_finding(record_of({"critic/score/mean": rewards, **SCORES})).verdict == verdict


def test_short_run_has_no_findings():
    assert convergence_finding(record_of({"critic/score/mean": NOISE[:28]})).verdict == "not known"
    assert convergence_finding(record_of({})).verdict == "not known"
    assert stability_finding(record_of({"critic/score/mean": [0.5]})).verdict == "not known"
    results = [check.ok for check in stability_checks(record_of({"critic/score/mean": 0.5 + NOISE}))]
    assert results == [True, *[None] * 5, True], "checks without data have no result"


def test_trend_matches_least_squares():
    values = 0.3 + 0.003 * np.arange(STEPS) + NOISE
    found = trend_of(series_of(enumerate(values)))
    slope, intercept = np.polyfit(np.arange(80, 120), values[80:], 1)
    assert found.value == pytest.approx(slope * 39)
    residuals = values[80:] - slope * np.arange(80, 120) - intercept
    error = np.sqrt((residuals**2).sum() / 38 / ((np.arange(40) - 19.5) ** 2).sum())
    assert found.high - found.value == pytest.approx(student.ppf(0.975, 38) * error * 39)


def test_calm_run_is_stable():
    found = stability_finding(record_of(CALM))
    assert found.verdict == "yes"
    assert found.numbers == {"num_checks": 7, "failed": []}


def spiked(base: np.ndarray, at: int, value: float) -> np.ndarray:
    return np.where(np.arange(STEPS) == at, value, base)


@pytest.mark.parametrize(
    ("metric", "values", "check"),
    [
        ("critic/score/mean", np.where(np.arange(STEPS) < 90, 0.6, 0.4), "Reward holds"),
        ("actor/grad_norm", spiked(np.ones(STEPS), 7, 11.0), "No gradient spikes"),
        ("actor/ppo_kl", spiked(np.zeros(STEPS), 7, -0.2), "Small policy updates"),
        ("actor/pg_clipfrac", np.full(STEPS, 0.4), "Few clipped tokens"),
        ("actor/entropy", np.linspace(1, 0.0, STEPS) ** 4, "Entropy in range"),
        ("actor/entropy", np.linspace(1, 4, STEPS), "Entropy in range"),
        ("response_length/clip_ratio", np.full(STEPS, 0.2), "Few truncated responses"),
    ],
)
def test_check_fails_alone(metric, values, check):
    found = stability_finding(record_of({**CALM, metric: values}))
    assert found.verdict == "no"
    assert found.numbers["failed"] == [check]
    assert check.lower() in found.statement.lower()


def test_critic_check_needs_a_critic():
    curves = {**CALM, "critic/vf_explained_var": np.full(STEPS, -0.1)}
    assert stability_finding(record_of(curves)).verdict == "yes"
    config = load_config([], experiment="countdown_ppo_demo")
    assert stability_finding(record_of(curves, config=config)).numbers["failed"] == ["Critic explains the returns"]


@pytest.mark.parametrize(
    ("curves", "limit"),
    [
        ({}, "nothing found"),
        ({"reward/equal_group_share": np.full(STEPS, 0.7)}, "equal groups"),
        ({"response_length/clip_ratio": np.full(STEPS, 0.3)}, "response length"),
        ({"critic/score/mean": 0.3 + 0.004 * np.arange(STEPS)}, "number of steps"),
        ({"response_length/clip_ratio": np.full(STEPS, 0.3), "reward/equal_group_share": np.full(STEPS, 0.7)},
         "equal groups, response length"),
    ],
)  # fmt: skip
def test_learning_limits(curves, limit):
    assert learning_limit(record_of({**CALM, **curves})).verdict == limit


def test_gap_to_held_out_reward_is_overfitting():
    validations = {"step-000120": replace(random_result(1, 0.1, num_problems=200), name="step-000120")}
    assert learning_limit(record_of(CALM, validations=validations)).verdict == "overfitting"
    chosen = RunConfig(pass_rates=PassRatesConfig(samples=4))  # its rows are easier or harder than those held out
    assert learning_limit(record_of(CALM, validations=validations, config=chosen)).verdict == "nothing found"


def test_groups_of_one_are_ignored():
    curves = {**CALM, "reward/equal_group_share": np.ones(STEPS)}
    config = load_config(["rollout.samples_per_prompt=1"], experiment="countdown_ppo_demo")
    assert learning_limit(record_of(curves, config=config)).verdict == "nothing found"


def test_phases_sum_to_step_without_first():
    curves = {
        "timing_s/gen": [9.0, 2.0, 2.0],
        "timing_s/environment": [4.0, 4.0, 4.0],
        "timing_s/update_actor": [1.0, 1.0, 1.0],
        "timing_s/step": [15.0, 7.5, 7.5],
        "timing_s/testing": [5.0],
    }
    record = record_of(curves)
    assert mean_phases(record) == {"gen": 2.0, "environment": 4.0, "update_actor": 1.0, "other": 0.5}
    found = speed_limit(record)
    assert found.verdict == "environment"
    assert found.numbers == {"gen": 2 / 7.5, "environment": 4 / 7.5, "update_actor": 1 / 7.5, "other": 0.5 / 7.5}
    assert speed_limit(record_of({})).verdict == "not known"


def test_entropy_check_uses_token_entropy():
    record = record_of({"actor/entropy": [0.005] * 30, "actor/token_entropy": [0.3] * 30})
    (check,) = (check for check in stability_checks(record) if check.name == "Entropy in range")
    assert (check.metric, check.ok) == ("actor/token_entropy", True)


@pytest.mark.parametrize(("num_problems", "verdict"), [(1, "no change found"), (5, "no change found"), (6, "yes")])
def test_learned_needs_enough_problems(num_problems, verdict):
    before, after = (
        result([problem(index, [score]) for index in range(num_problems)], name=name, step=step)
        for score, name, step in ((0.0, "before", 0), (1.0, "after", 20))
    )
    record = record_of({}, validations={"before": before, "after": after})
    assert learning_finding(record).verdict == verdict
