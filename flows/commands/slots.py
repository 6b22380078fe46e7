"""`millrace slots`: without Prefect."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from flows.progress import duration
from flows.work.slots import Slots, State, Wish
from rlcore.errors import ConfigError


def slots(root: Path, *, number: int | None, gpus: str | None, per_gpu: int, as_json: bool) -> None:
    """Set the slots of a root, where that is asked for, and show them.

    Raises:
        ConfigError: both a number and GPUs are given, or something that is no list of GPUs.
    """
    found = Slots(root.resolve())
    if number is not None and gpus is not None:
        raise ConfigError(f"--set {number} and --gpus {gpus}: give one of them; --gpus counts its slots itself")
    if number is not None:
        found.set_devices([""] * number)
    elif gpus is not None:
        found.set_devices([gpu for gpu in _indices(gpus) for _ in range(per_gpu)])
    state = found.look()
    print(json.dumps(_as_json(state)) if as_json else "\n".join(_lines(state, root)))


def _indices(gpus: str) -> list[str]:
    parts = [part.strip() for part in gpus.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(
            f"--gpus: must be different numbers of GPUs, such as 0,1 (nvidia-smi -L lists them); got {gpus}"
        )
    return parts


def _as_json(state: State) -> dict[str, object]:
    holders = {str(number): asdict(wish) for number, wish in state.holders.items()}
    waiting = [asdict(wish) | {"reason": state.reason(wish)} for wish in state.waiting]
    return {"devices": state.devices, "holders": holders, "waiting": waiting}


def _lines(state: State, root: Path) -> list[str]:
    if not state.devices:
        return [f"{root}: no slots, so any number of runs train at a time; --set N or --gpus I,J gives it some"]
    lines = []
    for number, device in enumerate(state.devices):
        name = f"slot {number}" + (f", GPU {device}" if device else "")
        holder = state.holders.get(number)
        lines.append(f"{name}: {'free' if holder is None else f'{holder}, asked {_ago(holder)}'}")
    lines += [f"waiting: {wish.run_id} {state.reason(wish)}, since {_ago(wish)}" for wish in state.waiting]
    return lines


def _ago(wish: Wish) -> str:
    return f"{duration(max(0.0, time.time() - wish.since))} ago"
