"""A tool in a module that imports little: each process of tools imports it."""

import time


async def waits(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "waited"
