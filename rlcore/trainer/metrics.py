"""The metrics and alarms of a training step, and the file that stores a batch with NaN or infinite values. Names and
definitions of the metrics are in rlcore/tracking/metrics.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil
import torch
from jaxtyping import Float
from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor

from rlcore.algos.advantages import score_range
from rlcore.algos.objective import explained_variance
from rlcore.batching.balance import Assignment
from rlcore.batching.pack import split_pairs
from rlcore.config import RunConfig
from rlcore.score import REWARD
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.storage.publish import write_json_atomically
from rlcore.trainer.experience import Experience
from rlcore.trainer.update import Estimate, Update
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.canary import WeightSync
from rlcore.workers.device import MemoryPeak
from rlcore.workers.worker import WorkerInfo

NON_FINITE = "non_finite"
SKIPPED = "alarm/update_skipped"
"""The metric for the share of policy updates that were skipped. Updates without a scored response count as skipped."""
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
    """Return metrics of the load balance over ranks, the time of each phase, and the share of the devices' peak
    performance that the updates reach."""
    sequences = assignment.whole.sequences
    return {
        **balance_metrics(packed, sequences),
        **mfu_metrics(config, packed, assignment, seconds, info),
        **timing_metrics(seconds, packed, num_response_tokens=num_response_tokens, num_devices=len(sequences)),
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
    """Return the metrics of scores, rewards, advantages, returns and values, beginning with the mean score."""
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
    """Return metrics of the lengths of prompts and responses. `clip_ratio`: the share of prompts or responses at their
    length limit."""
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
    """Return the share of groups whose scores are all equal, the share of unscored responses, and the mean of each
    score part."""
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
    """Return metrics of the responses that this step cut off and the next step continues, or {} if there are none."""
    if not experience.cut_length:
        return {}
    return {
        "rollout/cut_length": float(experience.cut_length),
        "rollout/carried_groups": float(len(experience.carried) // config.rollout.samples_per_prompt),
        "rollout/carried_tokens": float(experience.num_carried_tokens),
        "rollout/stale_token_share": experience.num_stale_tokens / experience.num_response_tokens,
    }


def balance_metrics(packed: PackedBatch, sequences: Sequence[Sequence[int]]) -> Metrics:
    """Return metrics of the number of tokens per rank for two splits of the sequences: the balanced one, and one in
    batch order for comparison."""
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
    """Return metrics of the difference between the sampler's and the trainer's token probabilities."""
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
    """Return the seconds and the time per token of each phase, the throughput per device, and the used host memory."""
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
    config: RunConfig, packed: PackedBatch, assignment: Assignment, seconds: Mapping[str, float], info: WorkerInfo
) -> Metrics:
    """Return the share of the devices' peak performance that the updates reach, or {} if the peak is unknown.
    `perf/mfu` counts only necessary operations, and the output head only for tokens with a loss. `perf/mfu_verl` counts
    operations as verl does."""
    if info.peak_flops is None:
        return {}
    lengths, num_shared = split_pairs(packed).sequence_lengths().tolist(), assignment.num_shared
    num_devices, num_epochs = len(assignment.whole.sequences), config.trainer.epochs_per_batch
    flops: dict[tuple[str, str], float] = {}
    if info.shape is not None:
        actor = info.shape.update_flops(
            lengths, num_targets=packed.num_loss_tokens, num_shared=num_shared, lora=config.model.lora
        )
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


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm about one step. `action`: `tell`, `skip` or `stop`, as in the settings `alarms`."""

    name: str
    action: str
    text: str


def batch_alarms(config: RunConfig, experience: Experience) -> tuple[Alarm, ...]:
    """Return the alarms about a step's responses: equal scores, or too many responses at the length limit. Call this
    before the update, so that an alarm can prevent it."""
    alarms = config.alarms
    found = []
    if alarms.equal_scores != "off" and _have_equal_scores(experience):
        text = "all groups have responses of one score each: nothing to learn from"
        found.append(Alarm("equal_scores", alarms.equal_scores, text))
    if alarms.length != "off":
        at_limit = sum(rollout.finish_reason == "length" for rollout in experience.rollouts)
        share = at_limit / len(experience.rollouts)
        if share >= alarms.length_share:
            limit = config.rollout.max_response_tokens
            text = (
                f"{share:.0%} of the responses end at rollout.max_response_tokens={limit}, "
                f"alarms.length_share is {alarms.length_share:g}"
            )
            found.append(Alarm("length", alarms.length, text))
    return tuple(found)


