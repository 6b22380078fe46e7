"""The naive twin of quantization to NF4."""

import torch
from torch import Tensor

# Dettmers et al. 2023, appendix E.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nearest_levels(weight: Tensor) -> Tensor:
    """Quantize each block of 64 in Python floats: each weight becomes the nearest of its levels."""
    flat = weight.flatten().tolist()
    found: list[float] = []
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        largest = max(abs(value) for value in block)
        for value in block:
            found.append(min((level * largest for level in LEVELS), key=lambda level: abs(level - value)))
    return torch.tensor(found).view(weight.shape).to(weight.dtype)
