"""The metrics of a published veRL run (GRPO, Llama-3.2-1B, GSM8K, 8 GPUs), and what each is here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absent:
    """A metric of the reference that has no meaning here, and why."""

    name: str
    reason: str


REFERENCE_METRICS: tuple[str, ...] = (
    *(f"actor/{name}" for name in ("entropy", "grad_norm", "kl_coef", "kl_loss", "lr")),
    *(f"actor/{name}" for name in ("pg_clipfrac", "pg_clipfrac_lower", "pg_loss", "ppo_kl")),
    *(
        f"critic/{name}/{part}"
        for name in ("advantages", "returns", "rewards", "score")
        for part in ("max", "mean", "min")
    ),
    *(f"global_seqlen/{name}" for name in ("balanced_max", "balanced_min", "max", "mean", "min", "minmax_diff")),
    *(f"perf/{name}" for name in ("cpu_memory_used_gb", "max_memory_allocated_gb", "max_memory_reserved_gb")),
    *(f"perf/{name}" for name in ("mfu/actor", "throughput", "time_per_step", "total_num_tokens")),
    *(f"{kind}_length/{part}" for kind in ("prompt", "response") for part in ("clip_ratio", "max", "mean", "min")),
    *(f"timing_per_token_ms/{phase}" for phase in ("adv", "gen", "ref", "update_actor")),
    *(f"timing_s/{phase}" for phase in ("adv", "gen", "generate_sequences", "old_log_prob", "ref", "reshard")),
    *(f"timing_s/{phase}" for phase in ("reward", "save_checkpoint", "start_profile", "step", "stop_profile")),
    *(f"timing_s/{phase}" for phase in ("testing", "update_actor")),
    "training/epoch",
    "training/global_step",
    "val-core/openai/gsm8k/reward/mean@1",
)
"""The 62 names of its last step, in the order of its log."""

ABSENT: tuple[Absent, ...] = (
    Absent("timing_s/generate_sequences", "the engine's part of gen, measured on a worker; here gen is nothing else"),
    Absent("timing_s/reshard", "moves the policy into the engine's sharding before gen; here that is update_weights"),
    Absent(
        "timing_s/start_profile",
        "switches veRL's profiler on; that of runtime.profile begins and ends outside a step's time",
    ),
    Absent(
        "timing_s/stop_profile",
        "switches veRL's profiler off; that of runtime.profile begins and ends outside a step's time",
    ),
)
"""Those that are not logged here."""
