"""The class `RunConfig` with all settings of a run, typed and validated, and functions for its dotted keys."""

from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import Annotated, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from rlcore.config.algo import AlgoConfig, CriticConfig, OptimConfig
from rlcore.config.base import MayChange, Section, keys_of, value_at
from rlcore.config.data import CountdownData, DataConfig, FilterConfig, PassRatesConfig
from rlcore.config.model import ModelConfig, WarmStartConfig
from rlcore.config.rollout import EpisodeConfig, RewardConfig, RolloutConfig, SandboxConfig, ValidationConfig
from rlcore.config.rules import EffectiveWhen, Rule, rule
from rlcore.config.trainer import (
    AlarmConfig,
    AnswersConfig,
    CheckpointConfig,
    PathsConfig,
    RuntimeConfig,
    TrackingConfig,
    TrainerConfig,
)


def _warmup_fits(optim: str, total: str) -> Rule:
    """Return the rule that `warmup_steps` in the section `optim` must be less than the setting `total`."""

    def holds(run: "RunConfig", _: "RunConfig") -> bool:
        steps, total_steps = value_at(run, f"{optim}.warmup_steps"), value_at(run, total)
        if steps is None or not total_steps or (optim.startswith("warm_start") and not run.warm_start.enabled):
            return True
        return bool(steps < total_steps or steps == total_steps == 1)

    return rule(f"{optim}.warmup_steps", total, f"must be under {total}", holds, "Warm up for fewer steps")


_IN_STEPS = EffectiveWhen("trainer.total_steps")


class RunConfig(Section):
    """All settings that a run depends on."""

    name: Annotated[str, MayChange] = Field(default="run", pattern=r"^[a-z0-9][a-z0-9_\-]{0,63}$")
    """The name of the experiment. It is the first part of the run id."""
    run_id: Annotated[str | None, MayChange] = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}$")
    """The name of the run's folder. If null, it consists of the name, the seed and the settings' fingerprint."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """The seed of the initial weights, the order of prompts, and the sampled tokens. `data.seed` sets the rows."""
    tags: Annotated[dict[str, str], MayChange] = Field(default_factory=dict)
    """The tags of the MLflow run."""
    paths: Annotated[PathsConfig, MayChange] = PathsConfig()
    data: DataConfig = CountdownData()
    filter: FilterConfig = FilterConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    pass_rates: PassRatesConfig = PassRatesConfig()
    algo: Annotated[AlgoConfig, _IN_STEPS] = AlgoConfig()
    optim: Annotated[OptimConfig, EffectiveWhen("trainer.total_steps", remedy="Set warm_start.optim")] = OptimConfig()
    critic: Annotated[CriticConfig | None, _IN_STEPS] = None
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    episode: EpisodeConfig = EpisodeConfig()
    sandbox: SandboxConfig = SandboxConfig()
    validation: Annotated[ValidationConfig, MayChange] = ValidationConfig()
    trainer: TrainerConfig = TrainerConfig()
    alarms: Annotated[AlarmConfig, MayChange] = AlarmConfig()
    checkpoint: Annotated[CheckpointConfig, MayChange] = CheckpointConfig()
    answers: Annotated[AnswersConfig, MayChange] = AnswersConfig()
    runtime: Annotated[RuntimeConfig, MayChange] = RuntimeConfig()
    tracking: Annotated[TrackingConfig, MayChange] = TrackingConfig()
    checks = (
        rule("critic", "algo.advantage", "is needed by algo.advantage=gae",
             lambda run, _: run.algo.advantage != "gae" or run.critic is not None,
             "Add critic=default, or choose algo=grpo"),
        _warmup_fits("optim", "trainer.total_steps"),
        _warmup_fits("critic.optim", "trainer.total_steps"),
        _warmup_fits("warm_start.optim", "warm_start.max_steps"),
    )  # fmt: skip

    @property
    def is_supervised(self) -> bool:
        """True if the run ends after its supervised stage, without reinforcement learning."""
        return self.trainer.total_steps == 0

    @property
    def total_steps(self) -> int:
        """The largest number of steps of the run. The steps are supervised if `trainer.total_steps` is 0."""
        return self.trainer.total_steps or self.warm_start.max_steps

    @property
    def prompts_in_progress(self) -> int:
        """The number of prompts that a step samples. It trains on fewer if `rollout.finish_share` is below 1."""
        return int(self.trainer.batch_size / Fraction(str(self.rollout.finish_share)))

    @property
    def concurrent_responses(self) -> int:
        """The number of responses that one engine generates at a time. An engine may be shared by several ranks."""
        num_engines = self.runtime.num_workers // self.rollout.tensor_parallel_size
        responses = -(-self.prompts_in_progress * self.rollout.samples_per_prompt // num_engines)
        return min(self.rollout.max_num_seqs, responses)


@cache
def all_keys() -> Mapping[str, tuple[FieldInfo, ...]]:
    """Return the fields of each dotted key. A key of several tasks, such as `data.scorer`, has several fields."""
    found: dict[str, tuple[FieldInfo, ...]] = {}
    for name, field in keys_of(RunConfig):
        found[name] = (*found.get(name, ()), field)
    return found


@cache
def section_names() -> frozenset[str]:
    """Return the dotted names of the sections, such as `algo` and `algo.kl`."""
    return frozenset(name[:at] for name in all_keys() for at, letter in enumerate(name) if letter == ".")


@cache
def free_mappings() -> frozenset[str]:
    """Return the keys below which any name may be added, such as `tags`."""
    return frozenset(name for name, (field, *_) in all_keys().items() if get_origin(field.annotation) is dict)


def is_key(name: str) -> bool:
    """Return whether a dotted name is a setting, or a name in a mapping where any name may be added."""
    return name in all_keys() or name.rpartition(".")[0] in free_mappings()
