"""The suites of conf/suite on small files of the published forms."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data.references import check_parts
from data.tasks import build_dataset, task_of
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.check import read_suites, suite_settings
from rlcore.config.problems import Findings
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool

PUBLISHED = Path(__file__).parent / "published"


def settings_of(entry: str, root: Path) -> RunConfig:
    """Return the settings of a suite in an evaluation."""
    findings = Findings()
    (given,) = read_suites([entry], findings)
    assert not findings.problems
    suite = SuiteConfig.model_validate(given)
    plain = RunConfig()
    reward = plain.reward.model_copy(update={"num_processes": 1})
    paths = plain.paths.model_copy(update={"root": str(root)})
    return suite_settings(plain.model_copy(update={"paths": paths, "reward": reward}), suite)


def prepared(entry: str, root: Path) -> tuple[RunConfig, list[dict[str, Any]]]:
    """Make the rows of a suite as an evaluation does, and check its references."""
    settings = settings_of(entry, root)
    made = build_dataset(settings.data, seed=1, root=root, splits=("validation",))
    assert check_parts(settings, ("validation",)) == ""
    return settings, pq.read_table(made.directory / "validation.parquet").to_pylist()


@pytest.mark.parametrize(
    ("suite", "files", "right", "wrong"),
    [
        ("math500", "math500", ["So \\boxed{7\\sqrt2}.", "The answer is $\\frac{3}{8}$."], ["\\boxed{7}", "0.37"]),
        ("aime24", "aime24", ["\\boxed{15}", "\\boxed{032}", "\\boxed{625}"], ["\\boxed{16}", "32 or 33", "\\boxed{}"]),
        ("aime25", "aime25", ["\\boxed{015}", "\\boxed{32}"], ["\\boxed{15.5}", "\\boxed{232}"]),
        ("ifeval", "ifeval", ["A lake lies still.", f"Kettle, kettle! {'And tea. ' * 20}"], ["Wide, deep.", "Tea."]),
        pytest.param("humaneval", "humaneval", ["```python\ndef twice(x):\n    return x + x\n```"], ["    return x"],
                     marks=pytest.mark.program("bwrap")),
        pytest.param("humaneval_base", "humaneval", ["    return x + x\n"], ["    return x\n"],
                     marks=pytest.mark.program("bwrap")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_published_form_is_read_and_scored(
    suite: str, files: str, right: list[str], wrong: list[str], artifacts_root: Path
) -> None:
    if suite == "ifeval":
        pytest.importorskip("langdetect")
    settings, rows = prepared(f"{suite}={PUBLISHED / files}", artifacts_root)
    assert len(rows) == 12
    truths = [json.dumps(row["reward_model"]["ground_truth"]) for row in rows]
    with ScoringPool(settings.data.scorer, settings.reward) as pool:
        assert [one.solved for one in pool.score(right, truths[: len(right)])] == [True] * len(right)
        assert [one.solved for one in pool.score(wrong, truths[: len(wrong)])] == [False] * len(wrong)


def test_base_suite_prompts_with_the_function_alone(artifacts_root: Path) -> None:
    prompts = {}
    for suite in ("humaneval", "humaneval_base"):
        data = settings_of(f"{suite}={PUBLISHED / 'humaneval'}", artifacts_root).data
        rows = task_of(data).build(data, 1)
        first = next(iter(rows.splits["validation"]))
        prompts[suite] = (rows.prompt_form, first.prompt[0].content)
    function = 'def twice(x: int) -> int:\n    """ Return two times x.\n    """'
    assert prompts["humaneval_base"] == ("text", function)
    form, text = prompts["humaneval"]
    assert form == "chat"
    assert text.startswith(f"{function}\n \nComplete the function.")


@pytest.mark.parametrize(
    ("suite", "column", "message"),
    [
        ("math500", "problem", r"test\.jsonl: line 1: there is no column problem \(columns: solution, answer"),
        ("aime24", "answer", r"train\.jsonl: line 1: there is no column answer"),
        ("ifeval", "kwargs", r"train\.jsonl: line 1: there is no column kwargs"),
        ("humaneval", "test", r"test\.jsonl: line 1: there is no column test \(columns: task_id"),
    ],
)
def test_missing_column_is_refused_with_file_and_line(
    suite: str, column: str, message: str, tmp_path: Path, artifacts_root: Path
) -> None:
    shutil.copytree(PUBLISHED / suite, tmp_path / suite)
    (file,) = (tmp_path / suite).iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != column}) + "\n" for row in rows))
    with pytest.raises(DataError, match=message):
        prepared(f"{suite}={tmp_path / suite}", artifacts_root)


@pytest.mark.parametrize(
    ("suite", "column", "value", "message"),
    [
        ("ifeval", "instruction_id_list", ["punctuation:no_dots"], r"line 1.*no_dots.*repair or remove the row"),
        pytest.param("humaneval", "canonical_solution", "    return None\n", r"must give full marks.*line 1: ",
                     marks=pytest.mark.program("bwrap")),
        ("math500", "answer", "\\approx 3", r"must give full marks.*line 1: reference .*approx 3"),
    ],
)  # fmt: skip
def test_unreadable_row_is_refused_before_a_model_is_loaded(
    suite: str, column: str, value: object, message: str, tmp_path: Path, artifacts_root: Path
) -> None:
    shutil.copytree(PUBLISHED / suite, tmp_path / suite)
    (file,) = (tmp_path / suite).iterdir()
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(first), column: value}), *others]))
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepared(f"{suite}={tmp_path / suite}", artifacts_root)


def test_wrong_folder_is_refused(artifacts_root: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source: .*aime24 lacks test, .* Its files: train\.jsonl"):
        prepared(f"math500={PUBLISHED / 'aime24'}", artifacts_root)
    with pytest.raises(DataError, match=r"data\.source: must be a folder or a hub id .* that holds test as \.jsonl"):
        prepared("math500=/nowhere", artifacts_root)
