"""Settings of the training loop, its alarms, its checkpoints and its processes."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlcore.config.base import MayChange, Section, expand_home
from rlcore.config.rules import Bound, EffectiveWhen, rule

_ON_GPUS = EffectiveWhen("runtime.device", unless="cpu")
_UNDER_RAY = EffectiveWhen(".backend", "ray")
_TRACKED = EffectiveWhen(".enabled")
_PROFILED = EffectiveWhen(".first_step")


class TrainerConfig(Section):
    """The training loop."""

    total_steps: int = Field(default=100, ge=1, le=10_000_000)
    """Steps of the run; a step samples, scores and trains on one batch of prompts."""
    steps_per_chunk: Annotated[int, MayChange] = Field(default=20, ge=1)
    """Steps between two checkpoints. A chunk is the unit that Prefect retries."""
    batch_size: int = Field(default=256, ge=1, le=10_000_000)
    """Prompts a step."""
    mini_batch_size: Annotated[int, Bound("divide", "trainer.batch_size")] = Field(default=256, ge=1)
    """Prompts an optimizer step."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""
    max_tokens_per_micro_batch: Annotated[
        int,
        MayChange,
        Bound(
            "be at least",
            "filter.max_prompt_tokens + rollout.max_response_tokens",
            "Set it to {bound} or more; the gradient does not depend on it",
        ),
    ] = Field(default=16_384, ge=1)
    """Token budget of one forward and backward. The gradient does not depend on it."""
    old_logprobs: Literal["auto", "recompute", "behavior"] = "auto"
    """Log-probabilities before the update. auto: recomputed only if a batch gets more than one update or the algorithm
    compares or ranks them."""


StateAction = Literal["off", "tell", "stop"]
StepAction = Literal["off", "tell", "skip", "stop"]


class AlarmConfig(Section):
    """Actions on wrong numbers of a run, one for each alarm.

    off: not checked. tell: an event in journal, MLflow and Prefect. skip: also skip the step's update. stop: save the
    step and fail; `--fork RUN@best` continues from the best checkpoint with other settings. Entropy and KL are states
    of the weights, which no skipped update mends, so they have no skip.
    """

    non_finite: Literal["skip", "stop"] = "stop"
    """A loss or gradient is not finite. The batch is always saved, and the update is never applied."""
    grad_norm: StepAction = "tell"
    """The norm of the policy's gradient, before clipping, is above `grad_norm_above` in a mini-batch. skip skips only
    these mini-batches."""
    grad_norm_above: Annotated[float, EffectiveWhen(".grad_norm")] = Field(default=1_000.0, gt=0)
    """Norm over all parameters of the gradient of one mini-batch."""
    entropy: StateAction = "tell"
    """The policy's entropy is below `entropy_below`: it gives the same response for every seed."""
    entropy_below: Annotated[float, EffectiveWhen(".entropy")] = Field(default=0.001, ge=0)
    """Mean over response tokens, nats."""
    equal_scores: Annotated[StepAction, EffectiveWhen("rollout.samples_per_prompt", unless="1")] = "tell"
    """All responses of each group have the same score, so there is nothing to compare. Not checked if each prompt has
    one response."""
    kl: StateAction = "off"
    """The KL divergence from the reference is above `kl_above`. Needs algo.kl.where."""
    kl_above: Annotated[float, EffectiveWhen(".kl")] = Field(default=10.0, gt=0)
    """Mean over response tokens, nats."""
    length: StepAction = "off"
    """The share of responses that end at rollout.max_response_tokens is at least `length_share`."""
    length_share: Annotated[float, EffectiveWhen(".length")] = Field(default=0.95, gt=0, le=1)
    """Share of the step's responses."""
    checks = (
        rule(".kl", "algo.kl.where", "needs a reference to measure the KL from",
             lambda own, run: own.kl == "off" or run.algo.kl.where != "off",
             "Set algo.kl.where=loss or reward (with algo.kl.coef=0 the KL is measured and changes nothing)"),
    )  # fmt: skip


class CheckpointConfig(Section):
    """Retention of checkpoints, by what is on disk."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_best: int = Field(default=1, ge=0)
    """Checkpoints with the best validation kept."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept; 0: none for that reason."""
    reserve_gb: float = Field(default=1.0, ge=0)
    """Free space, in GB of 1e9 bytes, that is never used."""
    wait_for_room_s: float = Field(default=3_600.0, ge=0)
    """Seconds that a run waits for disk space before it ends; its saved state stays."""


class AnswersConfig(Section):
    """Record of the responses, with tokens, log-probabilities, scores and advantages. Changes no number."""

    every_steps: int = Field(default=1, ge=0)
    """Training steps whose number is a multiple of this keep their responses, as does every validation; 0: none."""
    max_gb: Annotated[float, EffectiveWhen(".every_steps")] = Field(default=10.0, gt=0)
    """Largest size on disk, in GB of 1e9 bytes; those of the oldest training steps are deleted first."""


class ProfileConfig(Section):
    """torch's profiler over a few steps: `profile/step-<k>-rank-<i>.json.gz` in the run's folder, for
    https://ui.perfetto.dev or chrome://tracing."""

    first_step: int | None = Field(default=None, ge=1)
    """First recorded step. None: no step is recorded."""
    num_steps: Annotated[int, _PROFILED] = Field(default=1, ge=1, le=10)
    """Recorded steps, each in separate files."""
    max_mb: Annotated[float, _PROFILED] = Field(default=200.0, gt=0)
    """Largest trace of a step and rank, in MB of 1e6 bytes. A larger one is not kept and ends the window."""


