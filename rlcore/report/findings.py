"""Conclusions from a run's numbers, by rules that are printed beside each, and the checks of stability."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

from pydantic import JsonValue

from rlcore.report.document import (
    Cell,
    Finding,
    Kind,
    Table,
    Tone,
    compact,
    duration,
    fixed,
    interval,
    percent,
    signed_interval,
    table,
)
from rlcore.report.performance import PHASES, mean_phases
from rlcore.report.record import RunRecord
from rlcore.report.series import MIN_STEPS, Series, first_tenth, last_tenth, last_third, late_mean, smooth, trend_of

# Each limit with the reason for its size.
SMALLEST_CHANGE = 0.01  # of the range of scores: a smaller change over a third of the run counts as none
MIN_PROBLEMS = 6  # fewer could all have got better by chance more often than once in twenty (2 x 0.5^5 = 0.06)
LARGEST_EQUAL_SHARE = 0.5  # over this, most prompts of a batch teach nothing
LARGEST_GAP = 0.1  # of the range of scores, by which the training reward may exceed the held-out reward
GRAD_SPIKE = 10.0  # the optimizer clips, but a gradient ten times the usual one comes from a batch unlike the others
LARGEST_PPO_KL = 0.1  # nats a token in one step: the ratio leaves the usual clip range of 0.2 for many tokens
LARGEST_CLIP_SHARE = 0.3  # more clipped tokens than this, and much of the batch gives no gradient
SMALLEST_ENTROPY = 0.01  # nats a token: answers to a prompt are then all but identical and nothing is explored
ENTROPY_GROWTH = 2.0  # a policy that doubles its entropy is being taken apart
LARGEST_FALL = 0.1  # of the range of scores, from the best stretch to the end
LARGEST_CUT_SHARE = 0.05  # answers cut at the limit are scored as wrong, whatever they were about to say


def findings_of(record: RunRecord) -> tuple[Finding, ...]:
    """Learned, converged, stable, and by what learning and speed are limited."""
    return (
        learning_finding(record),
        convergence_finding(record),
        stability_finding(record),
        learning_limit(record),
        speed_limit(record),
    )


def learning_finding(record: RunRecord) -> Finding:
    """Whether the held-out reward rose."""
    rule = (
        "Mean of the difference after − before on the same held-out problems; learned if its interval excludes 0, over "
        f"{MIN_PROBLEMS} problems or more."
    )
    finding = partial(Finding, "Learned", rule=rule)
    found = next((row for row in record.paired if row.statistic == record.reward_statistic), None)
    if found is None:
        why = "There are no two validations of the same held-out problems to compare."
        return finding("not known", "muted", why)
    gain, wins, losses = found.paired.difference, found.paired.wins, found.paired.losses
    tone: Tone = "good"
    went, verdict, end = "rose", "yes", ""
    if not gain.excludes_zero or found.num_problems < MIN_PROBLEMS:
        went, verdict, tone, end = "went", "no change found", "watch", " could be chance"
    elif gain.value < 0:
        went, verdict, tone = "fell", "got worse", "bad"
    text = (
        f"The held-out reward {went} from {interval(found.first)} to {interval(found.second)}: "
        f"{signed_interval(gain)}{end}; better on {wins}, worse on {losses} of {found.num_problems} problems."
    )
    values: dict[str, JsonValue] = {
        "difference": asdict(gain),
        "wins": wins,
        "losses": losses,
        "num_problems": found.num_problems,
    }
    return finding(verdict, tone, text, numbers=values)


def convergence_finding(record: RunRecord) -> Finding:
    """Whether the training reward has stopped changing."""
    rule = (
        "Least-squares trend of the training reward over the last third of the steps: still changing if its 95% "
        f"interval excludes 0 and it is at least {SMALLEST_CHANGE:g} of the range of scores; else converged."
    )
    finding = partial(Finding, "Converged", rule=rule)
    series = record.series("critic/score/mean")
    trend = None if series is None else trend_of(series)
    if series is None or trend is None:
        return finding("not known", "muted", f"A trend needs {MIN_STEPS} steps in the last third of the run.")
    num_steps = len(last_third(series))
    shown = f"{signed_interval(trend)} over the last {num_steps} steps"
    tone: Tone = "watch"
    verdict, text = "still rising", f"was still rising: {shown}. More steps would likely help"
    if not trend.excludes_zero or abs(trend.value) < SMALLEST_CHANGE * score_range(record):
        verdict, tone, text = "yes", "good", f"no longer moves: {shown}"
    elif trend.value < 0:
        verdict, tone, text = "falling", "bad", f"was falling: {shown}"
    values: dict[str, JsonValue] = {"change": asdict(trend), "num_steps": num_steps}
    return finding(verdict, tone, f"The training reward {text}.", numbers=values)


def stability_finding(record: RunRecord) -> Finding:
    """Whether every check passes."""
    finding = partial(Finding, "Stable", rule="Stable if every check in the table of checks that could be made passes.")
    if len(record.training_steps) < 2:
        return finding("not known", "muted", "One step says nothing about stability.")
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
    """What keeps the reward from being higher, as far as the metrics show it."""
    rule = (
        f"In the last third of the steps: over {LARGEST_EQUAL_SHARE:.0%} of groups of equal score, over "
        f"{LARGEST_CUT_SHARE:.0%} of answers cut, training reward over the held-out one by more than {LARGEST_GAP:g} "
        "of the range of scores (not where rows are chosen by their pass rates), or a reward that still rises."
    )
    finding = partial(Finding, "Learning limited by", rule=rule)
    if len(record.training_steps) < MIN_STEPS:
        return finding("not known", "muted", f"Fewer than {MIN_STEPS} steps say little about what limits.")
    limits = list(_limits(record))
    if not limits:
        text = "None of the stated limits is reached: data, length limit, overfitting and number of steps are not it."
        return finding("nothing found", "good", text)
    verdict, values = ", ".join(name for name, _, _ in limits), {name: value for name, value, _ in limits}
    return finding(verdict, "watch", " ".join(text for _, _, text in limits), numbers=values)


def _limits(record: RunRecord) -> Iterable[tuple[str, float, str]]:
    """(short name, number, sentence) of each limit reached."""
    equal, cut = record.series("reward/equal_group_share"), record.series("response_length/clip_ratio")
    rewards = record.series("critic/score/mean")
    grouped = record.config.rollout.samples_per_prompt > 1
    if grouped and equal is not None and (late := late_mean(equal)) > LARGEST_EQUAL_SHARE:
        high = rewards is not None and late_mean(rewards) > 0.5 * score_range(record)
        why = "most are solved every time: harder problems would teach more" if high else "most are never solved"
        yield "equal groups", late, f"{percent(late)} of prompts get the same score on every answer; {why}."
    if cut is not None and (late := late_mean(cut)) > LARGEST_CUT_SHARE:
        limit = record.config.rollout.max_response_tokens
        yield "answer length", late, f"{percent(late)} of answers are cut at {limit} tokens."
    held_out = record.held_out(record.reward_statistic)
    if rewards is not None and held_out and held_out[-1][0] > 0 and not record.config.pass_rates.is_enabled:
        gap = last_tenth(rewards) - held_out[-1][1].value
        if gap > LARGEST_GAP * score_range(record):
            yield "overfitting", gap, f"The training reward is {fixed(gap)} above the held-out one."
    trend = None if rewards is None else trend_of(rewards)
    if trend is not None and trend.low > 0 and trend.value >= SMALLEST_CHANGE * score_range(record):
        yield "number of steps", trend.value, "The reward was still rising when the run ended."


def speed_limit(record: RunRecord) -> Finding:
    """The phase that takes most of a step."""
    rule = "The phase with the largest share of the mean step, first step left out (it warms up)."
    finding = partial(Finding, "Speed limited by", rule=rule)
    phases = mean_phases(record)
    if not phases:
        return finding("not known", "muted", "No phase has been timed.")
    shares = {name: seconds / sum(phases.values()) for name, seconds in phases.items()}
    top, *rest = sorted(shares, key=lambda name: -shares[name])[:3]
    then = ", ".join(f"{PHASES[name][0].lower()} {percent(shares[name])}" for name in rest)
    title = PHASES[top][0]
    text = f"{title} takes {percent(shares[top])} of a step of {duration(record.step_s)}"
    return finding(title.lower(), "muted", f"{text}; then {then}." if then else f"{text}.", numbers=shares)


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `ok` is None where the run has no such metric."""

    name: str
    metric: str
    rule: str
    measured: str
    value: float | None
    ok: bool | None


