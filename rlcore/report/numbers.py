"""Numbers, durations and curves as short text for people."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence

from rlcore.evaluation.stats import Interval

NOTHING = "–"
"""Shown where there is no value."""

_BARS = "▁▂▃▄▅▆▇█"
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3_600.0, 86_400.0
# Below it, zeros would have to be counted.
_SCIENTIFIC_BELOW = 1e-3


def compact(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, thousands separated.

    >>> [compact(value) for value in (0.61234, 12345.6, 0.00009, 3.0, 1484883.0, 0.0)]
    ['0.6123', '12,346', '9e-5', '3', '1,484,883', '0']
    """
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0 or (value == round(value) and abs(value) < 1e15):
        return f"{value:,.0f}"
    if abs(value) < _SCIENTIFIC_BELOW:
        return _scientific(value, min(digits, 3) - 1)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick(value: float) -> str:
    """A number in the short form of an axis.

    >>> [tick(value) for value in (0.25, 12000, 1500000, 0.0002, -3)]
    ['0.25', '12k', '1.5M', '2e-4', '-3']
    """
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.3g}{letter}"
    return _scientific(value, 1) if value and abs(value) < _SCIENTIFIC_BELOW else f"{value:.4g}"


def _scientific(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def fixed(value: float | None) -> str:
    """A score with three decimals everywhere, so that columns compare at a glance."""
    return NOTHING if value is None or math.isnan(value) else f"{value:,.3f}"


def signed(value: float) -> str:
    """With its sign, also where it is positive.

    >>> signed(0.25), signed(-0.25), signed(0.0)
    ('+0.250', '−0.250', '0.000')
    """
    text = fixed(abs(value))
    if float(text.replace(",", "")) == 0.0:
        return text
    return f"{'+' if value > 0 else '−'}{text}"


def interval(found: Interval) -> str:
    """A score and its interval.

    >>> interval(Interval(0.5, 0.41, 0.59))
    '0.500 [0.410, 0.590]'
    """
    return f"{fixed(found.value)} [{fixed(found.low)}, {fixed(found.high)}]"


def signed_interval(found: Interval) -> str:
    """A difference and its interval, with signs."""
    return f"{signed(found.value)} [{signed(found.low)}, {signed(found.high)}]"


def percent(share: float | None, decimals: int = 0) -> str:
    """A share as per cent.

    >>> percent(0.613), percent(0.0004)
    ('61%', '<1%')
    """
    if share is None or math.isnan(share):
        return NOTHING
    if 0 < share < 0.5 * 10 ** -(decimals + 2):
        return f"<{10**-decimals:g}%"
    return f"{100 * share:.{decimals}f}%"


def duration(seconds: float | None) -> str:
    """Seconds as people say them.

    >>> [duration(value) for value in (0.032, 5.25, 165.0, 7800.0, 198000.0)]
    ['32 ms', '5.2 s', '2 min 45 s', '2 h 10 min', '2 d 7 h']
    """
    if seconds is None or math.isnan(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit_s, unit, smaller_s, smaller in (
        (_DAY_S, "d", _HOUR_S, "h"),
        (_HOUR_S, "h", _MINUTE_S, "min"),
        (_MINUTE_S, "min", 1.0, "s"),
    ):
        if seconds >= unit_s:
            whole = round(seconds / smaller_s)
            each = round(unit_s / smaller_s)
            rest = whole % each
            return f"{whole // each} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(f"no unit for {seconds} s")


def amount(count: float) -> str:
    """A large count in three digits.

    >>> [amount(value) for value in (950, 12345, 2_480_000, 3.1e9)]
    ['950', '12.3k', '2.48M', '3.1G']
    """
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{letter}"
    return f"{count:.3g}"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve as text: the mean of each of at most `width` stretches, from the lowest (▁) to the highest (█).

    >>> sparkline([0, 1, 2, 3], width=4)
    '▁▃▆█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def truth_text(ground_truth_json: str) -> str:
    """A ground truth in one line: `target 7, numbers 3 4`.

    >>> truth_text('{"target": 7, "numbers": [3, 4]}')
    'target 7, numbers 3 4'
    """
    try:
        truth = json.loads(ground_truth_json)
    except ValueError:
        return ground_truth_json
    if not isinstance(truth, dict):
        return str(truth)
    return ", ".join(f"{key} {_plain(value)}" for key, value in truth.items())


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def score_parts(parts: Mapping[str, float]) -> str:
    """`correct 1, format 1`."""
    return ", ".join(f"{name} {compact(value, 3)}" for name, value in parts.items())
