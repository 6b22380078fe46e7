"""Filtered files, and the order of prompts."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.batching import prompts
from rlcore.batching.prompts import BLOCK, Demonstration, MixedStream, PassCounts, PromptStream, RowSampler
from rlcore.config import PassRatesConfig
from rlcore.errors import CheckpointError, DataError
from rlcore.types import Prompt

REMEDY = "Give a file that the filter has written (filtered/<fingerprint>/<split>.parquet), or run the filter again."
COLUMNS = {"prompt_ids": [[5, 6], [7]], "ground_truth_json": ["{}", "[]"], "data_source": ["mine", "other"]}


def message(file: Path) -> str:
    with pytest.raises(DataError) as caught:
        prompts.read_prompts(file)
    return str(caught.value)


def test_missing_or_damaged_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    assert message(file) == f"{file}: no such file. {REMEDY}"
    file.write_bytes(b"PAR1 and no more")
    rule = rf"{file}: cannot be read as parquet \(.*\); it is damaged or cut short\. {re.escape(REMEDY)}"
    assert re.fullmatch(rule, message(file), re.DOTALL)


def test_wrong_column_is_reported_with_expected_type(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    for column, kind, given, found in (
        ("prompt_ids", "list of integers", [[5.0], [6.0]], "list<element: double>"),
        ("prompt_ids", "list of integers", [5, 6], "int64"),
        ("data_source", "string", None, "nothing"),
        ("ground_truth_json", "string", [1, 2], "int64"),
        ("extra_info", "struct", ["7", "8"], "string"),
    ):
        columns = {**COLUMNS, "extra_info": [{"index": 7}, {"index": 8}]}
        columns.pop(column)
        pq.write_table(pa.table(columns if given is None else {**columns, column: given}), file)
        assert message(file) == f"{file}: column {column}: expected {kind}, got {found}. {REMEDY}"
    pq.write_table(pa.table({**COLUMNS, "extra_info": [{"split": "a"}, {"split": "b"}]}), file)
    assert message(file) == f"{file}: column extra_info.index: expected integer, got nothing. {REMEDY}"


def test_large_types_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    large = {
        **COLUMNS, "prompt_ids": pa.array(COLUMNS["prompt_ids"], pa.large_list(pa.int32())),
        "ground_truth_json": pa.array(COLUMNS["ground_truth_json"], pa.large_string()),
        "extra_info": [{"difficulty": None, "index": 7}, {"difficulty": 3, "index": 2}],
    }  # fmt: skip
    pq.write_table(pa.table(large), file)
    assert prompts.read_prompts(file) == [Prompt(7, (5, 6), "mine", "{}", 0), Prompt(2, (7,), "other", "[]", 3)]
    pq.write_table(pa.table({**COLUMNS, "extra_info": [{"index": 7}, {"index": 2}]}), file)
    assert [prompt.difficulty for prompt in prompts.read_prompts(file)] == [0, 0]


def test_is_chat_unless_metadata_says_text(tmp_path: Path) -> None:
    file, table = tmp_path / "a.parquet", pa.table(COLUMNS)
    pq.write_table(table, file)
    assert prompts.is_chat(file)
    for said in (b"{}", b'{"origin": {}}', *(b'{"origin": {"prompt_form": "%b"}}' % of for of in (b"chat", b"text"))):
        pq.write_table(table.replace_schema_metadata({b"millrace": said}), file)
        assert prompts.is_chat(file) == (b"text" not in said), said


def test_solutions_have_targets_and_distractors(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    columns = {"prompt_ids": [[5, 6], [7], [8]], "solution_ids": [[1, 2], [], [3]], "distractor_ids": [[4], [4], []]}
    pq.write_table(pa.table(columns, pa.schema([(name, pa.list_(pa.int64())) for name in columns])), file)
    distractor = Demonstration([5, 6, 4], [False, False, True])
    first = Demonstration([5, 6, 1, 2], [False, False, True, True], distractor)
    assert prompts.read_solutions(file) == [first, Demonstration([8, 3], [False, True])]


def test_demonstration_targets_are_every_second_length(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"token_ids": [[5, 6, 7, 8, 9], [5]], "answer_lengths": [[1, 2, 0, 2], [0, 1]]}), file)
    first = Demonstration([5, 6, 7, 8, 9], [False, True, True, True, True])
    assert prompts.read_demonstrations(file) == [first, Demonstration([5], [True])]


PROMPTS = [Prompt(index, (index,), "countdown", "{}") for index in range(10)]


def ids(stream: PromptStream, position: int, count: int) -> list[int]:
    return [prompt.prompt_id for prompt in stream.take(position, count)]


def test_epoch_is_permutation_of_prompts() -> None:
    stream = PromptStream(PROMPTS, seed=1)
    first, second = ids(stream, 0, 10), ids(stream, 10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != ids(PromptStream(PROMPTS, seed=2), 0, 10)
    assert [stream.epoch_at(position) for position in (0, 9, 10, 19, 20)] == [0, 0, 1, 1, 2]


def test_position_determines_prompts() -> None:
    whole = ids(PromptStream(PROMPTS, seed=1), 0, 40)
    for position in (0, 7, 9, 10, 25):
        assert ids(PromptStream(PROMPTS, seed=1), position, 12) == whole[position : position + 12]
    jumping = PromptStream(PROMPTS, seed=1)
    assert ids(jumping, 28, 5) == whole[28:33]
    assert ids(jumping, 3, 5) == whole[3:8]
    with pytest.raises(DataError, match="loosen the filter"):
        PromptStream([], seed=1)


def test_order_is_pinned() -> None:
    """A run that resumes with another version of Millrace must draw the same prompts."""
    for part, order in (
        (None, [8, 4, 7, 0, 1, 2, 5, 9, 6, 3, 7, 2, 4, 6, 1, 0, 3, 5, 9, 8]),
        (0, [7, 2, 4, 6, 1, 0, 3, 5, 9, 8, 1, 3, 7, 4, 5, 9, 2, 0, 6, 8]),
        (1, [8, 5, 6, 0, 9, 1, 4, 3, 7, 2, 1, 0, 9, 2, 7, 3, 8, 6, 5, 4]),
    ):
        assert ids(PromptStream(PROMPTS, seed=1, part=part), 0, 20) == order


SIZES, WEIGHTS = {"a": 50, "b": 7, "c": 900}, (0.1, 3.0, 1.7)
PARTS = [[Prompt(index, (index,), name, "{}") for index in range(size)] for name, size in SIZES.items()]


def draw(position, count, seed=1, weights=WEIGHTS):
    return [(p.data_source, p.prompt_id) for p in MixedStream(PARTS, weights, seed=seed).take(position, count)]


def test_mixture_shares_are_exact():
    assert MixedStream(PARTS, WEIGHTS, seed=1).epoch_at(2_000) == 2  # of 957 prompts
    least = Counter(name for name, _ in draw(0, 2 * BLOCK, weights=(1.0, 1.0, 1_022.0)))
    assert least == {"a": 2, "b": 2, "c": 2_044}
    total = sum(WEIGHTS)
    for blocks in (1, 2, 7):
        counts = Counter(name for name, _ in draw(0, blocks * BLOCK))
        for name, weight in zip(SIZES, WEIGHTS, strict=True):
            assert abs(counts[name] - blocks * BLOCK * weight / total) <= 1
    far = Counter(name for name, _ in draw(1_000_000 * BLOCK, BLOCK))
    assert all(abs(far[name] - BLOCK * weight / total) <= 2 for name, weight in zip(SIZES, WEIGHTS, strict=True))


def test_mixture_parts_have_separate_epochs():
    found = draw(0, 6 * BLOCK)
    for name, size in SIZES.items():
        mine = [index for source, index in found if source == name]
        for start in range(0, len(mine) - size, size):
            assert sorted(mine[start : start + size]) == list(range(size))


def test_position_seed_and_weights_determine_mixture():
    whole = draw(0, 3 * BLOCK)
    assert whole[:50] not in (draw(0, 50, seed=2), draw(0, 50, weights=(1.0, 1.0, 1.0)))
    assert draw(0, BLOCK, weights=(0.2, 6.0, 3.4)) == whole[:BLOCK], "only the ratios count"
    for position in (0, 1, 500, BLOCK - 3, BLOCK, 2 * BLOCK + 17):
        assert draw(position, 40) == whole[position : position + 40]
    stream = MixedStream(PARTS, WEIGHTS, seed=1)
    for position, count in ((2_000, 5), (3, 1_100), (0, 4)):
        found = [(p.data_source, p.prompt_id) for p in stream.take(position, count)]
        assert found == whole[position : position + count]
    with pytest.raises(DataError) as caught:
        MixedStream(PARTS, (2.047, 0.001, 0.001), seed=1)
    rule = "data.parts: entry 1: weight must be at least a 1024th of the sum of all weights (0.00200098), got 0.001; "
    assert str(caught.value) == f"{rule}raise it, or leave the dataset out"


BAND = PassRatesConfig(draw="band", band=(0.25, 0.75), rest_weight=0.1, fade=0.5)
# passes, samples: never, always, half, one of four, three of four, nearly always, not known
ROWS = [(0, 4), (4, 4), (2, 4), (1, 4), (3, 4), (15, 16), (0, 0)]
COUNTS = PassCounts.of(*zip(*ROWS, strict=True))
ROW_PROMPTS = [Prompt(100 + index, (index,), "countdown", "{}") for index in range(len(ROWS))]


def naive_weight(passes: float, samples: float, settings: PassRatesConfig) -> float:
    low, high = settings.band
    return 1.0 if samples == 0 or low <= passes / samples <= high else settings.rest_weight


def naive_order(weights: list[float], seed: tuple[int, ...]) -> list[int]:
    """Return the rows sorted by key, the largest key first. Each key is computed separately."""
    uniform = np.random.default_rng(seed).random(len(weights))
    keys = {row: math.log(1 - float(u)) / w for row, (u, w) in enumerate(zip(uniform, weights, strict=True))}
    return sorted(keys, key=lambda row: -keys[row])


def test_count_update_equals_naive_twin() -> None:
    groups = {0: (3, 8), 1: (0, 1), 3: (0, 2), 5: (0, 0), 6: (1, 8)}
    expected = []
    for row, (c, s) in enumerate(ROWS):
        k, n = groups.get(row, (0, 0))
        expected.append((0.5 * c + k, 0.5 * s + n) if n else (c, s))
    rows = RowSampler([prompt.prompt_id for prompt in ROW_PROMPTS], COUNTS, BAND)
    text, _ = rows.update(COUNTS.text(), {ROW_PROMPTS[row].prompt_id: found for row, found in groups.items()})
    after = PassCounts.read(text, len(ROWS))
    assert list(zip(after.passes.tolist(), after.samples.tolist(), strict=True)) == expected
    assert COUNTS.samples.tolist() == [samples for _, samples in ROWS], "the counts before are as they were"
    assert rows.update("", {})[0] == COUNTS.text()


def test_retired_row_is_revived() -> None:
    rows = RowSampler([prompt.prompt_id for prompt in ROW_PROMPTS], COUNTS, BAND)
    text = ""
    for solved, counts in (({102: (8, 8), 103: (0, 8)}, (2, 0)), ({100: (6, 8)}, (0, 1))):
        text, metrics = rows.update(text, solved)
        assert (metrics["pass_rates/rows_retired"], metrics["pass_rates/rows_revived"]) == counts
    assert metrics["pass_rates/retired_share"] == 4 / 7
    again = PassCounts.read(text, len(ROWS))
    rates = [c / s for c, s in zip(again.passes.tolist(), again.samples.tolist(), strict=True) if s]
    assert metrics["pass_rates/mean"] == pytest.approx(sum(rates) / len(rates))


def test_counts_round_trip_bit_for_bit() -> None:
    counts = PassCounts.of(np.linspace(0, 5, 7), np.linspace(1, 9, 7))
    read = PassCounts.read(counts.text(), 7)
    assert read.passes.tobytes() == counts.passes.tobytes()
    assert read.samples.tobytes() == counts.samples.tobytes()
    with pytest.raises(CheckpointError, match="7 training rows, and there are 8"):
        PassCounts.read(counts.text(), 8)


def test_weighted_stream_equals_naive_twin() -> None:
    weights = COUNTS.weights(BAND)
    np.testing.assert_allclose(weights, [naive_weight(*row, BAND) for row in ROWS], rtol=1e-12)
    stream = PromptStream(ROW_PROMPTS, seed=3)
    stream.set_weights(weights)
    drawn = [*stream.take(20, 4), *stream.take(24, 6)]  # a refill continues in the same order, and beyond its end
    expected = naive_order(weights.tolist(), (prompts.WEIGHTED_SEED, 3, 20, 0))
    expected += naive_order(weights.tolist(), (prompts.WEIGHTED_SEED, 3, 20, 1))[:3]
    assert [prompt.prompt_id - 100 for prompt in drawn] == expected
    assert sorted(expected[:7]) == list(range(7)), "no row comes twice before all were drawn"
    again = PromptStream(ROW_PROMPTS, seed=3)
    again.take(0, 5)
    again.set_weights(weights)
    assert [*again.take(20, 10)] == drawn, "what was drawn before does not matter"
    again.set_weights(weights)
    assert [*again.take(30, 10)] != drawn


def test_weighted_order_is_pinned() -> None:
    """A run that resumes with another version of Millrace must draw the same prompts."""
    orders = {None: [4, 6, 2, 3, 0, 5, 1, 3, 4, 6, 2, 1, 5, 0], 0: [6, 0, 3, 2, 4, 1, 5, 4, 2, 3, 6, 5, 1, 0]}
    for part, order in orders.items():
        stream = PromptStream(ROW_PROMPTS, seed=3, part=part)
        stream.set_weights(COUNTS.weights(BAND))
        assert [prompt.prompt_id - 100 for prompt in stream.take(20, 14)] == order


def test_mixture_draws_each_part_by_weights() -> None:
    second, third = ([Prompt(first + index, (index,), "other", "{}") for index in range(3)] for first in (200, 300))
    stream = MixedStream([ROW_PROMPTS, second, third], [2.0, 1.0, 1.0], seed=2)
    stream.set_weights(np.concatenate([COUNTS.weights(BAND), [1.0, 1.0, 1.0], [0.5, 1.0, 0.1]]))
    drawn = [prompt.prompt_id for prompt in stream.take(0, 1_024)]
    assert Counter(row // 100 for row in drawn) == {1: 512, 2: 256, 3: 256}
    first, last = ([row % 100 for row in drawn if row // 100 == part] for part in (1, 3))
    assert first[:7] == naive_order([naive_weight(*row, BAND) for row in ROWS], (prompts.WEIGHTED_SEED, 2, 1, 0, 0))
    assert last[:3] == naive_order([0.5, 1.0, 0.1], (prompts.WEIGHTED_SEED, 2, 3, 0, 0))
