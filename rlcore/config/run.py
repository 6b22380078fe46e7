"""All settings of a run as the class `RunConfig`, its sections for training, devices and tracking, and functions that
look up the dotted keys of settings."""

from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import Annotated, Literal, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from rlcore.config.algo import AlgoConfig, CriticConfig, OptimConfig
from rlcore.config.base import LOCAL_PATH, Bound, EffectiveWhen, MayChange, Rule, Section, keys_of, rule, value_at
from rlcore.config.data import CountdownData, DataConfig, FilterConfig, PassRatesConfig
from rlcore.config.model import ModelConfig, WarmStartConfig
from rlcore.config.rollout import ON_GPUS, EpisodeConfig, RewardConfig, RolloutConfig, SandboxConfig, ValidationConfig

_UNDER_RAY = EffectiveWhen(".backend", "ray")
_TRACKED = EffectiveWhen(".enabled")
_PROFILED = EffectiveWhen(".first_step")
_IN_STEPS = EffectiveWhen(".total_steps", remedy="Set the key of this name in warm_start")


class TrainerConfig(Section):
    """The settings of the training loop."""

    total_steps: int = Field(default=100, ge=0, le=10_000_000)
    """The number of steps of the run. Each step trains on one batch of prompts. With 0, the run ends after its
    supervised stage (`warm_start`)."""
    steps_per_chunk: Annotated[int, MayChange, _IN_STEPS] = Field(default=20, ge=1)
    """The number of steps between two checkpoints. These steps are a chunk, which Prefect retries as a unit."""
    batch_size: Annotated[int, _IN_STEPS] = Field(default=256, ge=1, le=10_000_000)
    """The number of prompts per step."""
    mini_batch_size: Annotated[int, Bound("divide", "trainer.batch_size"), _IN_STEPS] = Field(default=256, ge=1)
    """The number of prompts per optimizer step."""
    epochs_per_batch: Annotated[int, _IN_STEPS] = Field(default=1, ge=1)
    """The number of passes over each batch."""
    max_tokens_per_micro_batch: Annotated[
        int,
        MayChange,
        Bound(
            "be at least",
            "filter.max_prompt_tokens + rollout.max_response_tokens",
            "Set it to {bound} or more; the gradient does not depend on it",
        ),
    ] = Field(default=16_384, ge=1)
    """The largest number of tokens in one forward and backward pass. The gradient does not depend on this number."""
    old_logprobs: Literal["auto", "recompute", "behavior"] = "auto"
    """The source of the log-probabilities of the sampled tokens under the policy before the update: a separate forward
    pass (`recompute`), or the sampler (`behavior`). `auto` runs the separate pass only if a batch gets more than one
    update, or if the algorithm needs these log-probabilities before the update."""
    checks = (
        rule(".total_steps", "warm_start.enabled", "must be 1 or more without a supervised stage",
             lambda own, run: own.total_steps or run.warm_start.enabled,
             "Set warm_start.enabled=true (millrace sft does), or train for some steps"),
        rule(".total_steps", "pass_rates.samples", "must be 1 or more with pass rates, which no supervised stage uses",
             lambda own, run: own.total_steps or not run.pass_rates.is_enabled,
             "Set pass_rates.samples=0, or train for some steps"),
    )  # fmt: skip


StateAction = Literal["off", "tell", "stop"]
StepAction = Literal["off", "tell", "skip", "stop"]


