"""How often the host waits for the GPU in an update: as often with many micro-batches as with few, so never for one."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks.command import ROOT
from benchmarks.checks.rig import Rig, Verdict
from rlcore.workers.worker import Worker

BUDGETS = (16_384, 4_096)
"""Tokens of a micro-batch."""
_MARK = "synchronizing CUDA operation"


def check(rig: Rig) -> Verdict:
    """The policy's update in few micro-batches and in many; the first of each is a warm-up (compilers wait)."""
    if rig.device.type != "cuda":
        return Verdict(True, {"why": "no GPU here: nothing to wait for"})
    counts: dict[int, Counter[str]] = {}
    for budget in BUDGETS:
        places: Counter[str] = Counter()
        override = f"trainer.max_tokens_per_micro_batch={budget}"
        rig.step(override)
        with rig.watched(lambda verb, places=places: _counted(verb, places)):
            rig.step(override, reset=False)
        counts[budget] = places
    few, many = (counts[budget] for budget in BUDGETS)
    figures = {f"{budget} tokens": dict(counts[budget].most_common(8)) for budget in BUDGETS}
    return Verdict(sum(many.values()) <= sum(few.values()), {"waits by place": figures})


@contextlib.contextmanager
def _counted(verb: Any, places: Counter[str]) -> Iterator[None]:
    """Waits by the line of Python that asked for them."""
    if verb is not Worker.update_policy:
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places.update(f"{Path(one.filename).relative_to(ROOT)}:{one.lineno}" for one in told if _MARK in str(one.message))
