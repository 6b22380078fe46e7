"""The order of prompts: an endless stream fixed by the seed, addressed by one integer.

The stream is epoch after epoch, each a fresh permutation of all prompts. Its position, the number of prompts drawn so
far, is the whole state, so a resumed run draws what an uninterrupted one would, at an epoch's end too, and on any
number of ranks. No prompt is dropped: a batch may hold the end of one epoch and the beginning of the next.

A mixture draws from one stream for each part by weight. Its positions come in blocks of 1,024; the block that ends at
position n brings part i to exactly

    floor(n * W[i]) - floor(n * W[i - 1])        W: running sums of the weights over their total, as exact fractions

prompts, so a share is exact to one prompt at every block's end; within a block the parts are shuffled.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from rlcore.errors import DataError
from rlcore.types import Prompt

T = TypeVar("T")


class PromptStream(Generic[T]):
    """All prompts (or demonstrations), epoch after epoch. Streams of the same seed and another `part` have orders of
    their own."""

    def __init__(self, prompts: Sequence[T], *, seed: int, part: int | None = None) -> None:
        if not prompts:
            raise DataError("The training set has no prompt left; loosen the filter or make a larger dataset.")
        self._prompts = tuple(prompts)
        # A run's only stream has no part in its seed, which keeps its order what it was before there were mixtures.
        self._seed = (seed,) if part is None else (seed, part + 1)
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    def epoch_at(self, position: int) -> int:
        """Epoch of the prompt at `position`, counted from 0."""
        return position // len(self._prompts)

    def take(self, position: int, count: int) -> tuple[T, ...]:
        """The `count` prompts from `position` on."""
        return tuple(self._at(index) for index in range(position, position + count))

    def _at(self, position: int) -> T:
        epoch, offset = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._order = np.random.default_rng((*self._seed, epoch)).permutation(len(self._prompts))
            self._epoch = epoch
        return self._prompts[int(self._order[offset])]


BLOCK = 1_024
"""Positions that are shared out together; a part's share must be worth one prompt of them."""


class MixedStream:
    """Prompts of several parts by weight."""

    def __init__(self, parts: Sequence[Sequence[Prompt]], weights: Sequence[float], *, seed: int) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        total = sum(exact)
        if too_small := [index for index, weight in enumerate(exact) if weight * BLOCK < total]:
            least = float(total / BLOCK)
            raise DataError(
                f"data.parts: entry {too_small[0]}: weight must be at least a {BLOCK}th of the sum of all weights "
                f"({least:g}), got {weights[too_small[0]]:g}; raise it, or leave the dataset out"
            )
        self._streams = [PromptStream(prompts, seed=seed, part=index) for index, prompts in enumerate(parts)]
        self._shares = [share / total for share in accumulate(exact)]
        self._seed = seed
        self._block = -1
        self._sources = np.empty(0, dtype=np.int64)
        self._places = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Prompts of all parts."""
        return sum(map(len, self._streams))

    def epoch_at(self, position: int) -> int:
        """Epoch at `position`, counted from 0: one for every so many prompts as all parts hold together."""
        return position // len(self)

    def take(self, position: int, count: int) -> tuple[Prompt, ...]:
        """The `count` prompts from `position` on."""
        return tuple(self._at(index) for index in range(position, position + count))

    def _at(self, position: int) -> Prompt:
        block, offset = divmod(position, BLOCK)
        if block != self._block:
            self._lay_out(block)
        source = int(self._sources[offset])
        return self._streams[source].take(int(self._places[offset]), 1)[0]

    def _lay_out(self, block: int) -> None:
        """Which part each position of a block draws from, and at which place of that part's own stream."""
        before, after = self._drawn(block * BLOCK), self._drawn((block + 1) * BLOCK)
        quotas = [end - start for start, end in zip(before, after, strict=True)]
        rng = np.random.default_rng((self._seed, block, len(quotas)))
        self._sources = rng.permutation(np.repeat(np.arange(len(quotas)), quotas))
        self._places = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(before):
            mine = self._sources == source
            self._places[mine] = start + np.arange(int(mine.sum()))
        self._block = block

    def _drawn(self, position: int) -> list[int]:
        """Prompts of each part before a position that begins a block."""
        ends = [int(position * share) for share in self._shares]  # int of a Fraction is its floor, from 0 up
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]
