"""Answers of training steps, for people to read."""

from pathlib import Path

from pydantic import JsonValue

from rlcore.storage.publish import write_json_atomically
from rlcore.trainer.answers import Decode
from rlcore.trainer.experience import Experience

NUM_GROUPS = 4
"""Prompts kept of a step: enough to see what the model writes."""


def write_samples(directory: Path, step: int, experience: Experience, decode: Decode) -> Path:
    """Write the first groups of a step: prompt, every answer, its score and parts."""
    directory.mkdir(parents=True, exist_ok=True)
    rows: list[JsonValue] = [
        {
            "step": step,
            "prompt_id": rollout.prompt.prompt_id,
            "prompt": decode([rollout.prompt.token_ids])[0],
            "ground_truth": rollout.prompt.ground_truth_json,
            "answer": text,
            "score": score.total,
            "failure": score.failure,
            "parts": dict(score.parts),
            "num_tokens": len(rollout.response_ids),
            "finish_reason": rollout.finish_reason,
        }
        for rollout, score, text, group in zip(
            experience.rollouts, experience.scores, experience.texts, experience.group_ids, strict=True
        )
        if group < NUM_GROUPS
    ]
    file = directory / f"step-{step:06d}.json"
    write_json_atomically(file, rows)
    return file
