"""GRPO and PPO runs log all documented metrics, and the reference log's metrics that have a meaning in Millrace."""

from pathlib import Path

import pytest
import torch

from rlcore.tracking.catalog import describe
from rlcore.tracking.journal import read_journal
from tests.helpers.pages import reference_log
from tests.helpers.sessions import session_of
from tests.helpers.small_run import prepare

GPU_ONLY = {"perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"}
SETTINGS = (
    "trainer.total_steps=3", "trainer.steps_per_chunk=1", "trainer.old_logprobs=recompute", "validation.every_steps=1",
    "validation.samples_per_problem=1", "algo.kl.where=loss", "runtime.peak_tflops=0.05", "tracking.enabled=false",
)  # fmt: skip
SPREADS = {
    f"critic/{what}/{part}" for what in ("score", "rewards", "advantages", "returns") for part in ("mean", "max")
}
PROMISED = SPREADS | {
    *(f"actor/{name}" for name in ("pg_loss", "entropy", "kl_coef", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")),
    *(f"actor/{name}" for name in ("grad_norm", "lr", "kl_loss")),
    *(f"global_seqlen/{name}" for name in ("min", "max", "mean", "minmax_diff", "balanced_min", "balanced_max")),
    *(f"perf/{name}" for name in ("throughput", "time_per_step", "total_num_tokens", "mfu/actor", "mfu_verl/actor")),
    *(f"timing_s/{name}" for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor")),
    *(f"timing_s/{name}" for name in ("update_weights", "save_checkpoint", "testing", "step")),
    *(f"timing_per_token_ms/{name}" for name in ("gen", "old_log_prob", "ref", "adv", "update_actor")),
    *(f"val-core/countdown/reward/{name}_at_1" for name in ("mean", "pass", "pass_all", "maj")),
    "reward",
    "val/reward",
    "val-core/countdown/reward/mean_at_1/ci_low",
    "val-core/countdown/reward/greedy/ci_high",
    "perf/cpu_memory_used_gb",
    "disk/free_gb",
    "disk/needed_gb",
    "system/disk_free_gb",
}
PPO = {
    *(f"critic/values/{part}" for part in ("mean", "max", "min")),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vf_explained_var", "grad_norm", "lr")),
    *(f"timing_s/{name}" for name in ("values", "update_critic")),
    *(f"timing_per_token_ms/{name}" for name in ("values", "update_critic")),
    "perf/mfu/critic",
}


@pytest.mark.parametrize(("algo", "more"), [("grpo", set()), ("ppo", PPO)])
def test_every_metric_is_logged_at_every_step(tmp_path: Path, algo: str, more: set[str]) -> None:
    run = prepare(tmp_path, f"algo={algo}", *SETTINGS)
    run.inputs.write(run.config, run.layout)
    with session_of(run) as session:
        session.train(3)
    _, first, *later = read_journal(run.layout.journal)
    reference = {name.replace("openai/gsm8k", "countdown") for name in reference_log() if describe(name) is not None}
    wanted = reference | PROMISED | more
    if not torch.cuda.is_available():
        wanted -= GPU_ONLY
    for record in later:
        assert wanted - record.metrics.keys() == set(), f"step {record.step}"
    # The seconds of a checkpoint are in the next line.
    assert wanted - first.metrics.keys() <= {"timing_s/save_checkpoint"}
    assert {name for name in later[-1].metrics if describe(name) is None} == set(), "not in the docs"
    metrics = later[-1].metrics
    share = metrics["perf/mfu/actor"]
    assert 0 < share < metrics["perf/mfu_verl/actor"], "veRL counts the embedding too"
