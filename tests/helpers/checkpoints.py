"""Checkpoints without tensors, and one rank with a small real model that writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.checkpoint.catalog import TrainerState
from rlcore.checkpoint.save import RankSaver
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import CheckpointConfig, RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import WorkerLostError
from tests.checkpoint.small import build, train
from tests.storage.small_disk import fill

SETTINGS = RunConfig()


def store_at(folder: Path, settings: RunConfig = SETTINGS, **config: object) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", CheckpointConfig(**config), settings)


def state_at(step: int) -> TrainerState:
    return TrainerState(
        step=step,
        policy_version=step,
        num_prompts_drawn=64 * step,
        num_tokens=1000 * step,
        kl_coef=0.1,
        settings_fingerprint=settings_fingerprint(SETTINGS),
    )


def save(store: CheckpointStore, step: int, score: float | None = None) -> Path:
    metrics = {} if score is None else {"val/reward": score}
    with store.writing(state_at(step), metrics) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "rank.safetensors").write_text(f"weights of {step}")
    return store.path_of(step)


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.list()]


class Ranks:
    """One rank with a real model. With `full`, that disk becomes full when the rank begins to write. The rank can be
    lost.
    """

    def __init__(self, full: Path | None = None) -> None:
        self.model, self.optimizer = build(seed=1)
        train(self.model, self.optimizer, 1)
        self.saver = RankSaver(lambda: {"policy": (self.model, self.optimizer)}, num_ranks=1)
        self.full = full
        self.is_lost = False

    def each(self, verb: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        if self.is_lost:
            raise WorkerLostError("a worker actor died")
        if verb is RankSaver.write and self.full is not None:
            fill(self.full, leave_bytes=50_000)
        return [verb(self.saver, *arguments, **named)]
