"""GSM8K: the published files, both readings of an answer."""

import json
import random

import pytest

from data.gsm8k import final_number, only_number, reference_number, score, score_numeric
from data.tasks import build_dataset, dataset_fingerprint
from rlcore.config import Gsm8kData
from rlcore.errors import DataError
from rlcore.evaluation.result import ProblemResult, Response, problem_statistics

HUNDRED = {"answer": "1000"}


@pytest.mark.parametrize(
    ("answer", "strict", "numeric", "has_mark"),
    [
        ("so #### 1000", 1, 1, 1),
        ("so #### 1,000", 1, 1, 1),
        ("so #### $1,000", 0, 1, 0),
        ("so #### 1000.0", 0, 1, 1),
        ("so #### 1000.", 0, 1, 1),
        ("so #### 1000 dollars", 1, 1, 1),
        ("so ####1000", 0, 1, 0),
        ("#### 5 no, #### 1000", 1, 1, 1),
        ("#### 1000 no, #### 5", 0, 0, 1),
        ("it is 1,000 apples", 0, 1, 0),
        ("it is 1000 of 2000", 0, 0, 0),
        ("#### -1000", 0, 0, 1),
        ("#### 1000" + " and more" * 50, 0, 1, 0),
        ("#### 1000\n" + "x" * 290, 1, 1, 1),
        ("#### 1000\n" + "x" * 291, 0, 1, 0),
        ("x" * 400 + " 1000", 0, 1, 0),
        ("#### ", 0, 0, 0),
        ("#### ,", 0, 0, 1),
        ("", 0, 0, 0),
        ("#### " + "9" * 100_000, 0, 0, 0),
        ("#### " + "9" * 200, 0, 0, 1),
        ("1," * 100_000, 0, 0, 0),
        ("\u0661\u0660\u0660\u0660", 0, 0, 0),
    ],
)
def test_readings_of_an_answer(answer, strict, numeric, has_mark):
    found = score(answer, HUNDRED)
    assert (found.parts["strict"], found.parts["numeric"], found.parts["format"]) == (strict, numeric, has_mark)
    assert found.total == strict
    assert score_numeric(answer, HUNDRED).total == numeric


@pytest.mark.parametrize("scorer", [score, score_numeric])
def test_answers_that_say_the_same_number_vote_together(scorer):
    same = ["#### 1000", "so #### 1,000", "#### 1000.", "#### 1000.0 apples", "no: #### $1000"]
    assert {scorer(text, HUNDRED).said for text in same} == {"1000"}
    texts = ["#### 7", "#### 7", *same[:2], "#### 9"]
    answers = tuple(
        Response(text, found.total, found.parts, 3, "stop", said=found.said)
        for text in texts
        if (found := scorer(text, HUNDRED))
    )
    one = ProblemResult(1, 0, "", json.dumps(HUNDRED), None, answers)
    assert problem_statistics([one])["reward/maj@5"].tolist() == [0.5]  # a tie of 1000 and 7


def test_the_strict_reading_hears_no_vote_without_the_mark():
    assert (score("it is 7", HUNDRED).said, score_numeric("it is 7", HUNDRED).said) == (None, "7")


def perturbed(reference, rng):
    """Five answers that end in another number, or in none."""
    body, _, number = reference.rpartition("#### ")
    value = int(number.replace(",", ""))
    others = rng.sample([delta for delta in range(-60, 61) if delta], 3)
    yield from (f"{body}#### {value + delta}" for delta in others)
    yield f"{body}#### {number.strip()}7"
    yield f"{body}#### none"


@pytest.mark.slow
def test_every_published_row_scores_its_reference_one_and_others_zero(gsm8k_folder, artifacts_root):
    found = build_dataset(Gsm8kData(source=str(gsm8k_folder)), seed=1, root=artifacts_root)
    assert found.counts == {"train": 7_473, "validation": 1_319}
    import pyarrow.parquet as pq

    rng = random.Random(1)
    wrong = {"strict": 0, "numeric": 0}
    for split, size in found.counts.items():
        rows = pq.read_table(found.directory / f"{split}.parquet").to_pylist()
        assert len(rows) == size
        for row in rows:
            truth = {"answer": row["reward_model"]["ground_truth"]}
            solution = row["extra_info"]["solution"]
            assert row["prompt"][0]["content"].endswith('output the final answer after "####".')
            assert score(solution, truth).total == score_numeric(solution, truth).total == 1.0
            for answer in perturbed(solution, rng):
                wrong["strict"] += score(answer, truth).total != 0.0
                wrong["numeric"] += score_numeric(answer, truth).total != 0.0
    assert wrong == {"strict": 0, "numeric": 0}


