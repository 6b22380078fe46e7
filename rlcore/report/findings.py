"""Findings about a run, and checks of its stability. Each finding follows from the run's metrics by a stated rule."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

from pydantic import JsonValue

from rlcore.report import document
from rlcore.report.document import Cell, Finding, Table, Tone, compact, duration, fixed, interval, percent
from rlcore.report.plots import MIN_STEPS, Series, first_tenth, last_tenth, last_third, late_mean, smooth, trend_of
from rlcore.report.record import RunRecord
from rlcore.report.run_sections import PHASES, mean_phases

SMALLEST_CHANGE = 0.01  # of the score range: a smaller change over a third of the run is ignored
LARGEST_DRIFT = 0.05  # of the score range: the interval of a converged reward's change stays below it
MIN_PROBLEMS = 6  # fewer may all improve by chance with a probability over 5% (2 x 0.5^5 = 0.06)
LARGEST_EQUAL_SHARE = 0.5  # above this, most prompts of a batch give no gradient
LARGEST_GAP = 0.1  # of the score range: training reward minus held-out reward
GRAD_SPIKE = 10.0  # times the median: a gradient of an unusual batch, although it is clipped
LARGEST_PPO_KL = 0.1  # nats per token in one step: many ratios leave the usual clip range of 0.2
LARGEST_CLIP_SHARE = 0.3  # above this, much of the batch gives no gradient
SMALLEST_ENTROPY = 0.01  # nats per token: below this, responses to a prompt are almost identical
ENTROPY_GROWTH = 2.0  # times the initial entropy: above this, the policy degrades
LARGEST_FALL = 0.1  # of the score range, from the best part to the end
LARGEST_CUT_SHARE = 0.05  # of responses: truncated responses are scored as wrong


def findings_of(record: RunRecord) -> tuple[Finding, ...]:
    """Return the findings about a run. A supervised run has no rewards, and therefore fewer findings."""
    of_rewards = (convergence_finding, stability_finding, learning_limit)
    found = (learning_finding, *(() if record.config.is_supervised else of_rewards), speed_limit)
    return tuple(find(record) for find in found)


def learning_finding(record: RunRecord) -> Finding:
    """Return a finding about whether the held-out reward rose."""
    rule = "Mean difference after − before on the same held-out problems; learned if its interval excludes 0, with "
    rule += f"at least {MIN_PROBLEMS} problems."
    finding = partial(Finding, "Learned", rule=rule)
    found = next((row for row in record.paired if row.statistic == record.reward_statistic), None)
    if found is None:
        return finding("not known", "muted", "There are no two validations on the same held-out problems.")
    gain, wins, losses = found.paired.difference, found.paired.wins, found.paired.losses
    tone: Tone = "good" if gain.value >= 0 else "bad"
    went, verdict, end = ("rose", "yes", "") if gain.value >= 0 else ("fell", "got worse", "")
    if not gain.excludes_zero or found.num_problems < MIN_PROBLEMS:
        went, verdict, tone, end = "went", "no change found", "watch", ", which may be chance"
    text = (
        f"The held-out reward {went} from {interval(found.first)} to {interval(found.second)}: "
        f"{document.signed_interval(gain)}{end}; better on {wins}, worse on {losses} of {found.num_problems} problems."
    )
    counts = {"wins": wins, "losses": losses, "num_problems": found.num_problems}
    return finding(verdict, tone, text, numbers={"difference": asdict(gain), **counts})


def convergence_finding(record: RunRecord) -> Finding:
    """Return a finding about whether the training reward has stopped changing."""
    rule = "Least-squares trend of the training reward over the last third of the steps: still changing if its 95% "
    rule += f"interval excludes 0 and its size is at least {SMALLEST_CHANGE:g} of the score range; converged if the "
    rule += f"interval is within {LARGEST_DRIFT:g} of the score range around 0; otherwise unclear."
    finding = partial(Finding, "Converged", rule=rule)
    series = record.series("critic/score/mean")
    trend = None if series is None else trend_of(series)
    if series is None or trend is None:
        return finding("not known", "muted", f"A trend needs {MIN_STEPS} steps in the last third of the run.")
    num_steps = len(last_third(series))
    shown = f"{document.signed_interval(trend)} over the last {num_steps} steps"
    tone: Tone = "watch"
    verdict, text = "still rising", f"was still rising: {shown}. More steps would likely help"
    if not trend.excludes_zero or abs(trend.value) < SMALLEST_CHANGE * score_range(record):
        verdict, tone, text = "yes", "good", f"no longer changes: {shown}"
        if max(-trend.low, trend.high) > LARGEST_DRIFT * score_range(record):
            verdict, tone, text = "unclear", "watch", f"may still change: {shown}. More steps would show it"
    elif trend.value < 0:
        verdict, tone, text = "falling", "bad", f"was falling: {shown}"
    values: dict[str, JsonValue] = {"change": asdict(trend), "num_steps": num_steps}
    return finding(verdict, tone, f"The training reward {text}.", numbers=values)


def stability_finding(record: RunRecord) -> Finding:
    """Return a finding about whether every stability check passes."""
    finding = partial(Finding, "Stable", rule="Stable if every check with data passes; see the table of checks.")
    if len(record.training_steps) < 2:
        return finding("not known", "muted", "Stability needs at least two steps.")
    checks = [check for check in stability_checks(record) if check.ok is not None]
    failed = [check for check in checks if not check.ok]
    values: dict[str, JsonValue] = {"num_checks": len(checks), "failed": [check.name for check in failed]}
    if not failed:
        text = (
            f"All {len(checks)} checks pass: reward, gradient, step size, clipping, entropy, lengths, finite numbers."
        )
        return finding("yes", "good", text, numbers=values)
    text = "; ".join(f"{check.name.lower()}: no ({check.measured}; rule: {check.rule})" for check in failed)
    return finding("no", "bad", f"{text[0].upper()}{text[1:]}.", numbers=values)


def learning_limit(record: RunRecord) -> Finding:
    """Return a finding that names what limits the reward in the last third of the steps. Examples are many groups with
    equal scores and many truncated responses."""
    rule = (
        f"In the last third of the steps: over {LARGEST_EQUAL_SHARE:.0%} of groups with equal scores, over "
        f"{LARGEST_CUT_SHARE:.0%} of responses truncated, training reward above held-out reward by more than "
        f"{LARGEST_GAP:g} of the score range (unless rows are chosen by pass rates), or a reward that still rises."
    )
    finding = partial(Finding, "Learning limited by", rule=rule)
    if len(record.training_steps) < MIN_STEPS:
        return finding("not known", "muted", f"Needs at least {MIN_STEPS} steps.")
    limits = list(_limits(record))
    if not limits:
        text = "No limit is reached: data, response length, overfitting or number of steps."
        return finding("nothing found", "good", text)
    names, values, texts = zip(*limits, strict=True)
    return finding(", ".join(names), "watch", " ".join(texts), numbers=dict(zip(names, values, strict=True)))


def _limits(record: RunRecord) -> Iterable[tuple[str, float, str]]:
    equal, cut = record.series("reward/equal_group_share"), record.series("response_length/clip_ratio")
    rewards = record.series("critic/score/mean")
    grouped = record.config.rollout.samples_per_prompt > 1
    if grouped and equal is not None and (late := late_mean(equal)) > LARGEST_EQUAL_SHARE:
        high = rewards is not None and late_mean(rewards) > 0.5 * score_range(record)
        why = "most are always solved, so harder problems would help" if high else "most are never solved"
        yield "equal groups", late, f"{percent(late)} of prompts get the same score on every response; {why}."
    if cut is not None and (late := late_mean(cut)) > LARGEST_CUT_SHARE:
        limit = record.config.rollout.max_response_tokens
        yield "response length", late, f"{percent(late)} of responses are truncated at {limit} tokens."
    held_out = record.held_out(record.reward_statistic)
    if rewards is not None and held_out and held_out[-1][0] > 0 and not record.config.pass_rates.is_enabled:
        gap = last_tenth(rewards) - held_out[-1][1].value
        if gap > LARGEST_GAP * score_range(record):
            yield "overfitting", gap, f"The training reward is {fixed(gap)} above the held-out one."
    trend = None if rewards is None else trend_of(rewards)
    if trend is not None and trend.low > 0 and trend.value >= SMALLEST_CHANGE * score_range(record):
        yield "number of steps", trend.value, "The reward was still rising when the run ended."


def speed_limit(record: RunRecord) -> Finding:
    """Return a finding that names the phase that takes the largest share of a training step's time."""
    rule = "Phase with the largest share of the mean step, without the first step (warm-up)."
    finding = partial(Finding, "Speed limited by", rule=rule)
    phases = mean_phases(record)
    if not phases:
        return finding("not known", "muted", "No phase was timed.")
    shares = {name: seconds / sum(phases.values()) for name, seconds in phases.items()}
    top, *rest = sorted(shares, key=lambda name: -shares[name])[:3]
    then = ", ".join(f"{PHASES[name][0].lower()} {percent(shares[name])}" for name in rest)
    title = PHASES[top][0]
    text = f"{title} takes {percent(shares[top])} of a step of {duration(record.step_s)}"
    return finding(title.lower(), "muted", f"{text}; then {then}." if then else f"{text}.", numbers=shares)


