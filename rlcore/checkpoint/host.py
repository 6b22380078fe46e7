"""Memory of the host that a save copies to, so that training may go on while the copy is written."""

import logging
import threading
from collections.abc import Iterable

import psutil
import torch
from torch import Tensor

from rlcore.checkpoint.boxes import LocalPart

log = logging.getLogger(__name__)

SPARE_SHARE = 0.25
"""Of a copy's size: host memory that must be left beside it, for everything else that runs there."""


def fits_in_memory(num_bytes: int) -> bool:
    """Whether the host has room for a copy of that size."""
    return psutil.virtual_memory().available > num_bytes * (1 + SPARE_SHARE)


class HostBuffers:
    """Where copies of a GPU's tensors go: page-locked memory, several times as fast as other, and slow to get.

    So it is kept from save to save, and asked for in a thread before the first. Tensors of a CPU are copied to ordinary
    memory that lives as long as the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are held already; waits for those that are being got."""
        self.wait()
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def prepare(self, wanted: Iterable[tuple[str, torch.Size, torch.dtype]]) -> None:
        """Get buffers in a thread: names, shapes and types of what `copy` will be asked for."""
        known = list(wanted)
        if not fits_in_memory(sum(shape.numel() * dtype.itemsize for _, shape, dtype in known)):
            return

        def get() -> None:
            for name, shape, dtype in known:
                self._buffers[name] = _page_locked(shape, dtype)

        self._preparing = threading.Thread(target=get, name="checkpoint-buffers", daemon=True)
        self._preparing.start()

    def wait(self) -> None:
        """Until the buffers are there; before the first `copy` of a save."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def copy(self, part: LocalPart) -> Tensor:
        """Begin to copy a part to the host. The copy is whole after the device's `synchronize`."""
        source = part.local
        if source.device.type != "cuda":
            return source.to("cpu", copy=True)
        buffer = self._buffers.get(part.name)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = self._buffers[part.name] = _page_locked(source.shape, source.dtype)
        return buffer.copy_(source, non_blocking=True)


def _page_locked(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Page-locked memory, or ordinary where the host gives none (a limit of a container, say): slower, as good."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as reason:
        log.warning("no page-locked memory for checkpoints (%s); saves hold training up for longer", reason)
        return torch.empty(shape, dtype=dtype)
