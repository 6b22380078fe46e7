"""The batch that broke a run, kept for whoever looks into it."""

from dataclasses import fields
from pathlib import Path

import torch
from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor

from rlcore.storage.publish import write_json_atomically
from rlcore.trainer.experience import Experience
from rlcore.types import TrainBatch


def save_failure(directory: Path, step: int, experience: Experience, batch: TrainBatch) -> tuple[Path, list[int]]:
    """Write the batch (`.safetensors`) and its answers (`.json`); which prompt ids hold a non-finite number."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {field.name: getattr(batch.packed, field.name) for field in fields(batch.packed)}
    per_token = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "packed"}
    file = directory / f"step-{step:06d}.safetensors"
    # Copies: safetensors refuses tensors that share memory, as the old and the behavior log-probabilities may.
    whole = {name: value.clone(memory_format=torch.contiguous_format) for name, value in (tensors | per_token).items()}
    save_file(whole, str(file))
    rows = _non_finite_rows(batch, per_token)
    answers: list[JsonValue] = [
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
    write_json_atomically(file.with_suffix(".json"), answers)
    return file, [experience.rollouts[row].prompt.prompt_id for row in sorted(rows)]


def _non_finite_rows(batch: TrainBatch, per_token: dict[str, Tensor]) -> set[int]:
    """Sequences in which any input of the update is not finite (also the score)."""
    bad = ~torch.isfinite(batch.packed.scores)
    sequence_ids = batch.packed.sequence_ids()
    for values in (batch.packed.behavior_logprobs, *per_token.values()):
        if values.numel():
            bad[sequence_ids[~torch.isfinite(values)]] = True
    return set(torch.nonzero(bad)[:, 0].tolist())