CheckResult = tuple[str, float, bool]
Rule = tuple[str, str, str, Callable[[Series, RunRecord], CheckResult]]
"""A check's name, its metric, the rule in words, and the rule itself: what was measured, as text and number; passed."""


def _fall(series: Series, record: RunRecord) -> CheckResult:
    curve = smooth(series)
    fall = float(curve.max() - curve.iloc[-1])
    return f"{fixed(fall)} below the best", fall, fall <= LARGEST_FALL * score_range(record)


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
     f"smoothed, the end is at most {LARGEST_FALL:g} of the range of scores below the best stretch", _fall),
    ("Gradient has no spikes", "actor/grad_norm", f"largest ≤ {GRAD_SPIKE:g} × median", _spike),
    ("Policy moves in small steps", "actor/ppo_kl", f"largest size ≤ {LARGEST_PPO_KL:g} nats/token", _largest),
    ("Few tokens are clipped", "actor/pg_clipfrac", f"mean over the last third ≤ {LARGEST_CLIP_SHARE:.0%}",
     partial(_late_share, LARGEST_CLIP_SHARE)),
    ("Entropy is alive", "actor/entropy",
     f"last third ≥ {SMALLEST_ENTROPY:g} nats/token and ≤ {ENTROPY_GROWTH:g} × the first tenth", _entropy),
    ("Answers end by themselves", "response_length/clip_ratio",
     f"cut answers in the last third ≤ {LARGEST_CUT_SHARE:.0%}", partial(_late_share, LARGEST_CUT_SHARE)),
    ("Critic explains returns", "critic/vf_explained_var", "mean over the last third > 0", _explained),
)  # fmt: skip


