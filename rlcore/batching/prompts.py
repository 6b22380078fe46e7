"""Filtered rows as prompts and demonstrations, the order in which training draws them, and their pass counts.

The filter has already converted all texts to token ids. The order is an endless stream that depends only on the seed.
Each epoch is a new permutation of all prompts. To resume, training needs only the position, which is the number of
prompts drawn so far. After row weights are set, the order also depends on the weights and the position at which they
were set. A mixture draws from one stream per data source. After a block of 1,024 positions that ends at n,
data source i has contributed exactly

    floor(n * W[i]) - floor(n * W[i - 1])

prompts. W holds the running sums of the weights, divided by their total, as exact fractions. Each block is shuffled."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float

from rlcore.config.data import PassRatesConfig
from rlcore.errors import CheckpointError, DataError
from rlcore.prompt import Prompt

T = TypeVar("T")
Array = np.ndarray
_INTEGERS = "list of integers"
_REMEDY = "Give a file that the filter has written (filtered/<fingerprint>/<split>.parquet), or run the filter again."


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole conversation as tokens. `is_target`: True for tokens to learn, including the end token of each response.

    `misdirected`: the same prompt with a response to another problem, or None. `rejected`: the rejected response of a
    pair, or None. `reference`: for a pair, the initial policy's log-probabilities of the targets in the chosen
    response, followed by those in the rejected response. They are NaN until `SupervisedTrainer.fill_reference` computes
    them. Without a pair, `reference` is empty."""

    token_ids: Sequence[int]
    is_target: Sequence[bool]
    misdirected: "Demonstration | None" = None
    rejected: "Demonstration | None" = None
    reference: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32), compare=False)

    @classmethod
    def of(cls, prompt: list[int], response: list[int], distractor: list[int] | None = None) -> "Demonstration":
        """Create a demonstration from the token ids of a prompt, its response and optionally a distractor."""
        wrong = cls.of(prompt, distractor) if distractor else None
        return cls(prompt + response, [False] * len(prompt) + [True] * len(response), wrong)

    def without_targets(self) -> "Demonstration":
        """Return a copy with the same tokens and no targets, so that it adds nothing to the loss."""
        rejected = None if self.rejected is None else self.rejected.without_targets()
        return Demonstration(self.token_ids, [False] * len(self.token_ids), rejected=rejected)


def read_prompts(parquet: Path) -> list[Prompt]:
    """Read all prompts of a filtered file in order. `prompt_id` is the row's index in the dataset. Raises DataError if
    the file is missing, damaged, or lacks a column."""
    kinds = {"prompt_ids": _INTEGERS, "ground_truth_json": "string", "data_source": "string", "extra_info": "struct"}
    table = _read(parquet, kinds)
    extra = table.column("extra_info").combine_chunks()
    indices = _field(extra, "index", parquet)
    has_difficulty = extra.type.get_field_index("difficulty") >= 0
    difficulties = _field(extra, "difficulty", parquet) if has_difficulty else [0] * len(indices)
    columns = (
        indices,
        table.column("prompt_ids").to_pylist(),
        table.column("data_source").to_pylist(),
        table.column("ground_truth_json").to_pylist(),
        difficulties,
    )
    return [
        Prompt(index, tuple(ids), source, truth, difficulty or 0)
        for index, ids, source, truth, difficulty in zip(*columns, strict=True)
    ]


def is_chat(parquet: Path) -> bool:
    """Return whether the filter rendered the prompts with the tokenizer's chat template."""
    document = json.loads((pq.read_metadata(parquet).metadata or {}).get(b"millrace", b"{}"))
    return bool(document.get("origin", {}).get("prompt_form") != "text")


def read_solutions(parquet: Path) -> list[Demonstration]:
    """Read all rows of a filtered file that have a solution. Raises DataError if the file is missing or invalid."""
    names = ("prompt_ids", "solution_ids", "distractor_ids")
    table = _read(parquet, dict.fromkeys(names, _INTEGERS))
    columns = (table.column(name).to_pylist() for name in names)
    return [Demonstration.of(*row) for row in zip(*columns, strict=True) if row[1]]


def read_demonstrations(parquet: Path, ids: str = "token_ids", lengths: str = "answer_lengths") -> list[Demonstration]:
    """Read all rows of a file of tokenized demonstrations. `ids`: the column of token ids. `lengths`: the column with
    the lengths of alternating prompts and responses. Raises DataError if the file is missing or invalid."""
    table = _read(parquet, {ids: _INTEGERS, lengths: _INTEGERS})
    rows = zip(table.column(ids).to_pylist(), table.column(lengths).to_pylist(), strict=True)
    return [
        Demonstration(ids, [bool(place % 2) for place, length in enumerate(lengths) for _ in range(length)])
        for ids, lengths in rows
    ]


