"""Problems of a run: parts of a mixture with separate ids and names, and held-out problems."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.run.layout import RunInputs
from rlcore.run.problems import HeldOutProblems, Problems, read_parts, spread
from rlcore.types import Prompt
from tests.helpers.small_run import prepare

PART = "{task: countdown, template: bare, number_high: 20, target_high: 40, min_numbers: 3, max_numbers: 3}"


def mixture(*names: str) -> RunConfig:
    parts = ",".join(f"{{name: {name!r}, data: {PART}}}" for name in names)
    return load_config(["experiment=debug", "data=mixture", f"data.parts=[{parts}]"])


def rows(file: Path, *ids: int, source: str = "countdown") -> Path:
    table = {
        "prompt_ids": pa.array([[number] for number in ids], pa.list_(pa.int32())),
        "ground_truth_json": pa.array(["{}" for _ in ids], pa.string()),
        "data_source": pa.array([source for _ in ids], pa.string()),
        "extra_info": pa.array([{"index": number} for number in ids], pa.struct([("index", pa.int64())])),
    }
    pq.write_table(pa.table(table), file)
    return file


def test_parts_of_a_mixture_have_separate_ids_and_names(tmp_path: Path) -> None:
    files = [rows(tmp_path / f"{number}.parquet", 3, 5) for number in range(3)]
    found = read_parts(mixture("a", "b", "c"), files)
    assert [[prompt.prompt_id for prompt in part] for part in found] == [
        [3, 5], [10**9 + 3, 10**9 + 5], [2 * 10**9 + 3, 2 * 10**9 + 5],
    ]  # fmt: skip
    assert [[prompt.data_source for prompt in part] for part in found] == [["a"] * 2, ["b"] * 2, ["c"] * 2]
    (alone,) = read_parts(load_config(["experiment=debug"]), files[:1])
    assert [(prompt.prompt_id, prompt.data_source) for prompt in alone] == [(3, "countdown"), (5, "countdown")]


def test_equal_names_and_empty_parts_are_refused(tmp_path: Path) -> None:
    sources = ("countdown", "other", "countdown")
    files = [rows(tmp_path / f"{number}.parquet", number, source=source) for number, source in enumerate(sources)]
    with pytest.raises(DataError, match=r"^data\.parts: entries 0 and 2 both have rows of countdown.*give .* a name$"):
        read_parts(mixture("", "", ""), files)
    assert len(read_parts(mixture("", "", "c"), files)) == 3
    rows(files[1])
    with pytest.raises(DataError, match=rf"^{files[1]}: no row is left; loosen filter\.max_prompt_tokens, or make"):
        read_parts(mixture("a", "b", "c"), files)


def test_suite_named_like_the_data_is_refused(tmp_path: Path) -> None:
    rows = PART.replace("}", ", train_size: 8, validation_size: 8}")
    suites = [f"{{name: {name}, data: {rows}}}" for name in ("other", "countdown")]
    run = prepare(tmp_path, f"validation.suites=[{','.join(suites)}]", "warm_start.enabled=false")
    with pytest.raises(DataError, match=r"^validation\.suites: countdown is the data source of the run's held-out"):
        Problems.read(run.config, run.inputs)


def prompts(*ids: int, source: str = "a") -> tuple[Prompt, ...]:
    return tuple(Prompt(number, (), source, "") for number in ids)


def test_spread_keeps_shares_of_parts() -> None:
    found = spread([prompts(0, 1, 2, 3, 4, 5), prompts(10, 11, 12), prompts(20)])
    assert [prompt.prompt_id for prompt in found] == [0, 10, 1, 2, 11, 20, 3, 4, 12, 5]
    assert [prompt.prompt_id for prompt in spread([prompts(1, 2), prompts(11, 12)])] == [1, 11, 2, 12]


def test_held_out_problems_are_limited_during_training() -> None:
    for limit, limited, number in ((2, True, 2), (2, False, 3), (0, True, 3), (9, True, 3)):
        config = load_config(["experiment=debug", f"validation.max_problems={limit}"])
        held_out = HeldOutProblems(config=config, validation=prompts(1, 2, 3), decode=lambda ids: "")
        assert held_out.held_out(limited=limited) == prompts(1, 2, 3)[:number], (limit, limited)


def test_rows_without_a_table_start_with_zero_counts() -> None:
    parts = (prompts(4, 7), prompts(9))
    given = {"validation": (), "decode": lambda ids: "", "inputs": RunInputs(Path("f"), Path("t")), "train": parts}
    assert Problems(config=RunConfig(), **given).row_sampler() is None
    drawn = Problems(config=RunConfig(pass_rates={"draw": "band"}), **given)
    assert (drawn.pass_rates, drawn.selected) == (None, parts)
    counted = drawn.row_sampler()
    assert counted._place == {4: 0, 7: 1, 9: 2}
    assert (counted._start.passes.tolist(), counted._start.samples.tolist()) == ([0, 0, 0], [0, 0, 0])
