"""Settings that were given and cannot have an effect: a warning line for each, and no mistake.

Shared sweeps and experiments give such settings on purpose. There is no line for a default that was not given.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rlcore.config.algo import AlgoConfig
from rlcore.config.base import covers, expanded, leaves
from rlcore.config.data import MixtureData
from rlcore.config.model import WarmStartConfig
from rlcore.config.problems import shown
from rlcore.config.rules.data import JUDGE
from rlcore.config.rules.training import DISCOUNTED_ADVANTAGES
from rlcore.config.run import RunConfig, value_at

Wish = Callable[[Any], bool]


def _on(value: Any) -> bool:
    return value not in (None, False, 0, "off", "")


def _off(value: Any) -> bool:
    return not _on(value)


def _one_of(*values: Any) -> Wish:
    return lambda value: value in values


def _none_of(*values: Any) -> Wish:
    return lambda value: value not in values


def _several(value: Any) -> bool:
    return bool(value > 1)


def _may_run_programs(value: Any) -> bool:
    """Of scorers, environments and suites: others than ours may use the sandbox too."""
    return bool(value) and not (isinstance(value, str) and value.partition(":")[0] in _WITHOUT_PROGRAMS)


@dataclass(frozen=True, slots=True)
class Effect:
    """Keys or sections that are read only where one of the settings `by` is as `wanted`.

    `remedy` says how to get there, `why` replaces the values of `by` in the line, `of` limits the row to some values
    of the keys. A row does not apply where none of `by` exists (another task, a section that is null).
    """

    keys: tuple[str, ...]
    by: tuple[str, ...]
    wanted: Wish
    remedy: str
    why: str = ""
    of: Wish | None = None


_WITHOUT_PROGRAMS = tuple(
    f"data.{name}" for name in ("calculator", "countdown", "gsm8k", "math", "multiplication", "number_guessing",
                                "reasoning_gym")
)  # fmt: skip
_VLLMS = tuple(
    f"rollout.{name}"
    for name in ("tensor_parallel_size", "memory_share", "sleep_level", "enforce_eager", "max_batched_tokens",
                 "prefix_caching", "canary_bound")
)  # fmt: skip
_UNCLIPPED = ("sapo", "gmpo", "gpg", "dppo", "kl_cov")
_KL = tuple(f"algo.kl.{name}" for name in ("estimator", "coef", "adaptive", "target", "horizon", "offload"))
_WARM_START = tuple(f"warm_start.{name}" for name in WarmStartConfig.model_fields if name != "enabled")
_ACTIONS = tuple(f"alarms.{name}" for name in ("non_finite", "grad_norm", "entropy", "equal_scores", "kl", "length"))

EFFECTS: tuple[Effect, ...] = (
    Effect(("algo.advantage_options",), ("algo.advantage",),
           lambda name: AlgoConfig(advantage=name).advantage_function is not None, "Choose algo.advantage=pass_at_k"),
    Effect(("algo.lam",), ("algo.advantage",), _one_of("gae"), "Choose algo=ppo"),
    Effect(("algo.gamma",), ("algo.advantage",), _one_of(*sorted(DISCOUNTED_ADVANTAGES)), "Choose algo=ppo"),
    Effect(("algo.value_clip",), ("critic",), _on, "Choose algo=ppo, which has a critic"),
    Effect(("algo.dual_clip",), ("algo.policy_loss",), _none_of("cispo", *_UNCLIPPED),
           "Choose algo.policy_loss=ppo_clip or gspo"),
    Effect(("algo.clip_low", "algo.clip_high"), ("algo.policy_loss",), _none_of(*_UNCLIPPED),
           "Choose algo.policy_loss=ppo_clip, gspo or cispo"),
    Effect(_KL, ("algo.kl.where",), _on, "Set algo.kl.where=loss or reward"),
    Effect(("algo.kl.offload",), ("model.lora",), _off, "Set model.lora=null",
           why="model.lora: the reference is the policy without its adapters"),
    Effect(("algo.kl.estimator",), ("algo.kl.where",), _none_of("loss"), "Set algo.kl.estimator=low_var_kl or k2",
           why="algo.kl.where=loss: its gradient there is 0 on average", of=_one_of("k1")),
    Effect(("algo.kl.estimator",), ("algo.kl.where",), _none_of("reward"), "Set algo.kl.estimator=k1",
           why="algo.kl.where=reward near the reference: it is d^2 / 2 there, so its policy gradient vanishes",
           of=_one_of("k2", "k3", "low_var_kl")),
    Effect(("algo.kl.target", "algo.kl.horizon"), ("algo.kl.adaptive",), _on, "Set algo.kl.adaptive=true"),
    Effect(("algo.entropy_control.step",), ("algo.entropy_control.target",), _on,
           "Set algo.entropy_control.target, in nats a token"),
    Effect(("algo.clip_cov.low", "algo.clip_cov.high"), ("algo.clip_cov.share",), _on,
           "Set algo.clip_cov.share=0.0002"),
    Effect(("algo.rejection.estimator", "algo.rejection.cap"), ("algo.rejection.level",), _on,
           "Set algo.rejection.level=token"),
    Effect(("algo.importance.cap", "algo.importance.level"), ("algo.importance.mode",), _on,
           "Set algo.importance.mode=truncate or mask"),
    Effect(("algo.dynamic_sampling.max_refills",), ("algo.dynamic_sampling.enabled",), _on,
           "Set algo.dynamic_sampling.enabled=true"),
    Effect(("algo.overlong.buffer_tokens", "algo.overlong.penalty"), ("algo.overlong.enabled",), _on,
           "Set algo.overlong.enabled=true"),
    *(Effect((f"{optim}.min_lr_ratio",), (f"{optim}.schedule",), _none_of("constant"),
             f"Set {optim}.schedule=linear or cosine") for optim in ("optim", "critic.optim", "warm_start.optim")),
    Effect(("model.scratch",), ("model.path",), _off, "Set model.path=null"),
    Effect(("model.zero_stage",), ("runtime.num_workers",), _several, "Set runtime.num_workers=2 or more"),
    Effect(_WARM_START, ("warm_start.enabled",), _on, "Set warm_start.enabled=true"),
    Effect(("data.search_tries",), ("warm_start.enabled",), _on, "Set warm_start.enabled=true"),
    Effect(("data.search_tries",), ("data.template", "data.environment"),
           _one_of("base", "qwen-instruct", "chat", "data.calculator:Countdown"), "Choose data.template=chat"),
    Effect(("warm_start.check_problems",), ("warm_start.stop_at_reward",), _on, "Set warm_start.stop_at_reward"),
    Effect(("warm_start.patience",), ("warm_start.held_out_rows",), _on, "Set warm_start.held_out_rows=256"),
    Effect(("warm_start.misdirected_share",), ("warm_start.demonstrations",), _off,
           "Set warm_start.demonstrations=null"),
    Effect(("warm_start.misdirected_share",), ("data.task",), _none_of("gsm8k", "mapped", "reasoning_gym"),
           "Choose a task whose rows have a distractor, such as data=countdown"),
    Effect(("pass_rates.rows_per_part",), ("pass_rates.samples",), _on, "Set pass_rates.samples=8"),
    Effect(("pass_rates.keep",), ("pass_rates.samples", "pass_rates.table"), _on, "Set pass_rates.samples=8"),
    Effect(("pass_rates.band", "pass_rates.rest_weight"), ("pass_rates.draw",), _one_of("band"),
           "Set pass_rates.draw=band"),
    Effect(("pass_rates.fade",), ("pass_rates.draw",), _none_of("uniform"), "Set pass_rates.draw=band or informative"),
    Effect(_VLLMS, ("rollout.engine",), _one_of("vllm"), "Set rollout.engine=vllm"),
    Effect(("rollout.sleep_level", "rollout.enforce_eager"), ("runtime.device",), _none_of("cpu"),
           "Set runtime.device=auto"),
    Effect(("reward.judge",), ("data.scorer",), _one_of(JUDGE, MixtureData().scorer), f"Set data.scorer={JUDGE}"),
    Effect(("sandbox",), ("data.scorer", "data.environment", "validation.suites"), _may_run_programs,
           "Choose data=code", why="no scorer that runs programs"),
    Effect(("reward.deadline_s",), ("reward.num_processes",), _on, "Set reward.num_processes=1 or more"),
    Effect(("episode",), ("data.environment",), _on, "Set data.environment"),
    Effect(("episode.reward_per_turn",), ("algo.advantage",), _one_of("gae", "reinforce_pp"),
           "Choose algo=ppo or algo=reinforce_pp"),
    Effect(("filter.decontaminate",), ("validation.suites",), bool, "Name suites in validation.suites"),
    Effect(("validation.sampling.top_p",), ("validation.sampling.temperature",), _on,
           "Set validation.sampling.temperature=1"),
    Effect(("reward.audit",), ("data.environment",), _off, "Choose a task without data.environment"),
    Effect(("answers.max_gb",), ("answers.every_steps",), _on, "Set answers.every_steps=1"),
    Effect(("alarms.grad_norm_above",), ("alarms.grad_norm",), _on, "Set alarms.grad_norm=tell"),
    Effect(("alarms.entropy_below",), ("alarms.entropy",), _on, "Set alarms.entropy=tell"),
    Effect(("alarms.equal_scores",), ("rollout.samples_per_prompt",), _several,
           "Set rollout.samples_per_prompt=2 or more"),
    Effect(("alarms.kl_above",), ("alarms.kl",), _on, "Set alarms.kl=tell, and algo.kl.where"),
    Effect(("alarms.length_share",), ("alarms.length",), _on, "Set alarms.length=tell"),
    Effect(("alarms.roll_back_lr_factor", "alarms.max_roll_backs"), _ACTIONS, _one_of("roll_back"),
           "Set an alarm to roll_back", why="no alarm that rolls back"),
    Effect(("runtime.ray_address", "runtime.placement_timeout_s"), ("runtime.backend",), _one_of("ray"),
           "Set runtime.backend=ray"),
    Effect(("runtime.fit_memory",), ("runtime.device",), _none_of("cpu"), "Set runtime.device=auto"),
    Effect(("runtime.profile.num_steps", "runtime.profile.max_mb"), ("runtime.profile.first_step",), _on,
           "Set runtime.profile.first_step=2"),
    Effect(tuple(f"tracking.{name}" for name in
                 ("uri", "experiment", "log_best", "registered_model", "ship_every_s")),
           ("tracking.enabled",), _on, "Set tracking.enabled=true"),
    Effect(("data.revision", "data.subset"), ("data.source",), lambda source: not expanded(source).is_dir(),
           "Set data.source to a hub id"),
)  # fmt: skip
"""For each key, the first row that names it and applies gives the line."""


def without_effect(
    config: RunConfig, given: Collection[str], in_file: Collection[str] = (), swept: Collection[str] = ()
) -> list[str]:
    """A line for each group of settings that cannot have an effect here: keys and values, why, what to do.

    Args:
        config: sound settings.
        given: dotted keys, and members of groups, that were asked for: overrides.
        in_file: dotted keys of an experiment's file. They get no line where an override has switched off what they
            belong to, which is done on purpose.
        swept: dotted keys, and groups, that differ from point to point of a sweep; `config` is that of no point.
    """
    values = leaves(config.model_dump(mode="json"))
    left = [key for key in values if key in given or key in in_file or key in swept]
    lines = []
    for effect in EFFECTS:
        if any(_below(by, swept) for by in effect.by):
            continue
        is_switched = any(_below(by, given) for by in effect.by)
        keys = [key for key in left if _below(key, effect.keys) and (key not in in_file or not is_switched)]
        if effect.of is not None:
            keys = [key for key in keys if key not in swept and effect.of(values[key])]
        reasons = _reasons(config, effect) if keys else None
        if reasons is None:
            continue
        left = [key for key in left if key not in keys]
        told = ", ".join(key if key in swept else f"{key}={shown(values[key])}" for key in keys)
        have, them = ("have", "them") if len(keys) > 1 else ("has", "it")
        lines.append(f"{told}: {have} no effect with {reasons}. {effect.remedy}, or leave {them} out")
    return lines


def _below(key: str, names: Collection[str]) -> bool:
    return any(covers(name, key) for name in names)


def _reasons(config: RunConfig, effect: Effect) -> str | None:
    """The settings that leave the keys unread, as one would write them; None where the keys are read."""
    found = {name: value_at(config, name, _ABSENT) for name in effect.by}
    known = {name: value for name, value in found.items() if value is not _ABSENT}
    if not known or any(effect.wanted(value) for value in known.values()):
        return None
    return effect.why or ", ".join(f"{name}={shown(value)}" for name, value in known.items())


_ABSENT = object()