def read_pairs(parquet: Path) -> list[Demonstration]:
    """Read all rows of a file of tokenized preference pairs. Raises DataError if the file is missing or invalid."""
    rejected = read_demonstrations(parquet, "rejected_ids", "rejected_lengths")
    return [
        replace(one, rejected=other, reference=np.full(sum(one.is_target) + sum(other.is_target), np.nan, np.float32))
        for one, other in zip(read_demonstrations(parquet), rejected, strict=True)
    ]


def _read(parquet: Path, expected: dict[str, str]) -> pa.Table:
    if not parquet.is_file():
        raise DataError(f"{parquet}: no such file. {_REMEDY}")
    try:
        schema = pq.read_schema(parquet)
        for name, kind in expected.items():
            found = schema.field(name).type if name in schema.names else None
            if found is None or not _matches_type(found, kind):
                raise DataError(
                    f"{parquet}: column {name}: expected {kind}, got {'nothing' if found is None else found}. {_REMEDY}"
                )
        return pq.read_table(parquet, columns=[*expected])
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{parquet}: cannot be read as parquet ({error}); it is damaged or cut short. {_REMEDY}"
        ) from error


def _matches_type(found: pa.DataType, kind: str) -> bool:
    if kind == _INTEGERS:
        is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
        return bool(is_list and pa.types.is_integer(found.value_type))
    if kind == "struct":
        return bool(pa.types.is_struct(found))
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def _field(extra: pa.StructArray, name: str, parquet: Path) -> list[Any]:
    """Return a field of `extra_info` for each row, or None for a row without this field."""
    if extra.type.get_field_index(name) < 0:
        raise DataError(f"{parquet}: column extra_info.{name}: expected integer, got nothing. {_REMEDY}")
    return list(extra.field(name).to_pylist())


WEIGHTED_SEED = 2**31
"""The first entry in the random seed of a weighted order.

It is larger than every run's seed, so that weighted and unweighted orders have different random seeds."""


class PromptStream(Generic[T]):
    """An endless stream of prompts or demonstrations. `part`: the index of a data source, which changes the order."""

    def __init__(self, prompts: Sequence[T], *, seed: int, part: int | None = None) -> None:
        if not prompts:
            raise DataError("The training set has no prompt left; loosen the filter or make a larger dataset.")
        self._prompts = tuple(prompts)
        # A stream without a mixture has no index in its seed.
        self._seed = (seed,) if part is None else (seed, part + 1)
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._weights: np.ndarray | None = None
        self._begin: int | None = None

    def set_weights(self, weights: np.ndarray) -> None:
        """Set positive weights for the draws from the next position on. Each prompt is still drawn once per epoch."""
        self._weights, self._begin, self._epoch = weights, None, -1

    def __len__(self) -> int:
        return len(self._prompts)

    def epoch_at(self, position: int) -> int:
        """Return the epoch of the prompt at `position`, counted from 0."""
        return position // len(self)

    def take(self, position: int, count: int) -> tuple[T, ...]:
        """Return `count` consecutive prompts from `position` on."""
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
        assert self._begin is not None, "an order needs a position"
        rng = np.random.default_rng((WEIGHTED_SEED, *self._seed, self._begin, epoch))
        # A random order by weight, without replacement. The keys are log(u) / w with uniform u (Efraimidis and Spirakis
        # 2006, Information Processing Letters 97).
        keys = np.log1p(-rng.random(len(self._weights))) / self._weights  # 1 - u is never 0
        return np.argsort(-keys, kind="stable")


BLOCK = 1_024
"""The number of positions in a block. The share of each data source must be at least one position of a block."""


