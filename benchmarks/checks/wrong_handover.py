"""Hand-overs that are wrong on purpose: the product must stop before anything is sampled from them, and say why."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.checks.rig import Rig, Verdict
from rlcore.errors import EngineError
from rlcore.rollout.vllm import weights as handover
from rlcore.workers.worker import Worker

CHANGE = -1.5
SKIPPED = "model.layers.0.mlp.down_proj.weight"


def check(rig: Rig) -> Verdict:
    """One tensor that never arrives, a head that stays as it was; right hand-overs before, between and after."""
    right = [_right(rig)]
    rig.group.each(_change, SKIPPED)
    skipped = _with_fault(rig, "load", _skipping)
    rig.group.each(Worker.reset)
    right.append(_right(rig))
    rig.group.each(_change, "model.embed_tokens.weight")
    if rig.device.type == "cuda":
        head = _StaleHead()
        stale = _with_fault(rig, "load", head.wrap)
        head.restore()
    else:  # there vLLM itself forgets the head
        stale = _with_fault(rig, "tied_head", lambda original: lambda model: (None, None))
    rig.group.each(Worker.reset)
    right.append(_right(rig))
    expected = {
        "one tensor skipped": ("canary_bound" in skipped and SKIPPED in skipped, skipped),
        "tied head stale": ("canary_bound" in stale and "the head, tied to" in stale, stale),
    }
    bound = 0.02 if rig.bfloat16 else 1e-4
    return Verdict(
        all(ok for ok, _ in expected.values()) and max(right) <= bound,
        {
            "stopped_with": {name: told for name, (_, told) in expected.items()},
            "right_handovers": right,
            "bound": bound,
        },
    )


def _right(rig: Rig) -> float:
    return float(rig.group.each(Worker.hand_over, 0)[0])


def _change(worker: Worker, name: str) -> None:
    """What training does to a weight in many steps."""
    with torch.no_grad():
        dict(worker.policy_model().model.named_parameters())[name].mul_(CHANGE)


def _with_fault(rig: Rig, function: str, wrap: Callable[[Any], Any]) -> str:
    """What a hand-over ends with while a function of the engine's hand-over is another; '' where it ends well."""
    original = getattr(handover, function)
    setattr(handover, function, wrap(original))
    try:
        rig.group.each(Worker.hand_over, 1)
    except EngineError as error:
        return str(error)
    finally:
        setattr(handover, function, original)
    return ""


def _skipping(load: Any) -> Any:
    """vLLM's own loader never sees one tensor, though it was sent."""

    def wrapped(model: nn.Module, config: Any, weights: Any, expected: frozenset[str]) -> None:
        inner: Any = model.load_weights

        def without(pairs: Iterator[tuple[str, Tensor]]) -> Any:
            return inner(pair for pair in pairs if pair[0] != SKIPPED)

        model.load_weights = without  # type: ignore[assignment]
        try:
            load(model, config, weights, expected)
        finally:
            del model.load_weights

    return wrapped


class _StaleHead:
    """The head becomes a copy of the embedding as it was."""

    def wrap(self, load: Any) -> Any:
        def wrapped(model: nn.Module, config: Any, weights: Any, expected: frozenset[str]) -> None:
            self._head: Any = model.lm_head
            self._tied = self._head.weight
            sent = list(weights)
            embedding = next(tensor for name, tensor in sent if name.endswith("embed_tokens.weight"))
            old = self._tied.detach().clone()
            old[: len(embedding)] = (embedding / CHANGE).to(old.dtype)
            load(model, config, sent, expected)
            self._head.weight = nn.Parameter(old, requires_grad=False)

        return wrapped

    def restore(self) -> None:
        """Tie it again."""
        self._head.weight = self._tied
