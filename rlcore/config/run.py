"""`RunConfig`: all settings of a run, typed and validated, and their dotted keys."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from rlcore.config.algo import AlgoConfig, CriticConfig, OptimConfig
from rlcore.config.base import MayChange, Section, covers, keys_of, value_at
from rlcore.config.data import (
    ALL_SOURCES,
    CountdownData,
    DataConfig,
    FilterConfig,
    MappedData,
    MixtureData,
    ParquetData,
    PassRatesConfig,
    TaskData,
    taken,
)
from rlcore.config.model import ModelConfig, WarmStartConfig
from rlcore.config.problems import Problem
from rlcore.config.rollout import (
    EpisodeConfig,
    RewardConfig,
    RolloutConfig,
    SandboxConfig,
    SuiteConfig,
    ValidationConfig,
)
from rlcore.config.rules import Rule, broken_rules, rule
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
    """The learning rate of a section reaches its peak before its stage ends."""

    def holds(run: "RunConfig", _: "RunConfig") -> bool:
        steps, total_steps = value_at(run, f"{optim}.warmup_steps"), value_at(run, total)
        if steps is None or (optim.startswith("warm_start") and not run.warm_start.enabled):
            return True
        return bool(steps < total_steps or steps == total_steps == 1)

    return rule(f"{optim}.warmup_steps", total, f"must be under {total}", holds, "Warm up for fewer steps")


def _suites_have_names_and_room(run: "RunConfig", _: "RunConfig") -> Problem | None:
    """Each suite's figures have a name of their own, and its answers fit where the run's do."""
    key = "validation.suites"
    if names := taken(suite.name for suite in run.validation.suites):
        says = f"must have a name each, and none {ALL_SOURCES}, which is the name of all held-out problems together"
        return Problem(key, says, names, "Write another `name` into the file")
    room = run.filter.max_prompt_tokens + run.rollout.max_response_tokens
    for suite in run.validation.suites:
        seen = suite_settings(run, suite)
        longest = seen.filter.max_prompt_tokens + seen.rollout.max_response_tokens
        if longest > room:
            says = "must have at most filter.max_prompt_tokens + rollout.max_response_tokens in prompt and answer"
            remedy = f"Lower the suite's limits, or raise the run's by {longest - room}"
            return Problem(key, says, f"{suite.name}: {longest}, the run {room}", remedy)
    return None


class RunConfig(Section):
    """Everything that a run depends on."""

    name: Annotated[str, MayChange] = Field(default="run", pattern=r"^[a-z0-9][a-z0-9_\-]{0,63}$")
    """Name of the experiment; first part of the run id."""
    run_id: Annotated[str | None, MayChange] = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}$")
    """Folder of the run. None: name, seed and the fingerprint of the settings."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Fixes initial weights, order of prompts and every sampled token; `data.seed` fixes the rows."""
    tags: Annotated[dict[str, str], MayChange] = Field(default_factory=dict)
    """Tags on the MLflow run."""
    paths: Annotated[PathsConfig, MayChange] = PathsConfig()
    data: DataConfig = CountdownData()
    filter: FilterConfig = FilterConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    pass_rates: PassRatesConfig = PassRatesConfig()
    algo: AlgoConfig = AlgoConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig | None = None
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
        Rule(("validation.suites", "filter.max_prompt_tokens", "rollout.max_response_tokens"),
             _suites_have_names_and_room),
    )  # fmt: skip

    @property
    def answers_together(self) -> int:
        """Answers of a batch that an engine writes at one time: those of all ranks that share it."""
        num_engines = self.runtime.num_workers // self.rollout.tensor_parallel_size
        answers = -(-self.trainer.batch_size * self.rollout.samples_per_prompt // num_engines)
        return min(self.rollout.max_num_seqs, answers)


def suite_settings(config: RunConfig, suite: SuiteConfig) -> RunConfig:
    """A run's settings with the suite's data, seed, lengths and sampling in place of its own. Its seed fixes both the
    rows and the sampled tokens."""
    prompt_tokens = suite.max_prompt_tokens or config.filter.max_prompt_tokens
    response_tokens = suite.max_response_tokens or config.rollout.max_response_tokens
    changes: dict[str, Any] = {
        "data": _held_out_alone(suite.data).model_copy(update={"seed": suite.seed}),
        "seed": suite.seed,
        "filter": FilterConfig(max_prompt_tokens=prompt_tokens, duplicates="keep"),
        "rollout": config.rollout.model_copy(update={"max_response_tokens": response_tokens}),
        "validation": ValidationConfig(**dict(suite.judging)),
    }
    if not suite.data.environment:
        changes["episode"] = EpisodeConfig()  # its tools are shown where there is an environment to call them
    return config.model_copy(update=changes)


def _held_out_alone(data: TaskData) -> TaskData:
    """The settings of a task whose training rows nobody reads: they need not be there."""
    if isinstance(data, ParquetData):
        return data.model_copy(update={"train_file": data.validation_file})
    if isinstance(data, MappedData):
        return data.model_copy(update={"train_split": data.validation_split})
    return data


def problems_in(run: RunConfig, unsound: Collection[str] = ()) -> list[Problem]:
    """Every broken rule of a run, and of its datasets and suites as if each were the run's only one.

    Rules that read a key or section named in `unsound` are left out.
    """
    found = broken_rules(run, unsound)
    for key, name, alone in _alone(run):
        if not any(covers(key, each) or covers(each, key) for each in unsound):
            found += [replace(each, key=key, rule=f"{name}: {each.key} {each.rule}")
                      for each in broken_rules(alone, unsound) if each not in found]  # fmt: skip
    return found


def _alone(run: RunConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """The settings of each dataset of a mixture, and of each suite: their key, their name, a run of nothing else."""
    for index, part in enumerate(run.data.parts if isinstance(run.data, MixtureData) else ()):
        yield "data.parts", f"entry {index} ({part.data.task})", run.model_copy(update={"data": part.data})
    for suite in run.validation.suites:  # the warm start learns from the run's own data
        alone = suite_settings(run, suite).model_copy(update={"warm_start": WarmStartConfig()})
        yield "validation.suites", suite.name, alone


@cache
def all_keys() -> Mapping[str, tuple[FieldInfo, ...]]:
    """The field of every dotted key, with several entries where tasks share it (`data.scorer`)."""
    found: dict[str, tuple[FieldInfo, ...]] = {}
    for name, field in keys_of(RunConfig):
        found[name] = (*found.get(name, ()), field)
    return found


@cache
def section_names() -> frozenset[str]:
    """Dotted names of the sections: `algo`, `algo.kl`, ..."""
    return frozenset(name[:at] for name in all_keys() for at, letter in enumerate(name) if letter == ".")


@cache
def free_mappings() -> frozenset[str]:
    """Keys below which any name may be added: `tags`."""
    return frozenset(name for name, (field, *_) in all_keys().items() if get_origin(field.annotation) is dict)


def is_key(name: str) -> bool:
    """Whether a dotted name is a setting, or lies in a mapping with free names."""
    return name in all_keys() or name.rpartition(".")[0] in free_mappings()
