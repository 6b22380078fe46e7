"""GSM8K: the published files, and both readings of a response."""

import json
import random

import pyarrow.parquet as pq
import pytest

from data.gsm8k import final_number, only_number, reference_number, score, score_numeric
from data.tasks import build_dataset, dataset_directory
from rlcore.config import Gsm8kData
from rlcore.errors import DataError
from rlcore.evaluation.result import ProblemResult, Response, problem_statistics

THOUSAND = {"answer": "1000"}


@pytest.mark.parametrize(("response", "strict", "numeric", "has_mark"), [
    ("so #### 1000", 1, 1, 1), ("so #### 1,000", 1, 1, 1), ("so #### $1,000", 0, 1, 0), ("so #### 1000.0", 0, 1, 1),
    ("so #### 1000 dollars", 1, 1, 1), ("so ####1000", 0, 1, 0), ("#### 5 no, #### 1000", 1, 1, 1),
    ("it is 1,000 apples", 0, 1, 0), ("it is 1000 of 2000", 0, 0, 0), ("#### -1000", 0, 0, 1),
    ("#### 1000\n" + "x" * 290, 1, 1, 1), ("#### 1000\n" + "x" * 291, 0, 1, 0), ("x" * 400 + " 1000", 0, 1, 0),
    ("#### ", 0, 0, 0), ("", 0, 0, 0), ("#### " + "9" * 100_000, 0, 0, 0), ("#### " + "9" * 200, 0, 0, 1),
    ("1," * 100_000, 0, 0, 0), ("\u0661\u0660\u0660\u0660", 0, 0, 0),
])  # fmt: skip
def test_responses_have_both_readings(response, strict, numeric, has_mark):
    found = score(response, THOUSAND)
    assert (found.parts["strict"], found.parts["numeric"], found.parts["format"]) == (strict, numeric, has_mark)
    assert found.total == strict
    assert score_numeric(response, THOUSAND).total == numeric


@pytest.mark.parametrize("scorer", [score, score_numeric])
def test_equal_numbers_vote_together(scorer):
    same = ["#### 1000", "so #### 1,000", "#### 1000.", "#### 1000.0 apples", "no: #### $1000"]
    assert {scorer(text, THOUSAND).said for text in same} == {"1000"}
    assert scorer("it is 7", THOUSAND).said == ("7" if scorer is score_numeric else None)
    scores = [(text, scorer(text, THOUSAND)) for text in ("#### 7", "#### 7", *same[:2], "#### 9")]
    responses = tuple(Response(text, one.total, one.parts, 3, "stop", said=one.said) for text, one in scores)
    result = ProblemResult(1, 0, "", json.dumps(THOUSAND), None, responses)
    assert problem_statistics([result])["reward/maj_at_5"].tolist() == [0.5]  # a tie of 1000 and 7


@pytest.mark.slow
def test_published_solutions_score_one_and_perturbed_ones_zero(gsm8k_folder, artifacts_root):
    dataset = build_dataset(Gsm8kData(source=str(gsm8k_folder)), seed=1, root=artifacts_root)
    assert dataset.counts == {"train": 7_473, "validation": 1_319}
    rng = random.Random(1)
    for split, size in dataset.counts.items():
        rows = pq.read_table(dataset.directory / f"{split}.parquet").to_pylist()
        assert len(rows) == size
        for row in rows:
            truth, solution = {"answer": row["reward_model"]["ground_truth"]}, row["extra_info"]["solution"]
            assert row["prompt"][0]["content"].endswith('output the final answer after "####".')
            for reference in (truth, {"answer": solution}):
                assert score(solution, reference).total == score_numeric(solution, reference).total == 1.0
            body, _, number = solution.rpartition("#### ")
            others = rng.sample([delta for delta in range(-60, 61) if delta], 3)
            values = [int(number.replace(",", "")) + delta for delta in others]
            for wrong in (f"{body}#### {ending}" for ending in (*values, f"{number.strip()}7", "none")):
                assert score(wrong, truth).total == score_numeric(wrong, truth).total == 0.0, wrong


def test_broken_lines_are_named(tmp_path, artifacts_root):
    answers = ("They are 3.\n#### 3", "They are 3.\n3")
    lines = [json.dumps({"question": f"{number}?", "answer": answer}) for number, answer in enumerate(answers)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n\n".join(lines))
    settings = Gsm8kData(source=str(tmp_path))
    with pytest.raises(DataError, match=r"test.jsonl|train.jsonl: line 3: .*must end in '#### <number>', got"):
        build_dataset(settings, seed=1, root=artifacts_root)
    assert list((artifacts_root / "datasets").iterdir()) == []
    first = dataset_directory(settings, 1, artifacts_root)
    (tmp_path / "test.jsonl").write_text(lines[0])
    assert dataset_directory(settings, 1, artifacts_root) != first


@pytest.mark.parametrize(("text", "within", "number"), [
    ("118", 3, 118), ("118", 2, None), ("18", 2, 18), (" 18", 2, 18), ("a 18", 3, 18), ("7. Then some words", 300, 7),
    ("it is 7 or so", 300, None), ("no digits", 300, None),
])  # fmt: skip
def test_final_number_is_searched_within_the_limit(text, within, number):
    assert final_number(text, within) == number
    for answer, written in (("#### 18", "18"), ("x\n#### -1,234 ", "-1234"), ("#### 2.5", "2.5")):
        assert reference_number(answer, "here") == written


@pytest.mark.parametrize(("line", "number"), [
    *((line, 18) for line in ("= 18", "so - 18", "18 eggs", "18km", "(18)", "18%", "eggs: 18")), ("1,018.5", 1018.5),
    *((line, None) for line in ("9 * 18", "9* 18", "= - 18", "- 18", "18 *", "18 * 2", "18m", "minus 18")),
    *((line, None) for line in ("not 18", "18 or so", "half of 18", "10,18", "18:30", "18 \u00bd")),
])  # fmt: skip
def test_only_number_needs_one_number_alone(line, number):
    assert only_number(line) == number


@pytest.mark.parametrize(("reference", "strict", "numeric", "wrong"), [
    ("1,234", ["1,234", "1234"], ["$1,234", "1234.0"], ["1", "234", "12345"]),
    (" 76", ["76"], ["76.", "76.0"], ["7", "-76"]), ("76.0", ["76", "76.0"], ["76."], ["760"]),
    ("2.50", ["2.5", "2.50"], ["2.500"], ["25", "2"]), ("$76", ["76"], ["$76"], ["77"]),
    ("025", ["25"], ["25.0"], ["5"]), ("76 dollars", ["76"], [], ["67"]),
    ("He has 4 * 19 = <<4*19=76>>76 eggs.\n#### 76", ["76"], ["76 eggs."], ["4", "19"]),
    ("18/19", [], [], ["18", "19", "18/19"]),
])  # fmt: skip
def test_references_are_cleaned_as_responses_are(reference, strict, numeric, wrong):
    truth = {"answer": reference}
    for answer in strict:
        assert score(f"#### {answer}", truth).total == score_numeric(f"#### {answer}", truth).total == 1.0, answer
    for answer in numeric:
        assert score_numeric(f"#### {answer}", truth).total == 1.0, answer
    for answer in wrong:
        assert score(f"#### {answer}", truth).total == score_numeric(f"#### {answer}", truth).total == 0.0, answer
