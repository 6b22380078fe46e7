"""Alarms about a step's responses and update, and the file of a non-finite batch."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor

from rlcore.config import RunConfig
from rlcore.storage.publish import write_json_atomically
from rlcore.trainer.experience import Experience
from rlcore.trainer.update import Update
from rlcore.types import TrainBatch
from rlcore.workers.canary import WeightSync

NON_FINITE = "non_finite"
SKIPPED = "alarm/update_skipped"
"""The metric for the skipped share of policy updates, absent if 0. Updates without a scored response are skipped."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm about one step. `name` and `action` come from the settings `alarms`."""

    name: str
    action: str
    text: str


def batch_alarms(config: RunConfig, experience: Experience) -> tuple[Alarm, ...]:
    """Return the alarms about the responses, before any update."""
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
    """Return the alarms about the update of a step and about the weight sync that follows it."""
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
    """Save a non-finite batch (`.safetensors`) and its responses (`.json`). Return the path of the batch, and the
    prompt ids of its non-finite rows."""
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
