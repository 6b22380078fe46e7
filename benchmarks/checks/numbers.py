"""Checks that compare the log-probabilities of engine and trainer, and a check of the importance correction."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.checks.rig import Rig, Verdict
from rlcore.batching.pack import pack
from rlcore.models.load import load_policy
from rlcore.trainer import step as step_module
from rlcore.types import PackedBatch, Score
from rlcore.workers.actor import policy_logprobs
from rlcore.workers.trained_model import MicroBatchRunner
from rlcore.workers.worker import Worker

BOUNDS = {True: 0.02, False: 1e-4}  # largest mean |difference|, by whether the engine is in bfloat16
NOISE = 0.1  # standard deviation
OVER_CAP = 0.2  # approximate share of the ratios above the cap


def differences(rig: Rig) -> Verdict:
    """Require that engine and trainer give the sampled tokens almost the same log-probabilities.

    If the engine is in bfloat16, also measure how far both are from log-probabilities in float32."""
    result = rig.step()
    rig.group.each(Worker.reset)
    rollouts = result.experience.rollouts
    batch = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    num_micro = -(-batch.num_tokens // rig.config.trainer.max_tokens_per_micro_batch)
    (trainers,) = rig.group.begin(Worker.old_logprobs, [(batch, num_micro)]).result()
    apart = (trainers - batch.behavior_logprobs)[batch.loss_mask].abs()
    values = {
        "tokens": len(apart),
        "mean": apart.mean().item(),
        "median": apart.median().item(),
        "largest": apart.max().item(),
        "bound": BOUNDS[rig.bfloat16],
        "canary": result.metrics["training/canary_logprob_diff"],
        **{name: value for name, value in result.metrics.items() if name.startswith("training/rollout_probs_diff")},
    }
    if rig.bfloat16:
        (exact,) = rig.group.begin(_in_float32, [(batch, num_micro)]).result()
        for name, found in (("trainer", trainers), ("engine", batch.behavior_logprobs)):
            values[f"{name}_from_float32"] = (found - exact)[batch.loss_mask].abs().mean().item()
    return Verdict(values["mean"] <= values["bound"], values)


def _in_float32(worker: Worker, batch: PackedBatch, num_micro: int) -> Tensor:
    """Compute the initial policy's log-probabilities in float32, from weights rounded to bfloat16 as in the engine."""
    config = worker._config
    plain = config.model.model_copy(update={"dtype": "float32", "attention": "sdpa", "compile": False})
    device = worker._device
    policy = load_policy(worker._model_directory, model=plain, device=device).to(torch.bfloat16).to(torch.float32)
    runner = MicroBatchRunner("the log-probabilities in float32", recover=lambda: None)
    temperature = config.rollout.sampling.temperature
    return runner.token_values(
        lambda micro: policy_logprobs(policy.eval(), micro, temperature), batch, num_micro, device
    )


def correction(rig: Rig) -> Verdict:
    """Compare the loss of a training step with a naive computation of it, in each mode of the importance correction."""
    if rig.group.kept is None:
        rig.step()
    kept = rig.group.kept
    assert kept is not None
    rng = np.random.default_rng(5)
    rig.group.kept = [
        dataclasses.replace(
            one,
            behavior_logprobs=one.behavior_logprobs
            + NOISE * rng.standard_normal(len(one.response_ids)).astype(np.float32),
        )
        for one in kept
    ]
    try:
        return _corrected(rig)
    finally:
        rig.group.kept = kept


def _corrected(rig: Rig) -> Verdict:
    _, batch = _step_and_batch(rig, "algo.importance.mode=truncate")
    mask = batch.packed.loss_mask
    ratios = (batch.old_logprobs - batch.packed.behavior_logprobs)[mask].double().exp()
    cap = float(f"{max(1.0001, ratios.quantile(1 - OVER_CAP).item()):.4f}")
    values: dict[str, Any] = {"noise_added": NOISE, "cap": cap, "losses": {}}
    tolerance = 2e-4 if rig.bfloat16 else 2e-5
    ok = True
    for mode in ("off", "truncate", "mask"):
        metrics, batch = _step_and_batch(rig, f"algo.importance.mode={mode}", f"algo.importance.cap={cap}")
        if mode != "off":
            ratios = (batch.old_logprobs - batch.packed.behavior_logprobs)[mask].double().exp()
        weights = [_weight(mode, ratio, cap) for ratio in ratios.tolist()]
        advantages = batch.advantages[mask].double().tolist()
        # One update: the policy is the old one, so every ratio is 1 and nothing is clipped.
        by_hand = -math.fsum(w * a for w, a in zip(weights, advantages, strict=True)) / len(advantages)
        values["losses"][mode] = {"product": metrics["actor/pg_loss"], "by_hand": by_hand}
        ok &= abs(metrics["actor/pg_loss"] - by_hand) <= tolerance
    plain = values["losses"]["off"]["by_hand"]
    changed = [abs(values["losses"][mode]["product"] - plain) for mode in ("truncate", "mask")]
    values |= {"tolerance": tolerance, "changed_by": changed}
    return Verdict(ok and min(changed) > 2 * tolerance, values)


def _weight(mode: str, ratio: float, cap: float) -> float:
    if mode == "off":
        return 1.0
    if mode == "truncate":
        return min(ratio, cap)
    return ratio if 1 / cap <= ratio <= cap else 0.0


def _step_and_batch(rig: Rig, *overrides: str) -> tuple[Any, Any]:
    seen: list[Any] = []
    module: Any = step_module  # its imports are not exported
    estimate: Callable[..., Any] = module.estimate

    def record(*arguments: Any, **named: Any) -> Any:
        seen.append(estimate(*arguments, **named))
        return seen[-1]

    module.estimate = record
    try:
        result = rig.step(*overrides)
    finally:
        module.estimate = estimate
    return result.metrics, seen[0].batch
