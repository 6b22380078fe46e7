"""The reference of a DPO stage: the initial policy's log-probabilities of all pairs, computed once and stored."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlcore.batching.prompts import Demonstration
from rlcore.storage.manifest import read_finished_or_set_aside
from rlcore.storage.publish import published_directory
from rlcore.trainer.step import SupervisedTrainer

_FILE = "logprobs.npy"


def add_reference(
    folder: Path,
    trainer: SupervisedTrainer,
    batches: Sequence[Sequence[Demonstration]],
    pairs: Sequence[Demonstration],
    report: Callable[[Mapping[str, object]], None],
) -> None:
    """Set the reference log-probabilities of `pairs`, which are computed and stored in `folder` at the first call. The
    workers must hold the initial policy. `batches`: the pairs of each step in the first epoch, and the held-out pairs.
    They are packed as in training, so all reward margins of the first step are exactly 0."""
    if read_finished_or_set_aside(folder) is None:
        report({"event": "note", "text": f"computes the reference log-probabilities of {len(pairs):,} pairs"})
        for batch in reversed(batches):  # the last step of the epoch repeats pairs of its first steps
            trainer.fill_reference(batch)
        with published_directory(folder, {"kind": "reference", "pairs": len(pairs)}) as made:
            np.save(made / _FILE, np.concatenate([pair.reference for pair in pairs]))
        return
    values = np.load(folder / _FILE)
    ends = np.cumsum([len(pair.reference) for pair in pairs])[:-1]
    for pair, stored in zip(pairs, np.split(values, ends), strict=True):
        pair.reference[:] = stored