class AlarmConfig(Section):
    """The actions that a run takes on abnormal metrics. Each alarm has one action.

    `off` disables the alarm. `tell` writes an event to the journal, MLflow and Prefect. `skip` also skips the update of
    the step. `stop` saves the state of the run and ends the run with an error. A new run can continue from the best
    checkpoint with other settings (`--fork RUN@best`)."""

    non_finite: Literal["skip", "stop"] = "stop"
    """The action if a loss or gradient is not finite. The batch is always saved, and the update is never applied."""
    grad_norm: StepAction = "tell"
    """The action if a mini-batch's gradient norm before clipping is above `grad_norm_above`. `skip` skips only this
    mini-batch."""
    grad_norm_above: Annotated[float, EffectiveWhen(".grad_norm")] = Field(default=1_000.0, gt=0)
    """The limit of the gradient norm of one mini-batch. The norm is over all parameters."""
    entropy: StateAction = "tell"
    """The action if the entropy is below `entropy_below`. At such an entropy, nearly all responses to a prompt are
    identical."""
    entropy_below: Annotated[float, EffectiveWhen(".entropy")] = Field(default=0.001, ge=0)
    """The lower limit of the mean entropy over response tokens, in nats."""
    equal_scores: Annotated[StepAction, EffectiveWhen("rollout.samples_per_prompt", unless="1")] = "tell"
    """The action if, in every group of a step, all responses have the same score. If groups have only one response, the
    alarm is off."""
    kl: StateAction = "off"
    """The action if the KL divergence from the reference policy is above `kl_above`. The alarm requires
    algo.kl.where=loss or reward."""
    kl_above: Annotated[float, EffectiveWhen(".kl")] = Field(default=10.0, gt=0)
    """The limit of the mean KL divergence over response tokens, in nats."""
    length: StepAction = "off"
    """The action if the share of responses that end at rollout.max_response_tokens is at least `length_share`."""
    length_share: Annotated[float, EffectiveWhen(".length")] = Field(default=0.95, gt=0, le=1)
    """The alarm is raised if at least this share of the responses, from 0 to 1, ends at rollout.max_response_tokens."""
    checks = (
        rule(".kl", "algo.kl.where", "needs a reference to measure the KL from",
             lambda own, run: own.kl == "off" or run.algo.kl.where != "off",
             "Set algo.kl.where=loss or reward (with algo.kl.coef=0 the KL is measured and changes nothing)"),
    )  # fmt: skip


class CheckpointConfig(Section):
    """The rules for the checkpoints that are kept on disk, and for the disk space that is left free."""

    keep_last: int = Field(default=2, ge=1)
    """The number of newest checkpoints that are kept."""
    keep_best: int = Field(default=1, ge=0)
    """The number of checkpoints that are kept because they have the best validation metrics."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Keep each checkpoint whose step is a multiple of this number. With 0, no checkpoint is kept for this reason."""
    reserve_gb: float = Field(default=1.0, ge=0)
    """The disk space that is left free, in GB of 1e9 bytes."""
    wait_for_room_s: float = Field(default=3_600.0, ge=0)
    """The number of seconds that a run waits for disk space before it ends. The saved state of the run is kept."""


class AnswersConfig(Section):
    """The record of the responses, with tokens, log-probabilities, scores and advantages. Training does not use the
    record."""

    every_steps: int = Field(default=1, ge=0)
    """Record the responses of every validation and of each step that is a multiple of this number. 0: no record."""
    max_gb: Annotated[float, EffectiveWhen(".every_steps")] = Field(default=10.0, gt=0)
    """The largest size of the record, in GB of 1e9 bytes. If it is exceeded, the oldest training steps are deleted from
    the record."""


class ProfileConfig(Section):
    """The recording of a few steps by torch's profiler, as `profile/step-<k>-rank-<i>.json.gz` in the run's folder.
    Open the files in https://ui.perfetto.dev or chrome://tracing."""

    first_step: int | None = Field(default=None, ge=1)
    """The first recorded step. If null, no step is recorded."""
    num_steps: Annotated[int, _PROFILED] = Field(default=1, ge=1, le=10)
    """The number of recorded steps. Each step is written to separate files."""

    def has_step(self, step: int) -> bool:
        """Return whether the profiler records the given step."""
        return self.first_step is not None and 0 <= step - self.first_step < self.num_steps


class DeadlineConfig(Section):
    """The time limits of the phases of a run, in seconds.

    A phase that takes longer than its limit counts as hung. The call stacks of all processes are written to a file, the
    trainer process is ended, and the steps since the last checkpoint are repeated."""

    start_s: float = Field(default=1_800.0, gt=0)
    """The time limit for starting the workers: Ray, models and engines."""
    generate_s: float = Field(default=3_600.0, gt=0)
    """The time limit for generating the responses of one step."""
    score_s: float = Field(default=3_600.0, gt=0)
    """The time limit for scoring all responses of one step. The limit for one response is reward.deadline_s."""
    forward_s: float = Field(default=3_600.0, gt=0)
    """The time limit for computing log-probabilities or values of a whole batch in one forward pass."""
    update_s: float = Field(default=3_600.0, gt=0)
    """The time limit for all updates of the policy in one step. A separate limit of the same length applies to the
    updates of the critic."""
    hand_over_s: float = Field(default=900.0, gt=0)
    """The time limit for a weight sync to the engine."""
    validate_s: float = Field(default=7_200.0, gt=0)
    """The time limit for one validation."""
    save_s: float = Field(default=1_800.0, gt=0)
    """The time limit for writing a checkpoint or exporting weights. Waiting for disk space does not count."""
    load_s: float = Field(default=1_800.0, gt=0)
    """The time limit for reading a checkpoint."""

    def longest_s(self) -> float:
        """Return the longest of these time limits, in seconds."""
        return max(float(getattr(self, name)) for name in type(self).model_fields)


