"""Rules of the algorithm, batches, sampling, engines and devices."""

import re
from importlib.util import find_spec
from pathlib import Path

from rlcore.config.algo import ADVANTAGES, GROUP_ADVANTAGES, POLICY_LOSSES, UNGROUPED_ADVANTAGES, AlgoConfig
from rlcore.config.problems import Problem, did_you_mean
from rlcore.config.rules.registry import Rule, row, rule
from rlcore.config.run import RunConfig, value_at
from rlcore.errors import where_modules_are_found

DISCOUNTED_ADVANTAGES: frozenset[str] = frozenset({"gae", "reinforce_pp"})
"""Advantages that read `algo.gamma`."""
_DEFAULT = AlgoConfig()


def _is_known(field: str, known: tuple[str, ...]) -> Rule:
    """A loss or an advantage has a short name, or is the user's function, whose module is found and names it."""
    key = f"algo.{field}"

    def check(config: RunConfig) -> Problem | None:
        given = getattr(config.algo, field)
        module, colon, function = given.partition(":")
        if not colon and given not in known:
            remedy = f"{did_you_mean(given, known)}There are {', '.join(known)}"
            return Problem(key, "must be one that is there, or `module:function` of your own", given, remedy)
        why = _not_found(module, function) if colon else None
        if why is None:
            return None
        return Problem(
            key, "must name a function as module:function", f"{given} ({why})", where_modules_are_found(given)
        )

    return Rule(f"{field}_is_known", (key,), check)


def _not_found(module: str, function: str) -> str | None:
    """Why there is no such function; None where there is one, or only a slow import could find out."""
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


@rule("algo.kl")
def kl_settings_have_effect(config: RunConfig) -> Problem | None:
    """KL settings need a reference to measure against; a coefficient of 0 is the same as none."""
    given = [
        name
        for name, value in config.algo.kl
        if value != getattr(_DEFAULT.kl, name) and (name, value) not in (("coef", 0), ("where", value))
    ]
    if config.algo.kl.where != "off" or not given:
        return None
    got = ", ".join(f"{name} {getattr(config.algo.kl, name)}" for name in given) + " with where off"
    remedy = "Set algo.kl.where=loss or algo.kl.where=reward, or leave the other KL settings out"
    return Problem(f"algo.kl.{given[0]}", "has no effect without a reference (algo.kl.where)", got, remedy)


def _warmup_fits(stage: str, section: str, key: str = "trainer.total_steps") -> Rule:
    """The learning rate of a section reaches its peak before its stage ends."""

    def check(config: RunConfig) -> Problem | None:
        optim, total_steps = value_at(config, section), value_at(config, key)
        if optim is None or (section.startswith("warm_start") and not config.warm_start.enabled):
            return None
        steps, ratio = optim.warmup_steps, optim.warmup_ratio
        if steps > 0 and ratio > 0:
            got = f"warmup_steps {steps} and warmup_ratio {ratio}"
            return Problem(
                f"{section}.warmup_ratio", "must be 0 where warmup_steps is given", got, "Set one of the two"
            )
        if steps >= total_steps > 1 or steps > total_steps:
            got = f"{steps} with {key.rpartition('.')[2]} {total_steps}"
            return Problem(f"{section}.warmup_steps", f"must be under {key}", got, "Warm up for fewer steps")
        return None

    return Rule(f"{stage}_warmup_fits", (section, key), check)


