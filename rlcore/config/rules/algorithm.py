"""Rules of the algorithm: what each method needs, and settings that would have no effect."""

import re
from importlib.util import find_spec
from pathlib import Path

from rlcore.config.algo import GROUP_ADVANTAGES, AlgoConfig, KlConfig
from rlcore.config.problems import Problem, did_you_mean
from rlcore.config.rules.registry import rule
from rlcore.config.run import RunConfig
from rlcore.errors import MODULES_ARE_FOUND

DISCOUNTED_ADVANTAGES: frozenset[str] = frozenset({"gae", "reinforce_pp"})
"""Advantages that read `algo.gamma`."""
POLICY_LOSSES: tuple[str, ...] = ("ppo_clip", "gspo", "cispo")
"""Losses that are registered under a name in `rlcore/algos/losses.py`."""


@rule("algo.policy_loss")
def policy_loss_is_known(config: RunConfig) -> Problem | None:
    """The loss is one of ours, or a function of your own."""
    loss = config.algo.policy_loss
    if loss in POLICY_LOSSES or ":" in loss:
        return None
    remedy = f"{did_you_mean(loss, POLICY_LOSSES)}There are {', '.join(POLICY_LOSSES)}"
    return Problem("algo.policy_loss", "must be a loss that is there, or `module:function` of your own", loss, remedy)


@rule("algo.policy_loss")
def own_loss_is_found(config: RunConfig) -> Problem | None:
    """A loss of one's own has a module that is found, and a function that is named there."""
    loss = config.algo.policy_loss
    module, colon, function = loss.partition(":")
    why = _not_found(module, function) if colon else None
    if why is None:
        return None
    return Problem("algo.policy_loss", "must name a function as module:function", f"{loss} ({why})", MODULES_ARE_FOUND)


def _not_found(module: str, function: str) -> str | None:
    """Why there is no such function; None where there is one, or only an import could tell: that takes seconds."""
    try:
        spec = find_spec(module)
    except Exception as error:  # importing the package that holds it can raise anything
        return f"{type(error).__name__}: {error}"
    if spec is None:
        return f"there is no module {module}"
    file = Path(spec.origin or "")
    source = file.read_text(encoding="utf-8", errors="replace") if file.suffix == ".py" and file.is_file() else None
    if source is None or "import *" in source or re.search(rf"\b{re.escape(function)}\b", source):
        return None
    return f"{file} has no {function}"


@rule("algo.advantage", "rollout.samples_per_prompt")
def groups_have_members(config: RunConfig) -> Problem | None:
    """A method that compares answers to one prompt needs two of them."""
    method, samples = config.algo.advantage, config.rollout.samples_per_prompt
    if method not in GROUP_ADVANTAGES or samples >= 2:
        return None
    remedy = "Set it to 2 or more (8 is usual), or algo.advantage to gae, reinforce_pp or remax"
    return Problem(
        "rollout.samples_per_prompt", f"must be at least 2 with algo.advantage={method}", str(samples), remedy
    )


@rule("algo.dynamic_sampling.enabled", "rollout.samples_per_prompt")
def dynamic_sampling_has_groups(config: RunConfig) -> Problem | None:
    """A group of one always scores the same, so all of them would be dropped."""
    if not config.algo.dynamic_sampling.enabled or config.rollout.samples_per_prompt >= 2:
        return None
    got = f"true with samples_per_prompt {config.rollout.samples_per_prompt}"
    remedy = "Sample more answers to each prompt, or switch it off"
    return Problem("algo.dynamic_sampling.enabled", "needs rollout.samples_per_prompt of 2 or more", got, remedy)


@rule("algo.advantage", "critic")
def gae_has_a_critic(config: RunConfig) -> Problem | None:
    """The generalized advantage estimate is made from values."""
    if config.algo.advantage != "gae" or config.critic is not None:
        return None
    return Problem("critic", "is needed by algo.advantage=gae", "null", "Add critic=default, or choose algo=grpo")


@rule("algo.advantage", "critic")
def critic_is_used(config: RunConfig) -> Problem | None:
    """A critic is trained for a method that reads its values."""
    method = config.algo.advantage
    if method == "gae" or config.critic is None:
        return None
    remedy = "Leave out the critic's settings (critic=none), or choose algo=ppo"
    return Problem("critic", f"has no use with algo.advantage={method}", "settings of a critic", remedy)


