"""From the host to the device without waiting for what the device is computing."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device, in `dtype` where one is given.

    A copy from ordinary memory waits until the device has done everything ordered before; one from page-locked memory
    takes its place in the device's order of things, and the host goes on.
    """
    found = tensor if dtype is None else tensor.to(dtype)
    if device.type != "cuda" or found.is_cuda:
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