class MixedStream(PromptStream[Prompt]):
    """An endless stream of prompts that draws from several data sources by their weights."""

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
        self._mixture_seed = seed
        self._block = -1
        self._sources = np.empty(0, dtype=np.int64)
        self._places = np.empty(0, dtype=np.int64)

    def set_weights(self, weights: np.ndarray) -> None:
        """Set the weight of each prompt for the draws from the next position on. `weights` has one entry per prompt:
        first the prompts of the first data source, then those of the next data source.
        """
        ends = np.cumsum([len(stream) for stream in self._streams])[:-1]
        for stream, mine in zip(self._streams, np.split(weights, ends), strict=True):
            stream.set_weights(mine)

    def __len__(self) -> int:
        return sum(map(len, self._streams))

    def _at(self, position: int) -> Prompt:
        block, offset = divmod(position, BLOCK)
        if block != self._block:
            self._lay_out(block)
        source = int(self._sources[offset])
        return self._streams[source].take(int(self._places[offset]), 1)[0]

    def _lay_out(self, block: int) -> None:
        before, after = self._counts_before(block * BLOCK), self._counts_before((block + 1) * BLOCK)
        quotas = [end - start for start, end in zip(before, after, strict=True)]
        rng = np.random.default_rng((self._mixture_seed, block, len(quotas)))
        self._sources = rng.permutation(np.repeat(np.arange(len(quotas)), quotas))
        self._places = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(before):
            mine = self._sources == source
            self._places[mine] = start + np.arange(int(mine.sum()))
        self._block = block

    def _counts_before(self, position: int) -> list[int]:
        """Return the number of prompts drawn from each data source before `position`, the start of a block."""
        ends = [int(position * share) for share in self._shares]  # int of a positive Fraction is its floor
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True, eq=False)
class PassCounts:
    """The pass counts of R training rows. A row has s scored responses (`samples`), of which c are correct (`passes`).

    `fade`, `band` and `rest_weight` are settings of `PassRatesConfig`. After a step with n scored and k correct
    responses to a row, s becomes `fade * s + n`, and c becomes `fade * c + k`. The weight of a row is 1 if s = 0 or if
    c / s is inside `band`. Otherwise the weight is `rest_weight`."""

    passes: Float[Array, "R"]
    samples: Float[Array, "R"]

    @classmethod
    def of(cls, passes: Sequence[int] | Array, samples: Sequence[int] | Array) -> "PassCounts":
        """Create pass counts from the number of correct (`passes`) and scored responses (`samples`) of each row."""
        return cls(np.asarray(passes, dtype=np.float32), np.asarray(samples, dtype=np.float32))

    @classmethod
    def read(cls, text: str, num_rows: int) -> "PassCounts":
        """Decode a string that the method `text` returned. Raises CheckpointError if the string does not have
        `num_rows` rows."""
        found = np.frombuffer(base64.b64decode(text), dtype="<f4")
        if found.size != 2 * num_rows:
            raise CheckpointError(
                f"the checkpoint counts the passes of {found.size // 2:,} training rows, and there are {num_rows:,}: "
                "it is of other data or another table of pass rates. Put them back, or start another run (--fork)"
            )
        return cls(found[:num_rows].astype(np.float32), found[num_rows:].astype(np.float32))

    def text(self) -> str:
        """Encode all counts losslessly as a string of about 11 characters per row."""
        return base64.b64encode(np.concatenate([self.passes, self.samples]).astype("<f4").tobytes()).decode()

    def rates(self) -> Float[Array, "R"]:
        """Return the pass rate c / s of each row, or NaN for a row without a scored response."""
        with np.errstate(invalid="ignore"):
            rates: Array = self.passes.astype(np.float64) / self.samples
        return rates

    def in_band(self, settings: PassRatesConfig) -> Bool[Array, "R"]:
        """Return True for each row whose pass rate is unknown or inside the band."""
        low, high = settings.band
        rates = self.rates()
        inside: Array = np.isnan(rates) | ((rates >= low) & (rates <= high))
        return inside

    def weights(self, settings: PassRatesConfig) -> Float[Array, "R"]:
        """Return the weight of each row in the next draw, above 0 and at most 1."""
        return np.where(self.in_band(settings), 1.0, settings.rest_weight)


class RowSampler:
    """The draw weights of training rows, computed from the rows' pass counts. The argument `text` of the methods is the
    result of `PassCounts.text`, or '' before the first step."""

    def __init__(self, row_ids: Sequence[int], start: PassCounts, settings: PassRatesConfig) -> None:
        self._place = {row_id: place for place, row_id in enumerate(row_ids)}
        self._start = start
        self._settings = settings

    def _counts(self, text: str) -> PassCounts:
        return PassCounts.read(text, len(self._place)) if text else self._start

    def weights(self, text: str) -> Float[Array, "R"]:
        """Return the weight of each row in a draw, computed from the pass counts that `text` encodes."""
        return self._counts(text).weights(self._settings)

    def update(self, text: str, groups: Mapping[int, tuple[int, int]]) -> tuple[str, dict[str, float]]:
        """Add the responses of a step to the pass counts that `text` encodes. Return the new encoded counts, and
        metrics. `groups`: for each prompt id, the numbers of correct and of scored responses. A group without a scored
        response changes nothing."""
        before, fade = self._counts(text), np.float32(self._settings.fade)
        after = PassCounts(before.passes.copy(), before.samples.copy())
        for row_id, (correct, scored) in groups.items():
            if scored > 0:
                row = self._place[row_id]
                after.passes[row] = fade * after.passes[row] + np.float32(correct)
                after.samples[row] = fade * after.samples[row] + np.float32(scored)
        rates = after.rates()
        known = rates[~np.isnan(rates)]
        metrics = {"pass_rates/mean": float(known.mean())} if len(known) else {}
        was, now = before.in_band(self._settings), after.in_band(self._settings)
        metrics["pass_rates/retired_share"] = float((~now).mean())
        metrics["pass_rates/rows_retired"] = float((was & ~now).sum())
        metrics["pass_rates/rows_revived"] = float((~was & now).sum())
        return after.text(), metrics
