"""The order of prompts: an endless stream fixed by the seed and addressed by one integer.

Each epoch is a new permutation of all prompts. The position, the number of prompts drawn so far, is the whole state, so
that a resumed run draws the same prompts on any number of ranks. A batch may span two epochs.

A mixture draws from one stream for each part by weight, in blocks of 1,024 positions. The block that ends at position n
brings part i to exactly

    floor(n * W[i]) - floor(n * W[i - 1])        W: running sums of the weights over their total, as exact fractions

prompts. Within a block the parts are shuffled.

A stream with weights (`rlcore.batching.pass_counts`) is fixed by the seed, the weights, and the first position taken
after they were set.
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
"""First word of the seeds of weighted orders, above every run's seed."""


class PromptStream(Generic[T]):
    """All prompts (or demonstrations), epoch after epoch. Each `part` has a separate order."""

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
        """Draw by positive weights from the next position on, each prompt once before any is repeated."""
        self._weights, self._begin, self._epoch = weights, None, -1

    def __len__(self) -> int:
        """Return the prompts in an epoch."""
        return len(self._prompts)

    def epoch_at(self, position: int) -> int:
        """Return the epoch of the prompt at `position`, from 0."""
        return position // len(self._prompts)

    def take(self, position: int, count: int) -> tuple[T, ...]:
        """Return the `count` prompts from `position` on."""
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
"""Positions that are shared out together. The share of a part must be at least one of them."""


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
        """Call `PromptStream.set_weights` of each part. `weights` lists all prompts, part after part."""
        ends = np.cumsum([len(stream) for stream in self._streams])[:-1]
        for stream, mine in zip(self._streams, np.split(weights, ends), strict=True):
            stream.set_weights(mine)

    def __len__(self) -> int:
        """Return the prompts of all parts."""
        return sum(map(len, self._streams))

    def epoch_at(self, position: int) -> int:
        """Return the epoch at `position`, from 0, counted in prompts of all parts."""
        return position // len(self)

    def take(self, position: int, count: int) -> tuple[Prompt, ...]:
        """Return the `count` prompts from `position` on."""
        return tuple(self._at(index) for index in range(position, position + count))

    def _at(self, position: int) -> Prompt:
        block, offset = divmod(position, BLOCK)
        if block != self._block:
            self._lay_out(block)
        source = int(self._sources[offset])
        return self._streams[source].take(int(self._places[offset]), 1)[0]

    def _lay_out(self, block: int) -> None:
        """Choose the part, and the position in the part's stream, for each position of a block."""
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
        """Return the prompts drawn from each part before a block's first position."""
        ends = [int(position * share) for share in self._shares]  # int of a Fraction is its floor, from 0 up
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]
