"""A check that an update is repeated in more micro-batches if it runs out of memory. The results must equal those of
an update with enough memory."""

import contextlib
import ctypes
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks.rig import Rig, Verdict
from rlcore.errors import DeviceMemoryError
from rlcore.models.parallel import gather_parameter
from rlcore.trainer.step import StepResult
from rlcore.workers.worker import Worker

COMPARED = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy")
SHARES = (0.35, 0.5, 0.65, 0.8)  # of an update's memory, tried until an update first fails and then succeeds
ON_A_CPU_BYTES = tuple(1 << power for power in range(18, 27))
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


def prepare() -> None:
    """Make the CPU allocator return freed memory to the system. Otherwise an update could use this memory in addition
    to the memory that `short_of_memory` allows."""
    if not torch.cuda.is_available():
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        allocator.mallopt(M_ARENA_MAX, 1)
        os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # the worker then leaves the allocator alone


def check(rig: Rig) -> Verdict:
    need = 0

    @contextlib.contextmanager
    def measured(verb: Any) -> Iterator[None]:
        nonlocal need
        on_gpu = verb is Worker.update_policy and rig.device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield
        if on_gpu:
            need = max(need, torch.cuda.max_memory_allocated() - before)

    with rig.watched(measured):
        plain = _numbers(rig, rig.step())

    def in_the_update(verb: Any, room: int) -> contextlib.AbstractContextManager[None]:
        return short_of_memory(room, rig.device) if verb is Worker.update_policy else contextlib.nullcontext()

    rooms = [round(share * need) for share in SHARES] if need else list(ON_A_CPU_BYTES)
    messages: list[str] = []
    forced, tried = None, 0
    for room in rooms:
        tried = room
        with _logged(messages), rig.watched(lambda verb, room=room: in_the_update(verb, room)):
            try:
                result = rig.step()
            except (DeviceMemoryError, torch.OutOfMemoryError) as error:
                messages.append(str(error)[:300])
                continue
        forced = _numbers(rig, result)
        break
    if forced is None or not forced["passes_redone"]:
        return Verdict(False, {"why": "with no size of memory the update failed first and succeeded then",
                               "need_bytes": need, "log": messages})  # fmt: skip
    relative, absolute = (1e-3, 1e-5) if rig.bfloat16 else (2e-5, 1e-6)
    off = {
        name: abs(forced[name] - plain[name])
        for name in (*COMPARED, "weights")
        if abs(forced[name] - plain[name]) > relative * abs(plain[name]) + absolute
    }
    return Verdict(
        not off and any("ran out of memory" in message for message in messages),
        {"unforced": plain, "forced": forced, "need_bytes": need, "room_bytes": tried, "apart": off,
         "bounds": {"relative": relative, "absolute": absolute}, "log": messages},
    )  # fmt: skip


def _numbers(rig: Rig, result: StepResult) -> dict[str, float]:
    found = {name: result.metrics[name] for name in COMPARED if name in result.metrics}
    return found | {
        "weights": rig.group.each(weights_norm)[0],
        "passes_redone": result.metrics.get("perf/num_passes_redone", 0.0),
    }


def weights_norm(worker: Worker) -> float:
    return float(
        torch.stack(
            [gather_parameter(parameter).float().norm() for parameter in worker.actor.model.parameters()]
        ).norm()
    )


@contextlib.contextmanager
def short_of_memory(room: int, device: torch.device) -> Iterator[None]:
    """Allow only `room` more bytes of memory inside the `with` block. On a GPU, the limit applies only to torch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (held + room, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _logged(messages: list[str]) -> Iterator[None]:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log, keep = logging.getLogger("rlcore.workers.trained_model"), Keep()
    log.addHandler(keep)
    try:
        yield
    finally:
        log.removeHandler(keep)
