"""Steps of vLLM's scheduler in which every response grows by one token, ordered in arrays.

`shortened_scheduler(base)` is given to vLLM as its scheduler class before an engine starts. All names of vLLM that it
uses are in `names.py`, where `unsupported_reason` checks them when an engine starts. Where one differs, vLLM orders
every step itself, and one warning gives the reason.
"""

from typing import Any


def shortened_scheduler(base: Any) -> Any:
    """A subclass of vLLM's scheduler class (the synchronous or the asynchronous one) with short steps."""
    from rlcore.rollout.vllm.short.scheduler import ShortSteps

    return type("ShortScheduler", (ShortSteps, base), {})