@pytest.fixture
def small(tmp_path):
    record = {"question": "How many?", "answer": "They are 3.\n#### 3"}
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps(record | {"question": f"{i}?"}) for i in range(3)) + "\n\n"
    )
    (tmp_path / "test.jsonl").write_text(json.dumps(record))
    return tmp_path


def test_the_fingerprint_follows_the_files_not_their_place(small, tmp_path):
    here = dataset_fingerprint(Gsm8kData(source=str(small)), 1)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (moved / name).write_bytes((small / name).read_bytes())
    assert dataset_fingerprint(Gsm8kData(source=str(moved)), 2) == here
    (moved / "test.jsonl").write_text(json.dumps({"question": "other", "answer": "#### 4"}))
    assert dataset_fingerprint(Gsm8kData(source=str(moved)), 1) != here


@pytest.mark.parametrize(
    ("line", "told"), [('{"question": "x", "answer": "3"}', "must end in '#### <number>', got '3'")]
)
def test_a_broken_line_is_named(small, artifacts_root, line, told):
    with (small / "train.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=rf"train.jsonl: line 5: .*{told}"):
        build_dataset(Gsm8kData(source=str(small)), seed=1, root=artifacts_root)
    assert list((artifacts_root / "datasets").iterdir()) == []


@pytest.mark.parametrize(("answer", "number"), [("#### 18", "18"), ("x\n#### -1,234 ", "-1234"), ("#### 2.5", "2.5")])
def test_reference_numbers(answer, number):
    assert reference_number(answer, "here") == number


def test_a_word_that_the_limit_cuts_is_no_number():
    found = [
        final_number(text, within) for text, within in (("118", 3), ("118", 2), ("18", 2), (" 18", 2), ("a 18", 3))
    ]
    assert found == [118, None, 18, 18, 18]
    assert final_number("7. Then some words", 300) == 7
    assert final_number("it is 7 or so", 300) is None
    assert final_number("no digits", 300) is None


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("9 * 18", None),
        ("9* 18", None),
        ("= - 18", None),
        ("= 18", 18),
        ("- 18", None),
        ("so - 18", 18),
        ("18 *", None),
        ("18 * 2", None),
        ("18 eggs", 18),
        ("18m", None),
        ("18km", 18),
        ("minus 18", None),
        ("not 18", None),
        ("18 or so", None),
        ("half of 18", None),
        ("(18)", 18),
        ("18%", 18),
        ("1,018.5", 1018.5),
        ("10,18", None),
        ("eggs: 18", 18),
        ("18:30", None),
        ("18 \u00bd", None),
    ],
)
def test_a_number_stands_alone_or_is_none(line, number):
    assert only_number(line) == number


@pytest.mark.parametrize(
    ("reference", "strict", "numeric", "wrong"),
    [
        ("1,234", ["1,234", "1234"], ["$1,234", "1234.0"], ["1", "234", "12345"]),
        (" 76", ["76"], ["76.", "76.0"], ["7", "-76"]),
        ("76\n", ["76"], [], ["75"]),
        ("76.0", ["76", "76.0"], ["76."], ["760"]),
        ("2.50", ["2.5", "2.50"], ["2.500"], ["25", "2"]),
        ("$76", ["76"], ["$76"], ["77"]),
        ("-5", ["-5"], ["-5.0"], ["5"]),
        ("025", ["25"], ["25.0"], ["5"]),
        ("76 dollars", ["76"], [], ["67"]),
        ("#### 76", ["76"], [], ["6"]),
        ("He has 4 * 19 = <<4*19=76>>76 eggs.\n#### 76", ["76"], ["76 eggs."], ["4", "19"]),
        ("18 or 19", [], [], ["18", "19"]),
        ("18/19", [], [], ["18", "19", "18/19"]),
    ],
)
def test_a_reference_is_cleaned_as_an_answer_is(reference, strict, numeric, wrong):
    truth = {"answer": reference}
    for answer in strict:
        assert score(f"#### {answer}", truth).total == score_numeric(f"#### {answer}", truth).total == 1.0, answer
    for answer in numeric:
        assert score_numeric(f"#### {answer}", truth).total == 1.0, answer
    for answer in wrong:
        assert score(f"#### {answer}", truth).total == score_numeric(f"#### {answer}", truth).total == 0.0, answer


@pytest.mark.slow
def test_a_whole_published_answer_works_as_reference(gsm8k_folder):
    for split in ("train", "test"):
        for line in (gsm8k_folder / f"{split}.jsonl").read_text().splitlines():
            answer = json.loads(line)["answer"]
            assert score(answer, {"answer": answer}).total == score_numeric(answer, {"answer": answer}).total == 1.0
