"""Digests of weights against sums by hand."""

import pytest
import torch

from rlcore.models import memory
from rlcore.models.memory import digest


def by_hand(tensor: torch.Tensor) -> int:
    """Use Python integers and chunks of the real size."""
    flat = tensor.flatten()
    words = flat.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).tolist()
    factors = memory._digest_factors(tensor.device).tolist()
    total = 0
    for place, (word, value) in enumerate(zip(words, flat.tolist(), strict=True)):
        chunk, inside = divmod(place, memory._CHUNK)
        total += (word if value else 0) * factors[inside] * (2 * chunk + 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_is_sum_over_elements(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CHUNK", 16)
    memory._digest_factors.cache_clear()
    tensor = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[0, 0], tensor[1, 1] = 0.0, -0.0
    assert digest(tensor).item() == by_hand(tensor)
    assert digest(tensor.t().contiguous().t()).item() == by_hand(tensor), "independent of the memory layout"
    memory._digest_factors.cache_clear()


def test_digest_changes_with_one_bit_not_zero_sign() -> None:
    tensor = torch.randn(50, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    right = digest(tensor).item()
    for row, column in ((0, 0), (0, 39), (25, 7), (49, 39)):
        changed = tensor.clone()
        changed.view(torch.int16)[row, column] ^= 1
        assert digest(changed).item() != right
    assert digest(tensor[torch.arange(49, -1, -1)]).item() != right
    zeros = torch.zeros(8)
    assert digest(-zeros).item() == digest(zeros).item() == 0
