"""Bytes for people, in the unit that fits."""

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Bytes of a unit, largest first."""


def unit_for(num_bytes: float) -> tuple[float, str]:
    """The largest unit of which it is a tenth or more, so that a column of such sizes shows no zeros; GB for nothing.

    >>> unit_for(2.4e6), unit_for(0)
    ((1000000.0, 'MB'), (1000000000.0, 'GB'))
    """
    if not num_bytes:
        return UNITS[0]
    return next((unit for unit in UNITS if num_bytes >= unit[0] / 10), UNITS[-1])


def size(num_bytes: float) -> str:
    """One size.

    >>> size(77.4e9), size(4_200_000), size(0)
    ('77.4 GB', '4.2 MB', '0.0 GB')
    """
    scale, unit = unit_for(num_bytes)
    return f"{num_bytes / scale:.1f} {unit}"
