"""Fingerprints (16 hex digits) of a stage's inputs and of a run's settings, and the ids and folders of runs."""

import hashlib
import json
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlcore.config.base import MayChange, covers, fields_of, leaves
from rlcore.config.run import RunConfig

_DIGITS = 16


def fingerprint(stage: str, payload: Any) -> str:
    """Return the first 16 hex digits of a SHA-256 hash of a stage's name and its inputs. The order of keys does not
    matter. Raises TypeError for inputs other than settings and JSON values."""
    content = {"stage": stage, "payload": payload}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@cache
def may_change() -> frozenset[str]:
    """Return the keys and sections that may differ between two starts of the same run (annotation `MayChange`).
    `fixed_settings` makes exceptions."""
    return frozenset(name for name, field in fields_of(RunConfig) if MayChange in field.metadata)


def total_steps_may_change(config: RunConfig) -> bool:
    """Return whether a finished run can be extended by more steps. This requires reinforcement learning, and learning
    rates that do not depend on the total number of steps."""
    optims = [config.optim] if config.critic is None else [config.optim, config.critic.optim]
    is_fixed = (each.schedule == "constant" and (each.warmup_steps > 0 or each.warmup_ratio == 0) for each in optims)
    return not config.is_supervised and all(is_fixed)


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that must stay the same in all starts of a run, as dotted keys with JSON values."""
    free = may_change() | {"trainer.total_steps"} if total_steps_may_change(config) else may_change()
    # Neither parts nor suites have a seed in their data.
    found = leaves(config.model_dump(mode="json", exclude={"data": {"parts": {"__all__": {"data": {"seed"}}}}}))
    lasting = {
        name: value
        for name, value in found.items()
        # the key and its sections
        if free.isdisjoint(accumulate(name.split("."), "{}.{}".format))
    }
    warm = config.warm_start
    # The result is the checkpoint, one for each chunk, with the lowest held-out loss.
    is_chosen = warm.enabled and warm.stop_at_reward is None and warm.held_out_rows > 0
    if is_chosen and warm.steps_per_chunk < warm.max_steps:
        lasting["warm_start.steps_per_chunk"] = warm.steps_per_chunk
    return lasting


def changed_settings(config: RunConfig, *names: str) -> dict[str, Any]:
    """Return the settings from `fixed_settings` that differ from their defaults, by dotted key. Only the keys and
    sections in `names` are considered."""
    usual = leaves(RunConfig().model_dump(mode="json")).items()
    lasting = fixed_settings(config).items()
    return {key: value for key, value in lasting if (key, value) not in usual and any(covers(n, key) for n in names)}


def settings_fingerprint(config: RunConfig) -> str:
    """Return a fingerprint of the `fixed_settings`, which must stay the same in all starts of a run."""
    return fingerprint("settings", fixed_settings(config))


def run_id(config: RunConfig) -> str:
    """Return `run_id` if it is set, otherwise `<name>-s<seed>-<first 8 hex digits of the settings' fingerprint>`."""
    return config.run_id or f"{config.name}-s{config.seed}-{settings_fingerprint(config)[:8]}"


RUN_FILE = "run.json"
"""The file in a run's folder that records the run's origin. See `rlcore.tracking.lineage.Origin`."""


def run_directory(config: RunConfig) -> Path:
    """Return the folder of the run under `paths.root`."""
    return Path(config.paths.root) / "runs" / run_id(config)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"a fingerprint of {type(value).__name__} ({value!r}) is not defined; pass plain values")