RULES: tuple[Rule, ...] = (
    row("local_runtime_is_one_process", "runtime.num_workers", "runtime.backend",
        "must be 1 with runtime.backend=local",
        lambda c: c.runtime.backend == "ray" or c.runtime.num_workers == 1, "Set runtime.backend=ray"),
    _warmup_fits("policy", "optim"),
    _warmup_fits("critic", "critic.optim"),
    _warmup_fits("warm_start", "warm_start.optim", "warm_start.max_steps"),
    _is_known("policy_loss", tuple(POLICY_LOSSES)),
    _is_known("advantage", ADVANTAGES),
    row("groups_have_members", "rollout.samples_per_prompt", "algo.advantage",
        "must be at least 2 with an advantage that compares the answers to a prompt",
        lambda c: c.algo.advantage not in GROUP_ADVANTAGES or c.rollout.samples_per_prompt >= 2,
        "Set it to 2 or more (8 is usual), or algo.advantage to gae, reinforce_pp or remax"),
    row("dynamic_sampling_has_groups", "algo.dynamic_sampling.enabled", "rollout.samples_per_prompt",
        "needs rollout.samples_per_prompt of 2 or more",
        lambda c: not c.algo.dynamic_sampling.enabled or c.rollout.samples_per_prompt >= 2,
        "Sample more answers to each prompt, or switch it off"),
    row("dynamic_sampling_drops_what_is_zero", "algo.dynamic_sampling.enabled", "algo.advantage",
        "must be false with gae, reinforce_pp and remax, whose advantages in a group of equal scores are not 0",
        lambda c: not c.algo.dynamic_sampling.enabled or c.algo.advantage not in UNGROUPED_ADVANTAGES,
        "Leave it out, or choose algo=grpo"),
    row("gae_has_a_critic", "critic", "algo.advantage", "is needed by algo.advantage=gae",
        lambda c: c.algo.advantage != "gae" or c.critic is not None, "Add critic=default, or choose algo=grpo"),
    row("critic_is_used", "critic", "algo.advantage", "has no use except with algo.advantage=gae",
        lambda c: c.algo.advantage == "gae" or c.critic is None,
        "Leave out the critic's settings (critic=none), or choose algo=ppo"),
    kl_settings_have_effect,
    row("lambda_has_effect", "algo.lam", "algo.advantage", "has an effect with algo.advantage=gae alone",
        lambda c: c.algo.advantage == "gae" or c.algo.lam == _DEFAULT.lam, "Leave it out, or choose algo=ppo"),
    row("gamma_has_effect", "algo.gamma", "algo.advantage", "has an effect with gae and reinforce_pp alone",
        lambda c: c.algo.advantage in DISCOUNTED_ADVANTAGES or c.algo.gamma == _DEFAULT.gamma, "Leave it out"),
    row("kl_alarm_has_a_reference", "alarms.kl", "algo.kl.where", "needs a reference to measure the KL from",
        lambda c: c.alarms.kl == "off" or c.algo.kl.where != "off",
        "Set algo.kl.where=loss or reward (with algo.kl.coef=0 the KL is measured and changes nothing)"),
    row("importance_has_two_sides", "algo.importance.mode", "trainer.old_logprobs",
        "has no effect with trainer.old_logprobs=behavior",
        lambda c: c.algo.importance.mode == "off" or c.trainer.old_logprobs != "behavior",
        "Set trainer.old_logprobs=auto, or algo.importance.mode=off"),
    row("rejection_has_two_sides", "algo.rejection.level", "trainer.old_logprobs",
        "has no effect with trainer.old_logprobs=behavior",
        lambda c: c.algo.rejection.level == "off" or c.trainer.old_logprobs != "behavior",
        "Set trainer.old_logprobs=auto, or algo.rejection.level=off"),
    row("top_entropy_has_a_pass", "algo.top_entropy", "trainer.old_logprobs",
        "must be 1 with trainer.old_logprobs=behavior: the entropy is found in the pass of old log-probabilities",
        lambda c: c.algo.top_entropy == 1 or c.trainer.old_logprobs != "behavior",
        "Set trainer.old_logprobs=auto, or algo.top_entropy=1"),
    row("kl_cov_sees_a_difference", "algo.policy_loss",
        "trainer.mini_batch_size trainer.batch_size trainer.epochs_per_batch trainer.old_logprobs",
        "must not be kl_cov where a batch gets one update: there the policy is the old one, and the penalty is nothing",
        lambda c: c.algo.policy_loss != "kl_cov" or c.trainer.epochs_per_batch > 1
        or c.trainer.mini_batch_size < c.trainer.batch_size or c.trainer.old_logprobs == "behavior",
        "Lower trainer.mini_batch_size, or choose algo.policy_loss=ppo_clip"),
    row("a_factor_is_over_one", "algo.rejection.cap", "algo.rejection.estimator", "must be over 1 with k1",
        lambda c: c.algo.rejection.level == "off" or c.algo.rejection.estimator != "k1" or c.algo.rejection.cap > 1,
        "Use 2, or algo.rejection.estimator=k2 or k3"),
    row("gdpo_has_parts", "algo.advantage", "reward.weights", "needs two parts or more in reward.weights for gdpo",
        lambda c: c.algo.advantage != "gdpo" or len(c.reward.weights) > 1,
        "Name them, such as {correct: 1.0, format: 0.2}, or choose algo=grpo"),
    row("gdpo_sees_parts_alone", "algo.advantage", "algo.overlong.enabled algo.kl.where",
        "must not be gdpo with what is taken off the total, an overlong penalty or a KL in the reward",
        lambda c: c.algo.advantage != "gdpo" or not (c.algo.overlong.enabled or c.algo.kl.where == "reward"),
        "Leave the penalty out, and set algo.kl.where=loss"),
    row("training_answers_vary", "rollout.sampling.temperature", "", "must be over 0 for training",
        lambda c: c.rollout.sampling.temperature > 0, "Use 1, which is unbiased"),
    row("validation_answers_vary", "validation.samples_per_problem", "validation.sampling.temperature",
        "must be 1 with validation.sampling.temperature=0",
        lambda c: c.validation.sampling.temperature > 0 or c.validation.samples_per_problem == 1,
        "Set it to 1, or sample at temperature 1; validation.greedy judges a greedy answer as well"),
    row("an_offloaded_base_changes_places", "model.lora.offload", "rollout.engine rollout.sleep_level",
        "needs an engine whose weights wait in the host's memory while the base does not",
        lambda c: c.model.lora is None or not c.model.lora.offload
        or (c.rollout.engine == "vllm" and c.rollout.sleep_level == 1),
        "Set rollout.engine=vllm and rollout.sleep_level=1, or model.lora.offload=false"),
    row("a_run_has_an_engine", "rollout.engine", "", "must be hf or vllm: training needs answers",
        lambda c: c.rollout.engine != "none", "Set rollout.engine=vllm, or hf where there is no vLLM"),
    row("tensor_parallel_is_vllms", "rollout.tensor_parallel_size", "rollout.engine", "must be 1 without vLLM",
        lambda c: c.rollout.engine == "vllm" or c.rollout.tensor_parallel_size == 1, "Set rollout.engine=vllm, or 1"),
    # vLLM gives log-probabilities before temperature, or after temperature and top_p; the trainer needs those between.
    row("vllm_gives_the_trainers_logprobs", "rollout.sampling.top_p", "rollout.sampling.temperature rollout.engine",
        "must be 1 with a temperature and rollout.engine=vllm",
        lambda c: c.rollout.engine != "vllm" or 1 in (c.rollout.sampling.top_p, c.rollout.sampling.temperature),
        "Set one of the two to 1 (1 and 1 keep the gradient unbiased), or use rollout.engine=hf"),
    row("attention_runs_on_the_device", "model.attention", "runtime.device", "must be auto or sdpa on a CPU",
        lambda c: c.runtime.device != "cpu" or c.model.attention in ("auto", "sdpa"), "Set model.attention=auto"),
    row("compiling_is_for_cuda", "model.compile", "runtime.device", "must be false on a CPU",
        lambda c: c.runtime.device != "cpu" or not c.model.compile, "Set model.compile=false, or runtime.device=cuda"),
)  # fmt: skip
