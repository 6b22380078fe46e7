"""A loss that prints its process."""

import os
from typing import Any

from rlcore.algos.losses import PolicyLoss, ppo_clip


def speaks(*tensors: Any, settings: Any) -> PolicyLoss:
    print(f"a worker speaks, process {os.getpid()}", flush=True)
    return ppo_clip(*tensors, settings=settings)
