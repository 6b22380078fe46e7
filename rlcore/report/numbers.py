"""Numbers, durations and curves as short text for people."""

import itertools
import math

from rlcore.evaluation.stats import Interval

NOTHING = "–"
"""Shown where there is no value."""

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
# Below it, zeros would have to be counted.
_SCIENTIFIC_BELOW = 1e-3


def compact(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, or all of those before the point, thousands separated.

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


def short(value: float) -> str:
    """A number for an axis or a tile: large ones in three digits.

    >>> [short(value) for value in (0.25, 12345, 1500000, 3.1e9, 0.0002, -3, 9999.7, 999600)]
    ['0.25', '12.3k', '1.5M', '3.1G', '2e-4', '-3', '10k', '1M']
    """
    # Below a limit the number is rounded to less than 1,000 of its unit.
    for limit, scale, letter in ((999.5e9, 1e12, "T"), (999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (9_999.5, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.3g}{letter}"
    return _scientific(value, 1) if value and abs(value) < _SCIENTIFIC_BELOW else f"{value:.4g}"


def _scientific(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def fixed(value: float | None) -> str:
    """A score with three decimals everywhere, so that columns compare at a glance."""
    return NOTHING if value is None or math.isnan(value) else f"{value:,.3f}"


def signed(value: float) -> str:
    """The number with its sign, also where it is positive.

    >>> signed(0.25), signed(-0.25), signed(-0.0001)
    ('+0.250', '−0.250', '0.000')
    """
    return fixed(0.0) if abs(value) < 0.0005 else f"{value:+,.3f}".replace("-", "−")


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
    return f"{share:.{decimals}%}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them.

    >>> [duration(value) for value in (0.032, 5.25, 165.0, 7800.0, 198000.0)]
    ['32 ms', '5.2 s', '2 min 45 s', '2 h 10 min', '2 d 7 h']
    """
    if seconds is None or math.isnan(seconds):
        return NOTHING
    for (unit_s, unit), (finer_s, finer) in itertools.pairwise(_UNITS):
        if seconds >= unit_s:
            whole, rest = divmod(round(seconds / finer_s), unit_s // finer_s)
            return f"{whole} {unit} {rest} {finer}" if rest else f"{whole} {unit}"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
