"""Whether training was stable: checks with stated limits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from rlcore.report import numbers
from rlcore.report.record import RunRecord
from rlcore.report.series import Series

LATE = 1 / 3
"""Share of the run that counts as its end."""

# Each limit with the reason for its size.
GRAD_SPIKE = 10.0  # the optimizer clips, but a gradient ten times the usual one comes from a batch unlike the others
LARGEST_PPO_KL = 0.1  # nats a token in one step: the ratio leaves the usual clip range of 0.2 for many tokens
LARGEST_CLIP_SHARE = 0.3  # more clipped tokens than this, and much of the batch gives no gradient
SMALLEST_ENTROPY = 0.01  # nats a token: answers to a prompt are then all but identical and nothing is explored
ENTROPY_GROWTH = 2.0  # a policy that doubles its entropy is being taken apart
LARGEST_FALL = 0.1  # of the range of scores, from the best stretch to the end
LARGEST_CUT_SHARE = 0.05  # answers cut at the limit are scored as wrong, whatever they were about to say


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `ok` is None where the run has no such metric."""

    name: str
    metric: str
    rule: str
    measured: str
    value: float | None
    ok: bool | None


def stability_checks(record: RunRecord) -> tuple[Check, ...]:
    """All checks, in the order of the report."""
    return (*(_checked(record, *rule) for rule in _checks(record)), _nonfinite(record))


Judgement = tuple[str, float, bool]
Judge = Callable[[Series], Judgement]


def _checks(record: RunRecord) -> Iterable[tuple[str, str, str, Judge]]:
    yield (
        "Reward holds",
        "critic/score/mean",
        f"smoothed, the end is at most {LARGEST_FALL:g} of the range of scores below the best stretch",
        lambda series: _fall(series, record),
    )
    yield (
        "Gradient has no spikes",
        "actor/grad_norm",
        f"largest ≤ {GRAD_SPIKE:g} × median",
        lambda series: _ratio(series.values.max(), float(np.median(series.values)), GRAD_SPIKE, "× median"),
    )
    yield (
        "Policy moves in small steps",
        "actor/ppo_kl",
        f"largest size ≤ {LARGEST_PPO_KL:g} nats/token",
        lambda series: _at_most(np.abs(series.values).max(), LARGEST_PPO_KL, " nats/token"),
    )
    yield (
        "Few tokens are clipped",
        "actor/pg_clipfrac",
        f"mean over the last third ≤ {LARGEST_CLIP_SHARE:.0%}",
        lambda series: _share_at_most(series.tail(LATE).mean(), LARGEST_CLIP_SHARE),
    )
    yield (
        "Entropy is alive",
        "actor/token_entropy" if record.names("actor/token_entropy") else "actor/entropy",
        f"last third ≥ {SMALLEST_ENTROPY:g} nats/token and ≤ {ENTROPY_GROWTH:g} × the first tenth",
        _entropy,
    )
    yield (
        "Answers end by themselves",
        "response_length/clip_ratio",
        f"cut answers in the last third ≤ {LARGEST_CUT_SHARE:.0%}",
        lambda series: _share_at_most(series.tail(LATE).mean(), LARGEST_CUT_SHARE),
    )
    if record.config.critic is not None:
        yield (
            "Critic explains returns",
            "critic/vf_explained_var",
            "mean over the last third > 0",
            lambda series: _more_than_zero(series.tail(LATE).mean()),
        )


def _checked(record: RunRecord, name: str, metric: str, rule: str, judge: Judge) -> Check:
    series = record.series(metric)
    if series is None:
        return Check(name, metric, rule, "not measured", None, None)
    measured, value, ok = judge(series)
    return Check(name, metric, rule, measured, value, ok)


def _nonfinite(record: RunRecord) -> Check:
    steps = [(step.step, step.nonfinite) for step in record.steps if step.nonfinite]
    names = sorted({name for _, found in steps for name in found})
    measured = f"{', '.join(names)} at {len(steps)} steps, first {steps[0][0]}" if steps else "none"
    rule = "no metric is NaN or infinite at any step"
    return Check("Numbers are finite", "all", rule, measured, float(len(steps)), not steps if record.steps else None)


def _fall(series: Series, record: RunRecord) -> Judgement:
    best = float(series.smooth.max())
    fall = best - float(series.smooth[-1])
    limit = LARGEST_FALL * score_range(record)
    return f"{numbers.fixed(fall)} below the best", fall, fall <= limit


def _ratio(value: float, base: float, limit: float, unit: str) -> Judgement:
    found = float(value) / base if base > 0 else 1.0
    return f"{numbers.compact(found, 3)} {unit}", found, found <= limit


def _at_most(value: float, limit: float, unit: str) -> Judgement:
    return f"{numbers.compact(float(value), 3)}{unit}", float(value), bool(value <= limit)


def _share_at_most(value: float, limit: float) -> Judgement:
    return numbers.percent(value, 1), value, value <= limit


def _more_than_zero(value: float) -> Judgement:
    return numbers.fixed(value), value, value > 0


def _entropy(series: Series) -> Judgement:
    begin, end = float(series.head(0.1).mean()), series.tail(LATE).mean()
    grown = begin > 0 and end > ENTROPY_GROWTH * begin
    measured = f"{numbers.compact(begin, 3)} → {numbers.compact(end, 3)} nats/token"
    return measured, end, end >= SMALLEST_ENTROPY and not grown


def score_range(record: RunRecord) -> float:
    """Highest less lowest score of any answer in the run; 1 where nothing is known."""
    high, low = record.series("critic/score/max"), record.series("critic/score/min")
    if high is None or low is None:
        return 1.0
    return float(high.values.max() - low.values.min()) or 1.0