def stability_checks(record: RunRecord) -> tuple[Check, ...]:
    """All checks, in the order of the report; that of the critic where there is one."""
    checks = []
    for name, metric, rule, judge in _RULES:
        if metric.startswith("critic/vf") and record.config.critic is None:
            continue
        if metric == "actor/entropy" and record.series("actor/token_entropy") is not None:
            metric = "actor/token_entropy"
        series = record.series(metric)
        judged = ("not measured", None, None) if series is None else judge(series, record)
        checks.append(Check(name, metric, rule, *judged))
    return (*checks, _nonfinite(record))


def _nonfinite(record: RunRecord) -> Check:
    steps = [(step.step, step.nonfinite) for step in record.steps if step.nonfinite]
    names = sorted({name for _, found in steps for name in found})
    measured = f"{', '.join(names)} at {len(steps)} steps, first {steps[0][0]}" if steps else "none"
    rule = "no metric is NaN or infinite at any step"
    return Check("Numbers are finite", "all", rule, measured, float(len(steps)), not steps if record.steps else None)


def score_range(record: RunRecord) -> float:
    """Highest less lowest score of any answer in the run; 1 where nothing is known."""
    high, low = record.series("critic/score/max"), record.series("critic/score/min")
    if high is None or low is None:
        return 1.0
    return float(high.max() - low.min()) or 1.0


_RESULTS = {
    True: Cell("passes", True, "good"),
    False: Cell("fails", False, "bad"),
    None: Cell("no data", None, "muted"),
}


def check_table(record: RunRecord) -> Table:
    """The checks of stability."""
    rows = [
        (check.name, _RESULTS[check.ok], Cell(check.measured, check.value), check.rule, check.metric)
        for check in stability_checks(record)
    ]
    columns: dict[str, Kind] = {"Check": "text", "Result": "text", "Measured": "text", "Rule": "text", "Metric": "code"}
    return table("checks", "Checks of stability", columns, rows)