@dataclass(frozen=True, slots=True)
class Check:
    """A stability check with its result. `ok` is None if the metric is missing."""

    name: str
    metric: str
    rule: str
    measured: str
    value: float | None
    ok: bool | None


CheckResult = tuple[str, float, bool]
Rule = tuple[str, str, str, Callable[[Series, RunRecord], CheckResult]]
"""The name, metric and description of a check, and the function that performs the check."""


def _fall(series: Series, record: RunRecord) -> CheckResult:
    curve = smooth(series)
    fall = float(curve.max() - curve.iloc[-1])
    return f"{fixed(fall)} below the maximum", fall, fall <= LARGEST_FALL * score_range(record)


def _spike(series: Series, record: RunRecord) -> CheckResult:
    median = float(series.median())
    spike = float(series.max()) / median if median > 0 else 1.0
    return f"{compact(spike, 3)} × median", spike, spike <= GRAD_SPIKE


def _largest(series: Series, record: RunRecord) -> CheckResult:
    size = float(series.abs().max())
    return f"{compact(size, 3)} nats/token", size, size <= LARGEST_PPO_KL


def _late_share(limit: float, series: Series, record: RunRecord) -> CheckResult:
    share = late_mean(series)
    return percent(share, 1), share, share <= limit


def _entropy(series: Series, record: RunRecord) -> CheckResult:
    begin, end = first_tenth(series), late_mean(series)
    grown = begin > 0 and end > ENTROPY_GROWTH * begin
    measured = f"{compact(begin, 3)} → {compact(end, 3)} nats/token"
    return measured, end, end >= SMALLEST_ENTROPY and not grown


