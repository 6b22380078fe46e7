"""How long training stands still for a checkpoint, and what the checkpoint costs the steps beside it.

    python -m benchmarks.save_standstill --out standstill.json       # on a GPU: the 1B model with its optimizer, vLLM
    python -m benchmarks.save_standstill --shape=tiny --engine=hf --prompts=8 --mean=12 --longest=32 --steps=4

Steps of `benchmarks.grpo_step` in the real trainer, saved by the code of a run: at the end of a chunk the copy to the
host (training stands still), then writing, hashing, flushing and publishing in threads (training goes on), and a look
after each step whether it is done. A first checkpoint is begun before the chunk that is measured, so that the chunk has
what every chunk has: a write beside its first steps, and a copy at its end. Exit code 1 if training stood still for
longer than 2 s, or than 2% of the chunk.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.grpo_step import PROMPT_TOKENS, SAMPLES, describe_step, settings
from benchmarks.harness import FixedLengths, Loop, draw_lengths, seconds_line, training_loop, worker_group
from benchmarks.shapes import SHAPES, model_of
from rlcore.checkpoint.save import CheckpointSaver, Saved
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.run.disk import Room
from rlcore.workers.worker import Worker

MOST_S, MOST_SHARE = 2.0, 0.02
WARM_UP = 2


class SavedSteps:
    """Steps of a loop with a run's saves between them, and the seconds of each."""

    def __init__(self, config: RunConfig, loop: Loop, group: FixedLengths, folder: Path) -> None:
        store = CheckpointStore(folder, config.checkpoint, config)
        room = Room(config.checkpoint, happened=lambda *event: print(*event), stop=lambda: False, prune=store.prune)
        self._config, self._loop, self._group = config, loop, group
        self._saver = CheckpointSaver(store, room)
        self.store = store
        self.number = 0
        self.step_s: list[tuple[bool, float]] = []
        """Whether a save was under way at a step's begin, and the step's seconds."""
        self.stood_still_s = 0.0
        """Seconds of the loop for saves since it was last set to 0."""
        self.saved: list[Saved] = []

    def step(self) -> None:
        """One step, then the look whether a save is done."""
        beside, begun = self._saver.state is not None, time.perf_counter()
        result = self._loop.step()
        self.step_s.append((beside, time.perf_counter() - begun))
        self.number += 1
        print(f"step {self.number}{' (beside a save)' if beside else ''}: {seconds_line(result)}", flush=True)
        self._held(self._saver.poll)

    def end_chunk(self) -> None:
        """What a run does at the end of a chunk: settle the save before, begin the next."""
        self._held(self._saver.settle)
        ranks = SimpleNamespace(each=partial(self._group.each, Worker.save))
        self._held(lambda: self._saver.begin(self.number, self._record, {}, ranks))

    def settle(self) -> None:
        """Until the last save is published."""
        self._held(self._saver.settle)

    def _held(self, action: Callable[[], Saved | None]) -> None:
        begun = time.perf_counter()
        saved = action()
        self.stood_still_s += time.perf_counter() - begun
        if saved is not None:
            self.saved.append(saved)

    def _record(self) -> TrainerState:
        return TrainerState(
            step=self.number, policy_version=self.number, num_prompts_drawn=0, num_tokens=0, kl_coef=0.0,
            settings_fingerprint=settings_fingerprint(self._config),
        )  # fmt: skip


def measure(arguments: argparse.Namespace, directory: Path, folder: Path) -> dict[str, Any]:
    """Warm up, begin a save, take a chunk with a save at its end, go on until that is published."""
    config = settings(arguments, directory)
    lengths = draw_lengths(arguments.prompts * SAMPLES, arguments.mean, arguments.longest)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    real = arguments.engine != "none"
    with (
        worker_group(config, directory, lengths, vocab_size=vocab_size, real=real) as group,
        training_loop(
            config,
            directory,
            group,
            prompt_tokens=PROMPT_TOKENS,
            ground_truth='{"answer": "18"}',
            vocab_size=vocab_size,
        ) as loop,
    ):
        steps = SavedSteps(config, loop, group, folder)
        for _ in range(WARM_UP):
            steps.step()
        steps.end_chunk()
        first_s, steps.stood_still_s = steps.stood_still_s, 0.0
        begun = time.perf_counter()
        for _ in range(arguments.steps):
            steps.step()
        steps.end_chunk()
        chunk_s, stood_still_s = time.perf_counter() - begun, steps.stood_still_s
        for _ in range(arguments.after):
            steps.step()
        steps.settle()
        num_parameters = group.each(Worker.info)[0].num_parameters
    assert len(steps.saved) == 2, "both checkpoints must be there"
    return {
        "what": "a loop with a run's checkpoints: seconds that it stands still in a chunk, its end included",
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "parameters": num_parameters,
        "checkpoint_bytes": steps.store.list()[-1].size_bytes,
        "steps": arguments.steps,
        "chunk_s": chunk_s,
        "stood_still_s": stood_still_s,
        "stood_still_first_s": first_s,
        "share": stood_still_s / chunk_s,
        **_step_times(steps.step_s[WARM_UP:]),
        "limits": {"seconds": MOST_S, "share": MOST_SHARE},
        "pass": stood_still_s <= MOST_S and stood_still_s <= MOST_SHARE * chunk_s,
    }


def _step_times(step_s: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    beside = [seconds for under_way, seconds in step_s if under_way]
    alone = [seconds for under_way, seconds in step_s if not under_way]
    return {
        "steps_beside_a_save": len(beside),
        "step_beside_a_save_s": statistics.median(beside) if beside else None,
        "step_alone_s": statistics.median(alone) if alone else None,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_step(parser)
    parser.add_argument("--steps", type=int, default=20, help="of the chunk that is measured")
    parser.add_argument("--after", type=int, default=2, help="steps beside the last save")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; emptied at the end")
    arguments = parser.parse_args()
    arguments.overrides += ["checkpoint.keep_last=1", "checkpoint.keep_best=0", "checkpoint.reserve_gb=0"]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        directory = model_of(arguments, Path(scratch))
        found = measure(arguments, directory, Path(scratch) / "checkpoints")
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(0 if found["pass"] else 1)


if __name__ == "__main__":
    main()