@rule("algo.kl")
def kl_settings_have_effect(config: RunConfig) -> Problem | None:
    """KL settings come with a reference to measure against."""
    kl, default = config.algo.kl, KlConfig()
    if kl.where != "off":
        return None
    given = [name for name in KlConfig.model_fields if name != "where" and getattr(kl, name) != getattr(default, name)]
    # A coefficient of 0 says the same as off.
    given = [name for name in given if (name, getattr(kl, name)) != ("coef", 0.0)]
    if not given:
        return None
    got = ", ".join(f"{name} {getattr(kl, name)}" for name in given) + " with where off"
    remedy = "Set algo.kl.where=loss or algo.kl.where=reward, or leave the other KL settings out"
    return Problem(f"algo.kl.{given[0]}", "has no effect without a reference (algo.kl.where)", got, remedy)


@rule("algo.advantage", "algo.lam")
def lambda_has_effect(config: RunConfig) -> Problem | None:
    """Lambda is read by the generalized advantage estimate alone."""
    if config.algo.advantage == "gae" or config.algo.lam == AlgoConfig.model_fields["lam"].default:
        return None
    got = f"{config.algo.lam} with advantage {config.algo.advantage}"
    return Problem("algo.lam", "has an effect with algo.advantage=gae alone", got, "Leave it out, or choose algo=ppo")


@rule("algo.advantage", "algo.gamma")
def gamma_has_effect(config: RunConfig) -> Problem | None:
    """Gamma is read by the methods that discount over tokens."""
    if config.algo.advantage in DISCOUNTED_ADVANTAGES or config.algo.gamma == AlgoConfig.model_fields["gamma"].default:
        return None
    got = f"{config.algo.gamma} with advantage {config.algo.advantage}"
    return Problem("algo.gamma", "has an effect with gae and reinforce_pp alone", got, "Leave it out")


@rule("algo.overlong", "rollout.max_response_tokens")
def overlong_buffer_fits(config: RunConfig) -> Problem | None:
    """The penalty grows within the answer."""
    overlong, limit = config.algo.overlong, config.rollout.max_response_tokens
    if not overlong.enabled or overlong.buffer_tokens <= limit:
        return None
    got = f"{overlong.buffer_tokens} with a limit of {limit}"
    return Problem("algo.overlong.buffer_tokens", "must be at most rollout.max_response_tokens", got, "Lower it")


@rule("alarms.kl", "algo.kl.where")
def kl_alarm_has_a_reference(config: RunConfig) -> Problem | None:
    """An alarm that is meant to stop a run can be raised at all."""
    if config.alarms.kl == "off" or config.algo.kl.where != "off":
        return None
    got = f"{config.alarms.kl} with algo.kl.where off"
    remedy = "Set algo.kl.where=loss or reward (with algo.kl.coef=0 the KL is measured and changes nothing)"
    return Problem("alarms.kl", "needs a reference to measure the KL from", got, remedy)


@rule("algo.importance.mode", "trainer.old_logprobs")
def importance_has_two_sides(config: RunConfig) -> Problem | None:
    """The correction compares the trainer's probabilities with the sampler's."""
    if config.algo.importance.mode == "off" or config.trainer.old_logprobs != "behavior":
        return None
    got = f"{config.algo.importance.mode} with old_logprobs behavior"
    remedy = "Set trainer.old_logprobs=auto, or algo.importance.mode=off"
    return Problem("algo.importance.mode", "has no effect with trainer.old_logprobs=behavior", got, remedy)


@rule("critic.warmup_steps", "trainer.total_steps")
def policy_is_trained(config: RunConfig) -> Problem | None:
    """The critic's head start leaves steps for the policy."""
    if config.critic is None or config.critic.warmup_steps < config.trainer.total_steps:
        return None
    got = f"{config.critic.warmup_steps} with total_steps {config.trainer.total_steps}"
    return Problem("critic.warmup_steps", "must be under trainer.total_steps", got, "Lower it, or train for longer")
