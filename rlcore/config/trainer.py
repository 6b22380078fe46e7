"""Settings of the training loop, its checkpoints and its processes."""

from typing import Literal

from pydantic import Field

from rlcore.config.base import Section
from rlcore.config.deadlines import DeadlineConfig


class TrainerConfig(Section):
    """The loop."""

    total_steps: int = Field(default=100, ge=1)
    """Steps of the run; a step is one batch of prompts sampled, scored and learned from."""
    steps_per_chunk: int = Field(default=20, ge=1)
    """Steps between two checkpoints. A chunk is the unit that Prefect retries."""
    batch_size: int = Field(default=256, ge=1)
    """Prompts a step."""
    mini_batch_size: int = Field(default=256, ge=1)
    """Prompts an optimizer step; divides batch_size."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""
    max_tokens_per_micro_batch: int = Field(default=16_384, ge=1)
    """Token budget of one forward and backward. The gradient does not depend on it."""
    old_logprobs: Literal["auto", "recompute", "behavior"] = "auto"
    """Log-probabilities before the update. auto: recomputed only where a batch gets more than one update."""


class CheckpointConfig(Section):
    """What is kept of a run. Retention works from what is on disk."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_best: int = Field(default=1, ge=0)
    """Checkpoints with the best validation kept."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept; 0: none for that reason."""
    reserve_gb: float = Field(default=1.0, ge=0)
    """Free space, in GB of 1e9 bytes, that is never used."""
    wait_for_room_s: float = Field(default=3_600.0, ge=0)
    """Seconds that a run short of disk space waits for room before it ends; what is saved stays."""


class ProfileConfig(Section):
    """torch's profiler over a few steps: `profile/step-<k>-rank-<i>.json.gz` in the run's folder, for
    https://ui.perfetto.dev or chrome://tracing."""

    first_step: int | None = Field(default=None, ge=1)
    """First step that is recorded. None: no step is."""
    num_steps: int = Field(default=1, ge=1, le=10)
    """Steps that are recorded, each in files of its own."""
    max_mb: float = Field(default=200.0, gt=0)
    """Largest trace of a step and rank, in MB of 1e6 bytes. One that is larger is not kept and ends the window."""


class RuntimeConfig(Section):
    """Where workers live. Changes the speed, not the numbers."""

    backend: Literal["local", "ray"] = "local"
    """local: one worker in the trainer's process. ray: one actor a rank."""
    num_workers: int = Field(default=1, ge=1)
    """Ranks of data parallelism; one GPU each on a GPU machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where a GPU is present."""
    threads_per_worker: int = Field(default=1, ge=1)
    """CPU threads of torch in each worker. Another number may change the last digit of a sum."""
    ray_address: str | None = None
    """Address of a running Ray cluster; None starts a private one on this host."""
    placement_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds to wait for the cluster to grant the workers' resources."""
    fit_memory: Literal["off", "check", "auto"] = "check"
    """What is done with the memory plan of a run on a GPU. check: one that cannot fit, however fine the micro-batches,
    is refused. auto: besides, `rollout.memory_share`, `rollout.sleep_level`, `trainer.max_tokens_per_micro_batch`,
    `algo.kl.offload`, `optim.offload` and `model.gradient_checkpointing` are chosen by the plan, the fastest that fit.
    off: only told."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Dense operations a second of one device in the compute type, in units of 1e12: what `perf/mfu` is a share of.
    None: by the GPU's name in bfloat16; not known (and no such metric) on a CPU."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch's profiler records. Slows these steps down and changes no number."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """How long each phase may take before it counts as hung."""
    stop_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds in which a run that is told to stop has ended. The step has half of them to finish, then it is given up
    and the step before is saved; what is not saved at the end is done again by the next start."""
    max_chunk_retries: int = Field(default=2, ge=0)
    """How often a failed chunk is tried again from its checkpoint."""


class PathsConfig(Section):
    """Where things are written."""

    root: str = "artifacts"
    """Folder of datasets, models, runs and the MLflow store; relative to the working directory."""


class TrackingConfig(Section):
    """MLflow. The local journal is written in any case."""

    enabled: bool = True
    """Whether metrics and artifacts are carried to MLflow."""
    uri: str | None = None
    """MLflow tracking URI; None: sqlite under `paths.root`."""
    experiment: str = "millrace"
    """MLflow experiment name."""
    log_best: bool = True
    """Whether the weights of the best checkpoint are kept in MLflow beside those of the last one."""
    registered_model: str | None = Field(default=None, pattern=r"^[^/:]{1,200}$")
    """Name in MLflow's model registry under which both are put, with the aliases `best` and `last`. None: neither."""
    ship_every_s: float = Field(default=2.0, gt=0)
    """Seconds between two deliveries of the background thread."""
