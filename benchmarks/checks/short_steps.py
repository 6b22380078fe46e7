"""Answers with and without short steps of vLLM's runner: the same draws, log-probabilities that agree, the speed."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.checks.rig import Rig, Verdict
from rlcore.config.rollout import SamplingConfig
from rlcore.rollout.engine import SamplingRequest
from rlcore.types import Rollout
from rlcore.workers.worker import Worker

LATER_VERSION = 1_000_000
MOST_APART = 0.01
"""Mean |difference| of log-probabilities before two answers part."""
MORE_PARTINGS = 2.0
"""Times as often as answers of vLLM's own steps part when the requests come in another order."""


def check(rig: Rig) -> Verdict:
    """The first step's requests by vLLM's own steps, by short ones, and by vLLM's own in the other order. In bfloat16 a
    token's logits depend a little on the batch around it: a near tie may fall the other way."""
    if rig.device.type != "cuda":
        return Verdict(True, {"why": "no GPU here: vLLM's runner keeps its own steps"})
    if rig.group.kept is None:
        rig.step()
    assert rig.group.kept is not None
    requests = [
        SamplingRequest(one.prompt, one.sample_index, seed=seed, max_tokens=len(one.response_ids))
        for seed, one in enumerate(rig.group.kept)
    ]
    rig.group.each(Worker.hand_over, LATER_VERSION)
    (found,) = rig.group.begin(_both_ways, [(requests, rig.config.rollout.sampling)])()
    verdict: Verdict = found
    return verdict


def _both_ways(worker: Worker, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> Verdict:
    engine: Any = worker._engine
    short = engine.short_runner
    if short is None:
        return Verdict(False, {"error": "short steps are off: the log says why"})
    longest = max(request.max_tokens or 0 for request in requests)
    figures: dict[str, Any] = {}
    answers: dict[str, Sequence[Rollout]] = {}
    for name, enabled, order in (("short", True, 1), ("own", False, 1), ("own, other order", False, -1)):
        short.enabled = enabled
        begun = time.perf_counter()
        answers[name] = engine.generate(requests[::order], sampling, longest)[::order]
        torch.cuda.synchronize()
        figures[name] = {"seconds": time.perf_counter() - begun}
    short.enabled = True
    partings = {name: _apart(answers["own"], answers[name]) for name in ("short", "own, other order")}
    figures |= {f"{name} against own": found for name, found in partings.items()}
    few, most = partings["short"], partings["own, other order"]
    ok = few["logprobs_apart"] <= MOST_APART and few["partings"] <= MORE_PARTINGS * max(most["partings"], 1)
    return Verdict(ok, figures)


def _apart(expected: Sequence[Rollout], found: Sequence[Rollout]) -> dict[str, float]:
    """Answers that part, tokens before that, and how far log-probabilities are apart there."""
    partings, common, apart = 0, 0, [np.zeros(0, dtype=np.float32)]
    for one, other in zip(expected, found, strict=True):
        length = min(len(one.response_ids), len(other.response_ids))
        differing = np.flatnonzero(np.array(one.response_ids[:length]) != np.array(other.response_ids[:length]))
        same = int(differing[0]) if len(differing) else length
        partings += same < max(len(one.response_ids), len(other.response_ids))
        common += same
        apart.append(np.abs(one.behavior_logprobs[:same] - other.behavior_logprobs[:same]))
    return {"partings": partings, "tokens_before": common, "logprobs_apart": float(np.concatenate(apart).mean())}
