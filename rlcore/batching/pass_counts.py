"""How often each training row was solved, as counted so far, and how rows are drawn by that.

A row has two counts: s answers that were scored, c of them right. Its pass rate is c / s. When training has answered a
row again, with n scored answers of which k are right,

    s <- fade s + n        c <- fade c + k

so that answers of older models count less and less. A row's weight in the next draw is, with `[low, high]` the band,

    band          1 where s = 0 or low <= c / s <= high, else `rest_weight`
    informative   4 p (1 - p)  with  p = (c + 1/2) / (s + 1)

p is the mean of the row's pass rate after s answers from Jeffreys' prior, Beta(1/2, 1/2): it is never 0 or 1, so a row
that was never or always solved is still drawn now and then. p (1 - p) is the variance of an answer's score, and a group
whose scores are equal has no gradient by an advantage that compares its answers.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from rlcore.config.data import PassRatesConfig
from rlcore.errors import CheckpointError

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class PassCounts:
    """Counts of R rows. Never changed in place."""

    passes: Float[Array, "R"]
    samples: Float[Array, "R"]

    @classmethod
    def of(cls, passes: Sequence[int] | Array, samples: Sequence[int] | Array) -> "PassCounts":
        """Counts made of whole numbers."""
        return cls(np.asarray(passes, dtype=np.float32), np.asarray(samples, dtype=np.float32))

    @classmethod
    def read(cls, text: str, num_rows: int) -> "PassCounts":
        """Counts read from what `text` wrote.

        Raises:
            CheckpointError: it is of another number of rows.
        """
        found = np.frombuffer(base64.b64decode(text), dtype="<f4")
        if found.size != 2 * num_rows:
            raise CheckpointError(
                f"the checkpoint counts the passes of {found.size // 2:,} training rows, and there are {num_rows:,}: "
                "it is of other data or another table of pass rates. Put them back, or start another run (--fork)"
            )
        return cls(found[:num_rows].astype(np.float32), found[num_rows:].astype(np.float32))

    def text(self) -> str:
        """All counts as text, bit for bit: 11 characters a row."""
        return base64.b64encode(np.concatenate([self.passes, self.samples]).astype("<f4").tobytes()).decode()

    def rates(self) -> Float[Array, "R"]:
        """c / s; NaN for a row without a scored answer."""
        with np.errstate(invalid="ignore"):
            rates: Array = self.passes.astype(np.float64) / self.samples
        return rates

    def update(self, rows: Int[Array, "M"], passes: Array, samples: Array, fade: float) -> "PassCounts":
        """After M groups: the row of each, every row once, its right answers and its scored ones.

        A group without a scored answer changes nothing.
        """
        rows, passes, samples = (np.asarray(each) for each in (rows, passes, samples))
        scored = samples > 0
        rows, passes, samples = rows[scored], passes[scored], samples[scored]
        after = self.passes.copy(), self.samples.copy()
        for counts, new in zip(after, (passes, samples), strict=True):
            counts[rows] = np.float32(fade) * counts[rows] + new.astype(np.float32)
        return PassCounts(*after)

    def in_band(self, settings: PassRatesConfig) -> Bool[Array, "R"]:
        """Rows whose pass rate is not known or lies in the band; the others are retired."""
        low, high = settings.band
        rates = self.rates()
        inside: Array = np.isnan(rates) | ((rates >= low) & (rates <= high))
        return inside

    def weights(self, settings: PassRatesConfig) -> Float[Array, "R"]:
        """Weight of each row in the next draw, over 0 and at most 1."""
        if settings.draw == "band":
            return np.where(self.in_band(settings), 1.0, settings.rest_weight)
        p = (self.passes.astype(np.float64) + 0.5) / (self.samples.astype(np.float64) + 1.0)
        return 4.0 * p * (1.0 - p)


class RowSampler:
    """The training rows of a run that draws them by weights.

    Args:
        row_ids: `prompt_id` of each row, in the order of the counts.
        start: counts before the first step.
    """

    def __init__(self, row_ids: Sequence[int], start: PassCounts, settings: PassRatesConfig) -> None:
        self._place = {row_id: place for place, row_id in enumerate(row_ids)}
        self._start = start
        self._settings = settings

    def _counts(self, text: str) -> PassCounts:
        return PassCounts.read(text, len(self._place)) if text else self._start

    def weights(self, text: str) -> Float[Array, "R"]:
        """Weight of each row in a step's draw. `text`: the counts that it begins with, '' for those of the start."""
        return self._counts(text).weights(self._settings)

    def update(self, text: str, groups: Mapping[int, tuple[int, int]]) -> tuple[str, dict[str, float]]:
        """The counts after a step's groups, (right answers, scored answers) by `prompt_id`, and what has changed: the
        mean pass rate, and with a band the rows outside of it. `text`: as for `weights`."""
        rows = np.array([self._place[row_id] for row_id in groups], dtype=np.int64)
        passes, samples = np.array(list(groups.values()), dtype=np.int64).reshape(-1, 2).T
        before = self._counts(text)
        after = before.update(rows, passes, samples, self._settings.fade)
        rates = after.rates()
        known = rates[~np.isnan(rates)]
        metrics = {"pass_rates/mean": float(known.mean())} if len(known) else {}
        if self._settings.draw == "band":
            was, now = before.in_band(self._settings), after.in_band(self._settings)
            metrics["pass_rates/retired_share"] = float((~now).mean())
            metrics["pass_rates/rows_retired"] = float((was & ~now).sum())
            metrics["pass_rates/rows_revived"] = float((~was & now).sum())
        return after.text(), metrics


def weighted_order(weights: Float[Array, "R"], rng: np.random.Generator) -> Int[Array, "R"]:
    """All rows in a random order, as if drawn one after the other without replacement, each by its weight among those
    that are left.

    By the largest keys log(u) / w with u uniform: Efraimidis and Spirakis 2006, Information Processing Letters 97.
    """
    keys = np.log1p(-rng.random(len(weights))) / weights  # 1 - u is never 0
    return np.argsort(-keys, kind="stable")