def step_alarms(
    config: RunConfig, update: Update, kl_in_reward: float | None, weight_sync: WeightSync
) -> tuple[Alarm, ...]:
    """Return the alarms about a step's update (non-finite values, gradient norm, entropy or KL divergence) and about
    the weight sync after it."""
    alarms, policy = config.alarms, update.policy
    found = []
    if update.failure is not None:
        found.append(Alarm(NON_FINITE, alarms.non_finite, str(update.failure)))
    if weight_sync.warning:
        found.append(Alarm("canary", "tell", weight_sync.warning))
    norm = 0.0 if policy is None else policy.largest_grad_norm
    if alarms.grad_norm != "off" and norm > alarms.grad_norm_above:
        largest = f"the largest norm of a mini-batch's gradient is {norm:.4g}"
        text = f"{largest}, alarms.grad_norm_above is {alarms.grad_norm_above:g}"
        found.append(Alarm("grad_norm", alarms.grad_norm, text))
    entropy = None if policy is None else policy.stats.mean("entropy_sum")
    if alarms.entropy != "off" and entropy is not None and entropy < alarms.entropy_below:
        text = f"the policy's entropy is {entropy:.4g}, alarms.entropy_below is {alarms.entropy_below:g}"
        found.append(Alarm("entropy", alarms.entropy, text))
    kl = update.observed_kl(config.algo, kl_in_reward)
    if alarms.kl != "off" and kl is not None and kl > alarms.kl_above:
        text = f"the KL divergence from the reference is {kl:.4g}, alarms.kl_above is {alarms.kl_above:g}"
        found.append(Alarm("kl", alarms.kl, text))
    return tuple(found)


def _have_equal_scores(experience: Experience) -> bool:
    scored = [
        (group, score.total)
        for group, score in zip(experience.group_ids, experience.scores, strict=True)
        if score.failure is None
    ]
    num_groups = len({group for group, _ in scored})
    # A group of one response has nothing to compare with.
    return len(set(scored)) == num_groups < len(scored)


def save_failed_batch(directory: Path, step: int, experience: Experience, batch: TrainBatch) -> tuple[Path, list[int]]:
    """Save a batch with NaN or infinite values (`.safetensors`) and its responses (`.json`) in `directory`. Return the
    path of the batch file, and the prompt ids of the rows that contain NaN or infinite values."""
    directory.mkdir(parents=True, exist_ok=True)
    given = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "packed"}
    per_token = {name: values for name, values in given.items() if values is not None}
    tensors = {field.name: getattr(batch.packed, field.name) for field in fields(batch.packed)} | per_token
    file = directory / f"step-{step:06d}.safetensors"
    # Tensors are cloned, since safetensors rejects shared memory (old and behavior log-probabilities share it).
    save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}, str(file))
    rows = _non_finite_rows(batch, per_token)
    responses: list[JsonValue] = [
        {
            "row": row,
            "prompt_id": rollout.prompt.prompt_id,
            "ground_truth": rollout.prompt.ground_truth_json,
            "answer": text,
            "score": score.total,
            "failure": score.failure,
            "non_finite": row in rows,
        }
        for row, (rollout, score, text) in enumerate(
            zip(experience.rollouts, experience.scores, experience.texts, strict=True)
        )
    ]
    write_json_atomically(file.with_suffix(".json"), responses)
    return file, [experience.rollouts[row].prompt.prompt_id for row in sorted(rows)]


def _non_finite_rows(batch: TrainBatch, per_token: dict[str, Tensor]) -> set[int]:
    bad = ~torch.isfinite(batch.packed.scores)
    sequence_ids = batch.packed.sequence_ids()
    for values in (batch.packed.behavior_logprobs, *per_token.values()):
        bad[sequence_ids[~torch.isfinite(values)]] = True
    return set(torch.nonzero(bad)[:, 0].tolist())
