"""The metrics of a training step, under names that are usual in the field. rlcore/tracking/metrics.md defines them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil
import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.advantages import score_range
from rlcore.algos.objective import explained_variance
from rlcore.batching.balance import Assignment
from rlcore.batching.pack import split_pairs
from rlcore.config import LoraConfig, RunConfig
from rlcore.score import REWARD
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.trainer.alarms import SKIPPED
from rlcore.trainer.estimate import Estimate
from rlcore.trainer.experience import Experience
from rlcore.trainer.update import Update
from rlcore.types import PackedBatch
from rlcore.workers.device import MemoryPeak
from rlcore.workers.worker import WorkerInfo

Metrics = dict[str, float]

PER_TOKEN_PHASES = ("ref", "teacher", "values", "adv", "update_critic", "update_actor", "old_log_prob", "supervise")


def step_metrics(config: RunConfig, experience: Experience, estimated: Estimate, update: Update) -> Metrics:
    """Return a step's metrics of rewards, lengths, groups and sampling mismatch. None of them depends on timing."""
    packed, batch = estimated.batch.packed, estimated.batch
    metrics = reward_metrics(estimated)
    if update.share_skipped:
        metrics[SKIPPED] = update.share_skipped
    if estimated.masked_share is not None:
        metrics["rollout_corr/left_out_share"] = estimated.masked_share
    if estimated.kl_in_reward is not None:
        metrics["actor/reward_kl_penalty"] = estimated.kl_in_reward
    if estimated.teacher_kl is not None:
        metrics["actor/teacher_kl"] = estimated.teacher_kl
    metrics |= length_metrics(config, experience) | group_metrics(packed, experience)
    metrics |= carry_metrics(config, experience)
    if update.logprobs_before is not None:
        weights = None if config.algo.importance.mode == "off" else batch.importance_weights
        # A separate forward pass computes masked tokens too, the update does not.
        mask = estimated.response_mask if update.logprobs_before is batch.old_logprobs else packed.loss_mask
        metrics |= mismatch_metrics(replace(packed, loss_mask=mask), update.logprobs_before, weights)
    return metrics


def cost_metrics(
    config: RunConfig,
    packed: PackedBatch,
    num_response_tokens: int,
    assignment: Assignment,
    seconds: Mapping[str, float],
    info: WorkerInfo,
) -> Metrics:
    """Return the metrics of the balance of the ranks, the time of each phase, and the use of the devices."""
    sequences = assignment.whole.sequences
    num_devices = len(sequences)
    lengths = split_pairs(packed).sequence_lengths().tolist()
    return {
        **balance_metrics(packed, sequences),
        **mfu_metrics(
            seconds,
            lengths,
            info,
            num_targets=packed.num_loss_tokens,
            num_epochs=config.trainer.epochs_per_batch,
            num_devices=num_devices,
            num_shared=assignment.num_shared,
            lora=config.model.lora,
        ),
        **timing_metrics(seconds, packed, num_response_tokens=num_response_tokens, num_devices=num_devices),
    }


def memory_metrics(peaks: Sequence[MemoryPeak]) -> Metrics:
    """Return the peak GPU memory over all ranks, and the number of passes that were repeated for lack of memory."""
    metrics: Metrics = {}
    if peaks[0].reserved_gb:
        metrics["perf/max_memory_allocated_gb"] = max(peak.allocated_gb for peak in peaks)
        metrics["perf/max_memory_reserved_gb"] = max(peak.reserved_gb for peak in peaks)
    if num_retries := sum(peak.num_retries for peak in peaks):
        metrics["perf/num_passes_redone"] = float(num_retries)
    return metrics


