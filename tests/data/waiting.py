"""A tool in a module with few imports, because each process of tools imports the module."""

import time


async def waits(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "waited"