def _explained(series: Series, record: RunRecord) -> CheckResult:
    share = late_mean(series)
    return fixed(share), share, share > 0


_RULES: tuple[Rule, ...] = (
    ("Reward holds", "critic/score/mean",
     f"smoothed, the end is at most {LARGEST_FALL:g} of the score range below the maximum", _fall),
    ("No gradient spikes", "actor/grad_norm", f"largest ≤ {GRAD_SPIKE:g} × median", _spike),
    ("Small policy updates", "actor/ppo_kl", f"largest absolute value ≤ {LARGEST_PPO_KL:g} nats/token", _largest),
    ("Few clipped tokens", "actor/pg_clipfrac", f"mean over the last third ≤ {LARGEST_CLIP_SHARE:.0%}",
     partial(_late_share, LARGEST_CLIP_SHARE)),
    ("Entropy in range", "actor/entropy",
     f"last third ≥ {SMALLEST_ENTROPY:g} nats/token and ≤ {ENTROPY_GROWTH:g} × the first tenth", _entropy),
    ("Few truncated responses", "response_length/clip_ratio",
     f"truncated responses in the last third ≤ {LARGEST_CUT_SHARE:.0%}", partial(_late_share, LARGEST_CUT_SHARE)),
    ("Critic explains the returns", "critic/vf_explained_var", "mean over the last third > 0", _explained),
)  # fmt: skip


def stability_checks(record: RunRecord) -> tuple[Check, ...]:
    """Return all checks in the order of the report. The critic's check is included only if there is a critic."""
    checks = []
    for name, metric, rule, evaluate in _RULES:
        if metric.startswith("critic/vf") and record.config.critic is None:
            continue
        if metric == "actor/entropy" and record.series("actor/token_entropy") is not None:
            metric = "actor/token_entropy"
        series = record.series(metric)
        result = ("not measured", None, None) if series is None else evaluate(series, record)
        checks.append(Check(name, metric, rule, *result))
    return (*checks, _nonfinite(record))


def _nonfinite(record: RunRecord) -> Check:
    steps = [(step.step, step.nonfinite) for step in record.steps if step.nonfinite]
    names = sorted({name for _, found in steps for name in found})
    measured = f"{', '.join(names)} at {len(steps)} steps, first {steps[0][0]}" if steps else "none"
    rule = "no metric is NaN or infinite at any step"
    return Check("Finite numbers", "all", rule, measured, float(len(steps)), not steps if record.steps else None)


def score_range(record: RunRecord) -> float:
    """Return the difference between the highest and lowest training score of the run. Return 1 if this difference is 0
    or unknown."""
    high, low = record.series("critic/score/max"), record.series("critic/score/min")
    return 1.0 if high is None or low is None else float(high.max() - low.min()) or 1.0


_RESULTS = {
    True: Cell("passes", True, "good"),
    False: Cell("fails", False, "bad"),
    None: Cell("no data", None, "muted"),
}


def check_table(record: RunRecord) -> Table:
    """Return the table of stability checks."""
    rows = [
        (check.name, _RESULTS[check.ok], Cell(check.measured, check.value), check.rule, check.metric)
        for check in stability_checks(record)
    ]
    return document.table("checks", "Checks of stability",
                          {"Check": "text", "Result": "text", "Measured": "text", "Rule": "text", "Metric": "code"},
                          rows)  # fmt: skip