def distribution_metrics(name: str, values: Tensor) -> Metrics:
    """Return the mean, maximum and minimum of `values`, or {} if there are none."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def reward_metrics(estimated: Estimate) -> Metrics:
    """Return the metrics of scores, rewards, advantages, returns and values. The mean score is first."""
    packed, values, returns = estimated.batch.packed, estimated.batch.old_values, estimated.returns
    mask = packed.loss_mask
    scores = distribution_metrics("critic/score", packed.scores[packed.score_mask])
    metrics = {
        **({REWARD: scores["critic/score/mean"]} if scores else {}),
        **scores,
        **distribution_metrics("critic/rewards", estimated.rewards[packed.score_mask]),
        **distribution_metrics("critic/advantages", estimated.batch.advantages[mask]),
        **distribution_metrics("critic/returns", returns[mask]),
    }
    if values is not None and mask.any():
        metrics |= distribution_metrics("critic/values", values[mask])
        metrics["critic/vf_explained_var"] = explained_variance(values, returns, mask).item()
    return metrics


def length_metrics(config: RunConfig, experience: Experience) -> Metrics:
    """Return metrics of the lengths of prompts and responses. `clip_ratio`: the share of texts at the length limit."""
    prompts = torch.tensor([len(rollout.prompt.token_ids) for rollout in experience.rollouts])
    responses = torch.tensor([len(rollout.response_ids) for rollout in experience.rollouts])
    cut = torch.tensor([rollout.finish_reason == "length" for rollout in experience.rollouts])
    read = [int((~one.is_sampled).sum()) for one in experience.rollouts if one.is_sampled is not None]
    return {
        **distribution_metrics("environment_length", torch.tensor(read)),
        **distribution_metrics("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= config.filter.max_prompt_tokens).float().mean().item(),
        **distribution_metrics("response_length", responses),
        "response_length/clip_ratio": (cut & (responses >= config.rollout.max_response_tokens)).float().mean().item(),
    }


def group_metrics(packed: PackedBatch, experience: Experience) -> Metrics:
    """Return the shares of groups with equal scores and of unscored responses, and the mean of each score part."""
    highest, lowest = score_range(packed.scores, packed.score_mask, packed.group_ids)
    metrics = {
        "reward/equal_group_share": (highest <= lowest).float().mean().item(),
        "reward/groups_dropped": float(experience.num_groups_dropped),
    }
    metrics |= experience.pass_metrics
    if experience.num_tokens_dropped:
        share = experience.num_tokens_dropped / experience.num_generated_tokens
        metrics["reward/tokens_dropped_share"] = share
    if not packed.score_mask.all():
        metrics["reward/unscored_share"] = 1 - packed.score_mask.float().mean().item()
    names = sorted({name for score in experience.scores for name in score.parts})
    for name in names:
        parts = [score.parts[name] for score in experience.scores if name in score.parts]
        metrics[f"reward/{name}/mean"] = sum(parts) / len(parts)
    return metrics


def carry_metrics(config: RunConfig, experience: Experience) -> Metrics:
    """Return the metrics of the tail cut, or {} if the step had none."""
    if not experience.cut_length:
        return {}
    return {
        "rollout/cut_length": float(experience.cut_length),
        "rollout/carried_groups": float(len(experience.carried) // config.rollout.samples_per_prompt),
        "rollout/carried_tokens": float(experience.num_carried_tokens),
        "rollout/stale_token_share": experience.num_stale_tokens / experience.num_response_tokens,
    }


def balance_metrics(packed: PackedBatch, sequences: Sequence[Sequence[int]]) -> Metrics:
    """Return the metrics of the tokens per rank, for a split in the order of the draws and for the balanced split."""
    lengths = packed.sequence_lengths()
    drawn = torch.stack([part.sum() for part in lengths.chunk(len(sequences))]).float()
    balanced = torch.stack([lengths[torch.tensor(part)].sum() for part in sequences])
    return {
        "global_seqlen/min": drawn.min().item(),
        "global_seqlen/max": drawn.max().item(),
        "global_seqlen/mean": drawn.mean().item(),
        "global_seqlen/minmax_diff": (drawn.max() - drawn.min()).item(),
        "global_seqlen/balanced_min": balanced.min().item(),
        "global_seqlen/balanced_max": balanced.max().item(),
    }


def mismatch_metrics(
    packed: PackedBatch, old_logprobs: Float[Tensor, "T"], importance_weights: Float[Tensor, "T"] | None
) -> Metrics:
    """Return metrics of how much the sampler's token probabilities differ from the trainer's."""
    mask = packed.loss_mask
    if not mask.any():
        return {}
    sampler, trainer = packed.behavior_logprobs[mask].exp(), old_logprobs[mask].exp()
    difference = (sampler - trainer).abs()
    metrics = {
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
    }
    if importance_weights is not None:
        metrics |= distribution_metrics("rollout_corr/weight", importance_weights[mask])
    return metrics


def timing_metrics(
    seconds: Mapping[str, float], packed: PackedBatch, *, num_response_tokens: int, num_devices: int
) -> Metrics:
    """Return the wall-clock seconds, the time per token, and the tokens per second and device."""
    metrics = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    for phase in PER_TOKEN_PHASES:
        if phase in seconds:
            metrics[f"timing_per_token_ms/{phase}"] = 1e3 * seconds[phase] / packed.num_tokens
    if "gen" in seconds:
        metrics["timing_per_token_ms/gen"] = 1e3 * seconds["gen"] / num_response_tokens
    return metrics | {
        "perf/total_num_tokens": float(packed.num_tokens),
        "perf/time_per_step": seconds["step"],
        "perf/throughput": packed.num_tokens / (seconds["step"] * num_devices),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / BYTES_PER_GB,
    }


def mfu_metrics(
    seconds: Mapping[str, float],
    lengths: Sequence[int],
    info: WorkerInfo,
    *,
    num_targets: int,
    num_epochs: int,
    num_devices: int,
    num_shared: int = 0,
    lora: LoraConfig | None = None,
) -> Metrics:
    """Return the share of the devices' peak performance that the updates reach, or {} if the peak is unknown. Only
    necessary operations are counted. The output head is counted for the `num_targets` tokens with a loss."""
    if info.peak_flops is None:
        return {}
    flops: dict[tuple[str, str], float] = {}
    if info.shape is not None:
        actor = info.shape.update_flops(lengths, num_targets=num_targets, num_shared=num_shared, lora=lora)
        for phase in ("update_actor", "supervise"):
            flops["perf/mfu/actor", phase] = actor
            flops["perf/mfu_verl/actor", phase] = info.shape.verl_flops(lengths)
    if info.critic_shape is not None:
        critic = info.critic_shape.update_flops(lengths, num_targets=0, num_shared=num_shared)
        flops["perf/mfu/critic", "update_critic"] = critic
    return {
        name: num_epochs * work / (seconds[phase] * num_devices * info.peak_flops)
        for (name, phase), work in flops.items()
        if phase in seconds
    }
