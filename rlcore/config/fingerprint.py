"""Fingerprints: 16 hex digits of what a stage's result depends on; and the run id made of them."""

import hashlib
import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlcore.config.base import covers, leaves
from rlcore.config.run import RunConfig

MAY_CHANGE: tuple[str, ...] = (
    # Labels and places.
    "name",
    "run_id",
    "tags",
    "paths",
    "tracking",
    # What is kept and judged, not what is learned. (Alarms may skip or roll back; they are set after a failure.)
    "alarms",
    "answers",
    "checkpoint",
    "validation",
    "trainer.steps_per_chunk",
    # Where and how fast the same numbers are computed: set after an out-of-memory, or on another machine.
    "runtime",
    "reward.num_processes",
    "reward.deadline_s",
    "reward.audit",
    "reward.max_unmet_references",
    "reward.judge.url",
    "reward.judge.key_variable",
    "reward.judge.tries",
    "reward.judge.deadline_s",
    "reward.judge.cache",
    "pass_rates.rows_per_part",
    "episode.deadline_s",
    "episode.num_processes",
    "algo.kl.offload",
    "optim.offload",
    "critic.optim.offload",
    "warm_start.optim.offload",
    "warm_start.steps_per_chunk",
    "model.attention",
    "model.zero_stage",
    "model.compile",
    "model.gradient_checkpointing",
    "model.lora.offload",
    "model.head_chunk_tokens",
    "trainer.max_tokens_per_micro_batch",
    "rollout.max_num_seqs",
    "rollout.tensor_parallel_size",
    "rollout.memory_share",
    "rollout.sleep_level",
    "rollout.enforce_eager",
    "rollout.max_batched_tokens",
    "rollout.prefix_caching",
    "rollout.canary_bound",
)
"""Keys and sections that may differ when a run goes on. `trainer.total_steps` may too, see `total_steps_may_change`;
`lasting_settings` says where `validation.suites` and `warm_start.steps_per_chunk` may not."""

_DIGITS = 16


def canonical_json(payload: Any) -> str:
    """JSON that is the same for equal content: keys sorted, no spaces, no NaN.

    >>> canonical_json({"b": (1, 2.0), "a": None})
    '{"a":null,"b":[1,2.0]}'
    """
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def fingerprint(stage: str, payload: Any) -> str:
    """16 hex digits of what a stage reads: sections, mappings, sequences, paths and plain values, nested at will.

    Raises:
        TypeError: the payload holds something that has no canonical JSON.
    """
    text = canonical_json({"stage": stage, "payload": payload})
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def total_steps_may_change(config: RunConfig) -> bool:
    """Whether no learning rate depends on the number of steps, so that a finished run can be made longer."""
    optims = [config.optim] if config.critic is None else [config.optim, config.critic.optim]
    return all(optim.schedule == "constant" and (optim.warmup_steps > 0 or optim.warmup_ratio == 0) for optim in optims)


def lasting_settings(config: RunConfig) -> dict[str, Any]:
    """Dotted keys and JSON values of the settings that the numbers of a run depend on."""
    may_change = {*MAY_CHANGE, "trainer.total_steps"} if total_steps_may_change(config) else {*MAY_CHANGE}
    # Neither parts nor suites have a seed in their data.
    found = leaves(config.model_dump(mode="json", exclude={"data": {"parts": {"__all__": {"data": {"seed"}}}}}))
    lasting = {
        name: value
        for name, value in found.items()
        # of the key and the sections in which it lies
        if may_change.isdisjoint(accumulate(name.split("."), "{}.{}".format))
    }
    if config.filter.decontaminate != "off" and config.validation.suites:  # the suites decide what is trained on
        lasting["validation.suites"] = [
            [suite.seed, suite.data.model_dump(mode="json", exclude={"seed"})] for suite in config.validation.suites
        ]
    warm = config.warm_start
    # Of its checkpoints, one for each chunk, that with the lowest held-out loss is taken.
    is_chosen = warm.enabled and warm.stop_at_reward is None and warm.held_out_rows > 0
    if is_chosen and warm.steps_per_chunk < warm.max_steps:
        lasting["warm_start.steps_per_chunk"] = warm.steps_per_chunk
    return lasting


def changed_settings(config: RunConfig, *names: str) -> dict[str, Any]:
    """The lasting settings of these keys and sections that differ from the defaults, by dotted key."""
    usual = leaves(RunConfig().model_dump(mode="json")).items()
    lasting = lasting_settings(config).items()
    return {key: value for key, value in lasting if (key, value) not in usual and any(covers(n, key) for n in names)}


def settings_fingerprint(config: RunConfig) -> str:
    """Fingerprint of everything that must not change between a run's first step and its last."""
    return fingerprint("settings", lasting_settings(config))


def run_id(config: RunConfig) -> str:
    """`<name>-s<seed>-<8 hex digits of the settings>`, or `run_id` where it is set."""
    return config.run_id or f"{config.name}-s{config.seed}-{settings_fingerprint(config)[:8]}"


RUN_FILE = "run.json"
"""The record of a run's origin in its folder, see `rlcore.tracking.lineage.Origin`."""


def run_directory(config: RunConfig) -> Path:
    """The run's folder under `paths.root`."""
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
