"""Fingerprints (16 hex digits) of the inputs of stages, and the ids and folders of runs."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlcore.config.base import MayChange, Section, covers, leaves, sections_of
from rlcore.config.run import RunConfig

_DIGITS = 16


def fingerprint(stage: str, payload: Any) -> str:
    """Return 16 hex digits that identify settings and plain values. The order of keys does not matter. Raises TypeError
    for other values."""
    content = {"stage": stage, "payload": payload}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@cache
def may_change() -> frozenset[str]:
    """Return the keys and sections with the annotation `MayChange`. `fixed_settings` defines the exceptions."""

    def marked(section: type[Section], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if MayChange in field.metadata:
                yield prefix + name
            for inner in sections_of(field.annotation):
                yield from marked(inner, f"{prefix}{name}.")

    return frozenset(marked(RunConfig, ""))


def total_steps_may_change(config: RunConfig) -> bool:
    """Return whether a finished run can be extended by more steps. This requires reinforcement learning, and learning
    rates that do not depend on the number of steps."""
    optims = [config.optim] if config.critic is None else [config.optim, config.critic.optim]
    is_fixed = (each.schedule == "constant" and (each.warmup_steps > 0 or each.warmup_ratio == 0) for each in optims)
    return not config.is_supervised and all(is_fixed)


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that affect a run's results, as dotted keys with JSON values."""
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
    """Return the fixed settings in `names` that differ from the defaults, by dotted key. `names`: keys and sections."""
    usual = leaves(RunConfig().model_dump(mode="json")).items()
    lasting = fixed_settings(config).items()
    return {key: value for key, value in lasting if (key, value) not in usual and any(covers(n, key) for n in names)}


def settings_fingerprint(config: RunConfig) -> str:
    """Return a fingerprint of all settings that must not change during a run."""
    return fingerprint("settings", fixed_settings(config))


def run_id(config: RunConfig) -> str:
    """Return `run_id` if it is set, otherwise `<name>-s<seed>-<8 hex digits of the settings>`."""
    return config.run_id or f"{config.name}-s{config.seed}-{settings_fingerprint(config)[:8]}"


RUN_FILE = "run.json"
"""The file in a run's folder that records the run's origin. See `rlcore.tracking.lineage.Origin`."""


def run_directory(config: RunConfig) -> Path:
    """Return the folder of the run under `paths.root`."""
    return Path(config.paths.root) / "runs" / run_id(config)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a fingerprint of {type(value).__name__} ({value!r}) is not defined; pass plain values")
