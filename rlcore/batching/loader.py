"""The order of prompts: an endless stream fixed by the seed, addressed by one integer.

The stream is epoch after epoch, each a fresh permutation of all prompts. Its position, the number of prompts drawn so
far, is the whole state, so a resumed run draws what an uninterrupted one would, at an epoch's end too, and on any
number of ranks. No prompt is dropped: a batch may hold the end of one epoch and the beginning of the next.

A mixture draws from one stream for each part by weight. Its positions come in blocks of 1,024; the block that ends at
position n brings part i to exactly

    floor(n * W[i]) - floor(n * W[i - 1])        W: running sums of the weights over their total, as exact fractions

prompts, so a share is exact to one prompt at every block's end; within a block the parts are shuffled.

A stream that is weighed draws by weights instead (`rlcore.batching.pass_counts`): what it gives until it is weighed
again follows from the seed, the weights, and the first position that was taken since.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from rlcore.batching.pass_counts import weighted_order
from rlcore.errors import DataError
from rlcore.types import Prompt

T = TypeVar("T")
WEIGHTED_SEED = 2**31
"""First word of the seeds of weighted orders: a run's seed is below it."""


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
        self._weights: np.ndarray | None = None
        self._begin: int | None = None

    def set_weights(self, weights: np.ndarray) -> None:
        """From the next position taken on, draw by weights: one a prompt, over 0. No prompt twice before all were."""
        self._weights, self._begin, self._epoch = weights, None, -1

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
        if self._weights is not None and self._begin is None:
            self._begin = position
        epoch, offset = divmod(position - (self._begin or 0), len(self._prompts))
        if epoch != self._epoch:
            self._order = self._epoch_order(epoch)
            self._epoch = epoch
        return self._prompts[int(self._order[offset])]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._weights is None:
            return np.random.default_rng((*self._seed, epoch)).permutation(len(self._prompts))
        assert self._begin is not None, "an order is made for a position"
        return weighted_order(self._weights, np.random.default_rng((WEIGHTED_SEED, *self._seed, self._begin, epoch)))


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

    def set_weights(self, weights: np.ndarray) -> None:
        """As `PromptStream.weigh`, in each part; `weights`: of the parts' prompts one part after the other."""
        ends = np.cumsum([len(stream) for stream in self._streams])[:-1]
        for stream, mine in zip(self._streams, np.split(weights, ends), strict=True):
            stream.set_weights(mine)

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
        before, after = self._counts_before(block * BLOCK), self._counts_before((block + 1) * BLOCK)
        quotas = [end - start for start, end in zip(before, after, strict=True)]
        rng = np.random.default_rng((self._seed, block, len(quotas)))
        self._sources = rng.permutation(np.repeat(np.arange(len(quotas)), quotas))
        self._places = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(before):
            mine = self._sources == source
            self._places[mine] = start + np.arange(int(mine.sum()))
        self._block = block

    def _counts_before(self, position: int) -> list[int]:
        """Prompts of each part before a position that begins a block."""
        ends = [int(position * share) for share in self._shares]  # int of a Fraction is its floor, from 0 up
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]