class DeadlineConfig(Section):
    """Longest times of the phases of a run, in seconds. A longer phase counts as hung: the stacks of all processes are
    written to a file, the trainer is ended, and the chunk is retried from its checkpoint."""

    start_s: float = Field(default=1_800.0, gt=0)
    """Start of the workers: Ray, models, engines."""
    generate_s: float = Field(default=3_600.0, gt=0)
    """Responses of one step."""
    score_s: float = Field(default=3_600.0, gt=0)
    """Scores of one step; a single response has reward.deadline_s."""
    forward_s: float = Field(default=3_600.0, gt=0)
    """A forward pass over the batch: old and reference log-probabilities, values."""
    update_s: float = Field(default=3_600.0, gt=0)
    """All updates of a step of policy or critic."""
    hand_over_s: float = Field(default=900.0, gt=0)
    """Weight sync to the engine."""
    validate_s: float = Field(default=7_200.0, gt=0)
    """One validation."""
    save_s: float = Field(default=1_800.0, gt=0)
    """Writing a checkpoint or exporting weights; waiting for disk space does not count."""
    load_s: float = Field(default=1_800.0, gt=0)
    """Reading a checkpoint."""

    def longest_s(self) -> float:
        """Return the longest deadline."""
        return max(float(getattr(self, name)) for name in type(self).model_fields)


class RuntimeConfig(Section):
    """Placement of the workers. Changes the speed, not the numbers."""

    backend: Literal["local", "ray"] = "local"
    """local: one worker in the trainer's process. ray: one actor a rank."""
    num_workers: Annotated[
        int,
        Bound("divide", "trainer.mini_batch_size x rollout.samples_per_prompt"),
        Bound("be at most", "trainer.batch_size", "Use fewer workers or more prompts"),
        Bound("divide", "warm_start.batch_size", only_with="warm_start.enabled"),
    ] = Field(default=1, ge=1)
    """Ranks of data parallelism; one GPU each on a GPU machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where a GPU is present."""
    threads_per_worker: int = Field(default=1, ge=1)
    """CPU threads of torch in each worker. Another number may change the last digit of a sum."""
    ray_address: Annotated[str | None, _UNDER_RAY] = None
    """Address of a running Ray cluster; None starts a private one on this host."""
    placement_timeout_s: Annotated[float, _UNDER_RAY] = Field(default=60.0, gt=0)
    """Seconds to wait for the cluster to grant the workers' resources."""
    fit_memory: Annotated[Literal["off", "check", "auto"], _ON_GPUS] = "check"
    """Use of the memory plan on a GPU. check: a run that cannot fit with any micro-batch is refused. auto: also, the
    plan chooses the fastest values that fit of `rollout.memory_share`, `rollout.max_batched_tokens`,
    `rollout.sleep_level`, `trainer.max_tokens_per_micro_batch`, `algo.kl.offload`, `model.lora.offload`,
    `optim.offload` and `model.gradient_checkpointing`. off: the plan is only printed."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Dense operations a second of one device in the compute type, in units of 1e12: the denominator of `perf/mfu`.
    None: by the GPU's name in bfloat16; unknown (and no such metric) on a CPU."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch's profiler records. Slows these steps down and changes no number."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """Longest time of each phase before it counts as hung."""
    stop_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds in which a run ends after a request to stop. The step has half of them to finish, then it is cancelled
    and the step before is saved; the next start repeats what is not saved."""
    max_chunk_retries: int = Field(default=2, ge=0)
    """Most retries of a failed chunk from its checkpoint."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Priority in the queue for the slots of their root (`millrace slots`), the highest first. Runs with a lower one
    return their slots at the end of a chunk, and wait. Without effect if the root has no slots."""
    checks = (
        rule(".num_workers", ".backend", "must be 1 with runtime.backend=local",
             lambda own, _: own.backend == "ray" or own.num_workers == 1, "Set runtime.backend=ray"),
    )  # fmt: skip


class PathsConfig(Section):
    """Output folders."""

    root: str = "artifacts"
    """Folder of datasets, models, runs and the MLflow store; relative to the working directory. `~` is expanded."""

    _expanded = field_validator("root")(expand_home)


class TrackingConfig(Section):
    """MLflow. The local journal is always written."""

    enabled: bool = True
    """Send metrics and artifacts to MLflow."""
    uri: Annotated[str | None, _TRACKED] = None
    """MLflow tracking URI; None: sqlite under `paths.root`."""
    experiment: Annotated[str, _TRACKED] = "millrace"
    """MLflow experiment name."""
    log_best: Annotated[bool, _TRACKED] = True
    """Also keep the weights of the best checkpoint in MLflow, next to those of the last one."""
    registered_model: Annotated[str | None, _TRACKED] = Field(default=None, pattern=r"^[^/:]{1,200}$")
    """Name in MLflow's model registry for both, with the aliases `best` and `last`. None: neither."""
    report_to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], EffectiveWhen(".enabled")] = ()
    """Further trackers that receive every step's metrics: TensorBoard (event files in the run's folder) and Weights &
    Biases (its project is `experiment`; WANDB_MODE=offline is possible). Each needs its package."""
    ship_every_s: Annotated[float, _TRACKED] = Field(default=2.0, gt=0)
    """Seconds between two deliveries of the delivery process."""