class RuntimeConfig(Section):
    """The processes and devices of a run. They change the speed of a run, but not its results except for rounding."""

    backend: Literal["local", "ray"] = "local"
    """The place where workers run. `local`: one worker in the trainer's process. `ray`: each worker in a Ray actor."""
    num_workers: Annotated[
        int,
        Bound("divide", "trainer.mini_batch_size x rollout.samples_per_prompt"),
        Bound("be at most", "trainer.batch_size", "Use fewer workers or more prompts"),
        Bound("divide", "warm_start.batch_size", only_with="warm_start.enabled"),
    ] = Field(default=1, ge=1)
    """The number of workers, which are the ranks of data parallelism. On a GPU machine, each rank has one GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the workers. `auto` is CUDA if there is a GPU, otherwise the CPU."""
    python: Annotated[str | None, LOCAL_PATH] = None
    """The Python interpreter of the trainer and its workers, such as `bin/python` of another environment. Null: the
    interpreter that runs the command."""
    threads_per_worker: int = Field(default=1, ge=1)
    """The number of CPU threads that torch uses in each worker. A different number may change the last
    digits of results."""
    ray_address: Annotated[str | None, _UNDER_RAY] = None
    """The address of a running Ray cluster. If null, a private cluster is started on this host."""
    placement_timeout_s: Annotated[float, _UNDER_RAY] = Field(default=60.0, gt=0)
    """The largest number of seconds to wait for the Ray cluster to grant the resources of the workers."""
    fit_memory: Annotated[Literal["off", "check", "auto"], ON_GPUS] = "check"
    """The use of the memory plan, which estimates a run's memory on a GPU. `off` only prints the plan. `check` refuses
    a run that does not fit on the GPU even with the smallest micro-batch. `auto` also chooses the fastest values that
    fit, for these settings: `rollout.memory_share`, `rollout.max_batched_tokens`, `rollout.sleep_level`,
    `trainer.max_tokens_per_micro_batch`, `algo.kl.offload`, `model.lora.offload`, `optim.offload`,
    `model.gradient_checkpointing` and `model.offload_activations`."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """The peak speed of a device for `perf/mfu`, in 1e12 dense operations per second in the compute type. Null: the
    known bfloat16 speed of the GPU. With null, `perf/mfu` is absent on a CPU, on an unknown GPU, and if the compute
    type is not bfloat16."""
    profile: ProfileConfig = ProfileConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    stop_deadline_s: float = Field(default=60.0, gt=0)
    """The largest number of seconds from a stop request to the end of a run. The current step must finish within half
    of this time. Otherwise the step is cancelled, the state before the step is saved, and the next start repeats the
    step."""
    max_chunk_retries: int = Field(default=2, ge=0)
    """The largest number of retries of a chunk (`trainer.steps_per_chunk`). A retry starts from the last checkpoint."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """The priority in the queue for slots, which limit how many ranks train at the same time (`millrace slots`). The
    run with the highest priority gets slots first. A run returns its slots at the end of a chunk if a run with a higher
    priority waits."""
    checks = (
        rule(".num_workers", ".backend", "must be 1 with runtime.backend=local",
             lambda own, _: own.backend == "ray" or own.num_workers == 1, "Set runtime.backend=ray"),
    )  # fmt: skip


class PathsConfig(Section):
    """The folders to which Millrace writes."""

    root: Annotated[str, LOCAL_PATH] = "artifacts"
    """The folder of datasets, models, runs and the MLflow store, relative to the working directory. `~` is expanded."""


class TrackingConfig(Section):
    """The settings of tracking with MLflow. The local journal is always written."""

    enabled: bool = True
    """Send metrics and artifacts to MLflow."""
    uri: Annotated[str | None, _TRACKED] = None
    """The tracking URI of MLflow. If null, metrics are stored in an sqlite file under `paths.root`."""
    experiment: Annotated[str, _TRACKED] = "millrace"
    """The name of the MLflow experiment."""
    log_best: Annotated[bool, _TRACKED] = True
    """Store the weights of the best checkpoint in MLflow, in addition to the weights of the last checkpoint."""
    registered_model: Annotated[str | None, _TRACKED] = Field(default=None, pattern=r"^[^/:]{1,200}$")
    """The model's name in MLflow's registry, with the aliases `best` and `last`. Null: no weights are registered."""
    report_to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], EffectiveWhen(".enabled")] = ()
    """Further trackers that get each step's metrics. `tensorboard` writes files to the run's folder. `wandb` uses the
    Weights & Biases project `tracking.experiment`. The packages of the trackers must be installed."""
    ship_every_s: Annotated[float, _TRACKED] = Field(default=2.0, gt=0)
    """The number of seconds between two deliveries of metrics to MLflow and other trackers."""


def _warmup_fits(optim: str, total: str) -> Rule:
    def holds(run: "RunConfig", _: "RunConfig") -> bool:
        steps, total_steps = value_at(run, f"{optim}.warmup_steps"), value_at(run, total)
        if steps is None or not total_steps or (optim.startswith("warm_start") and not run.warm_start.enabled):
            return True
        return bool(steps < total_steps or steps == total_steps == 1)

    return rule(f"{optim}.warmup_steps", total, f"must be under {total}", holds, "Warm up for fewer steps")


_WITH_STEPS = EffectiveWhen("trainer.total_steps")


class RunConfig(Section):
    """All settings of a run."""

    name: Annotated[str, MayChange] = Field(default="run", pattern=r"^[a-z0-9][a-z0-9_\-]{0,63}$")
    """The name of the experiment. It is the first part of the run id."""
    run_id: Annotated[str | None, MayChange] = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}$")
    """The name of the run's folder. If null, the name consists of `name`, `seed` and the settings' fingerprint."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """The seed of the initial weights, the order of prompts, and the sampled tokens. The rows of the data have
    their own seed, `data.seed`."""
    tags: Annotated[dict[str, str], MayChange] = Field(default_factory=dict)
    """The tags of the MLflow run."""
    paths: Annotated[PathsConfig, MayChange] = PathsConfig()
    data: DataConfig = CountdownData()
    filter: FilterConfig = FilterConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    pass_rates: PassRatesConfig = PassRatesConfig()
    algo: Annotated[AlgoConfig, _WITH_STEPS] = AlgoConfig()
    optim: Annotated[OptimConfig, EffectiveWhen("trainer.total_steps", remedy="Set warm_start.optim")] = OptimConfig()
    critic: Annotated[CriticConfig | None, _WITH_STEPS] = None
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
        """The largest number of training steps of the run: `trainer.total_steps`, or if that is 0,
        `warm_start.max_steps`."""
        return self.trainer.total_steps or self.warm_start.max_steps

    @property
    def prompts_in_progress(self) -> int:
        """The number of prompts whose responses a step generates. It exceeds trainer.batch_size if
        `rollout.finish_share` is below 1."""
        return int(self.trainer.batch_size / Fraction(str(self.rollout.finish_share)))

    @property
    def concurrent_responses(self) -> int:
        """The largest number of responses that one engine generates at a time. Several ranks may share an engine."""
        num_engines = self.runtime.num_workers // self.rollout.tensor_parallel_size
        responses = -(-self.prompts_in_progress * self.rollout.samples_per_prompt // num_engines)
        return min(self.rollout.max_num_seqs, responses)


@cache
def all_keys() -> Mapping[str, tuple[FieldInfo, ...]]:
    """Return the pydantic fields of every setting, by dotted key. A key that several tasks define (`data.scorer`) has
    several fields."""
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
    """Return the dotted keys of the settings that are mappings whose names the user chooses, such as `tags`."""
    return frozenset(name for name, (field, *_) in all_keys().items() if get_origin(field.annotation) is dict)


def is_key(name: str) -> bool:
    """Return whether a dotted name is a setting, or a name in one of the `free_mappings` such as `tags.note`."""
    return name in all_keys() or name.rpartition(".")[0] in free_mappings()
