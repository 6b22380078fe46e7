"""Comparison of a flat tensor with the expected values of response tokens."""

import math
from collections.abc import Mapping

from torch import Tensor


def assert_tokens(actual: Tensor, expected: Mapping[int, float], rel: float = 1e-12) -> None:
    """Assert that `actual` has the expected value at each response token and exactly 0 elsewhere."""
    for t, value in enumerate(actual.tolist()):
        if t not in expected:
            assert value == 0.0, f"position {t}: {value} where the mask is False"
        else:
            assert math.isclose(value, expected[t], rel_tol=rel, abs_tol=rel), f"position {t}: {value} != {expected[t]}"


def assert_flags(actual: Tensor, expected: Mapping[int, bool]) -> None:
    """Like `assert_tokens`, for truth values."""
    assert actual.tolist() == [expected.get(t, False) for t in range(actual.numel())]


def assert_floats(actual: Tensor, expected: list[float], rel: float = 1e-12) -> None:
    """Assert that two sequences of numbers are equal, element by element."""
    assert actual.shape == (len(expected),)
    for i, (got, want) in enumerate(zip(actual.tolist(), expected, strict=True)):
        assert math.isclose(got, want, rel_tol=rel, abs_tol=rel), f"{i}: {got} != {want}"
