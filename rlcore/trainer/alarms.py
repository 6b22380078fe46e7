"""Numbers gone wrong, found in a step's answers and metrics. What is done about each: `alarms` in the settings."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.config import RunConfig
from rlcore.trainer.experience import Experience
from rlcore.workers.canary import HandOver

NON_FINITE = "non_finite"
SKIPPED = "alarm/update_skipped"
"""Metric: share of the step's updates of the policy that were left out; 1 too where no answer has a score. Absent where
none was."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: `name` and `action` as in the settings; `text` says value and bound."""

    name: str
    action: str
    text: str


def batch_alarms(config: RunConfig, experience: Experience) -> tuple[Alarm, ...]:
    """Alarms that the answers raise, before any update."""
    alarms = config.alarms
    found = []
    if alarms.equal_scores != "off" and _all_equal(experience):
        text = "all groups have answers of one score each: nothing to learn from"
        found.append(Alarm("equal_scores", alarms.equal_scores, text))
    if alarms.length != "off":
        at_limit = sum(rollout.finish_reason == "length" for rollout in experience.rollouts)
        share = at_limit / len(experience.rollouts)
        if share >= alarms.length_share:
            text = (
                f"{share:.0%} of the answers end at rollout.max_response_tokens={config.rollout.max_response_tokens}, "
                f"alarms.length_share is {alarms.length_share:g}"
            )
            found.append(Alarm("length", alarms.length, text))
    return tuple(found)


def update_alarms(config: RunConfig, metrics: Mapping[str, float]) -> tuple[Alarm, ...]:
    """Alarms that the update raises; its metrics may be missing where there was none."""
    alarms = config.alarms
    found = []
    norm = metrics.get("actor/grad_norm", 0.0)
    if alarms.grad_norm != "off" and (norm > alarms.grad_norm_above or (norm and SKIPPED in metrics)):
        text = f"the gradient's norm is {norm:.4g}, alarms.grad_norm_above is {alarms.grad_norm_above:g}"
        found.append(Alarm("grad_norm", alarms.grad_norm, text))
    entropy = metrics.get("actor/token_entropy", metrics.get("actor/entropy"))
    if alarms.entropy != "off" and entropy is not None and entropy < alarms.entropy_below:
        text = f"the policy's entropy is {entropy:.4g}, alarms.entropy_below is {alarms.entropy_below:g}"
        found.append(Alarm("entropy", alarms.entropy, text))
    kl = metrics.get("actor/ref_kl", metrics.get("actor/reward_kl_penalty"))
    if alarms.kl != "off" and kl is not None and kl > alarms.kl_above:
        text = f"the KL divergence from the reference is {kl:.4g}, alarms.kl_above is {alarms.kl_above:g}"
        found.append(Alarm("kl", alarms.kl, text))
    return tuple(found)


def hand_over_alarms(handed_over: HandOver) -> tuple[Alarm, ...]:
    """The alarm of a hand-over whose tensors are all right and whose log-probabilities are not as usual."""
    return (Alarm("canary", "tell", handed_over.warning),) if handed_over.warning else ()


def _all_equal(experience: Experience) -> bool:
    by_group: dict[int, set[float]] = {}
    scored = [
        (group, score.total)
        for group, score in zip(experience.group_ids, experience.scores, strict=True)
        if score.failure is None
    ]
    for group, total in scored:
        by_group.setdefault(group, set()).add(total)
    is_compared = len(by_group) < len(scored)  # an answer alone to its prompt has nothing to be equal to
    return is_compared and all(len(scores) == 1 for scores in by_group.values())
