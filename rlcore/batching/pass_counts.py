"""Pass counts of the training rows, and draws of rows by them.

A row has two counts: s scored responses, c of them correct. After a step with n scored responses to the row, k of them
correct,

    s <- fade s + n        c <- fade c + k

so that responses of older models count less. The weight of a row in the next draw is, with `[low, high]` the band,

    band          1 where s = 0 or low <= c / s <= high, else `rest_weight`
    informative   4 p (1 - p)  with  p = (c + 1/2) / (s + 1)

p is the posterior mean of the pass rate under Jeffreys' prior, Beta(1/2, 1/2), and is never 0 or 1. p (1 - p) is the
variance of a score, and a group of equal scores has no gradient under a group advantage.
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
    """Counts of R rows, immutable."""

    passes: Float[Array, "R"]
    samples: Float[Array, "R"]

    @classmethod
    def of(cls, passes: Sequence[int] | Array, samples: Sequence[int] | Array) -> "PassCounts":
        """Make counts of whole numbers."""
        return cls(np.asarray(passes, dtype=np.float32), np.asarray(samples, dtype=np.float32))

    @classmethod
    def read(cls, text: str, num_rows: int) -> "PassCounts":
        """Read the text that `text` wrote.

        Raises:
            CheckpointError: the number of rows differs.
        """
        found = np.frombuffer(base64.b64decode(text), dtype="<f4")
        if found.size != 2 * num_rows:
            raise CheckpointError(
                f"the checkpoint counts the passes of {found.size // 2:,} training rows, and there are {num_rows:,}: "
                "it is of other data or another table of pass rates. Put them back, or start another run (--fork)"
            )
        return cls(found[:num_rows].astype(np.float32), found[num_rows:].astype(np.float32))

    def text(self) -> str:
        """Return all counts as text, bit for bit: 11 characters a row."""
        return base64.b64encode(np.concatenate([self.passes, self.samples]).astype("<f4").tobytes()).decode()

    def rates(self) -> Float[Array, "R"]:
        """Return c / s, NaN for a row without a scored response."""
        with np.errstate(invalid="ignore"):
            rates: Array = self.passes.astype(np.float64) / self.samples
        return rates

    def update(self, rows: Int[Array, "M"], passes: Array, samples: Array, fade: float) -> "PassCounts":
        """Return the counts after M groups: the row of each (all different), its correct and its scored responses.

        A group without a scored response changes nothing.
        """
        rows, passes, samples = (np.asarray(each) for each in (rows, passes, samples))
        scored = samples > 0
        rows, passes, samples = rows[scored], passes[scored], samples[scored]
        after = self.passes.copy(), self.samples.copy()
        for counts, new in zip(after, (passes, samples), strict=True):
            counts[rows] = np.float32(fade) * counts[rows] + new.astype(np.float32)
        return PassCounts(*after)

    def in_band(self, settings: PassRatesConfig) -> Bool[Array, "R"]:
        """Return True for rows whose pass rate is unknown or in the band. The others are retired."""
        low, high = settings.band
        rates = self.rates()
        inside: Array = np.isnan(rates) | ((rates >= low) & (rates <= high))
        return inside

    def weights(self, settings: PassRatesConfig) -> Float[Array, "R"]:
        """Return the weight of each row in the next draw, over 0 and at most 1."""
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
        """Return the weight of each row in a step's draw. `text`: the counts before it, '' at the start."""
        return self._counts(text).weights(self._settings)

    def update(self, text: str, groups: Mapping[int, tuple[int, int]]) -> tuple[str, dict[str, float]]:
        """Return the counts after a step, and metrics of the change. `groups` has (correct, scored) responses by
        `prompt_id`."""
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
    """Return all rows in a random order, drawn without replacement by weight.

    Rows are sorted by the keys log(u) / w with u uniform: Efraimidis and Spirakis 2006, Information Processing Letters
    97.
    """
    keys = np.log1p(-rng.random(len(weights))) / weights  # 1 - u is never 0
    return np.argsort(-keys, kind="stable")
