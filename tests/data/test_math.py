"""Mathematics: readings of references and responses, and rewards for the right answer alone."""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.math_answers import compared, readings

# `read_reference`: scores alone do not show how a text is read.
from data.math import read_reference, score
from data.written_numbers import read_number, typeset
from rlcore.config import RewardConfig
from rlcore.rollout.scoring import ScoringPool


def paid(answer: str, reference: str) -> bool:
    return score(f"\\boxed{{{answer}}}", {"answer": reference}).total == 1.0


def test_published_references_are_read_as_listed():
    assert len(readings()) >= 300
    for reference, expected in readings().items():
        reading = read_reference(reference)
        kinds = {"number": reading.number, "words": reading.words and " ".join(reading.words).strip()}
        kinds["base"] = reading.based and " ".join(reading.based)
        found = [f"{kind} {value}" for kind, value in kinds.items() if value is not None]
        refused = reading.problem is not None
        assert (["refused"] if refused else found or ["expression"]) == [expected], reference
        assert paid(reference, reference) is not refused, reference


def test_documented_forms_are_read_as_documented():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = [line.split(" | ") for line in page.partition("| form | read as |")[2].partition("\n\n")[0].splitlines()[2:]]
    forms = [(form, "refused" in reading) for forms, reading in rows for form in re.findall("`([^`]+)`", forms)]
    assert len(forms) > 50
    for form, is_refused in forms:
        assert (read_reference(form).problem is not None) is is_refused, form
        assert paid(form, form) is not is_refused, form


@pytest.mark.parametrize(("reference", "right", "wrong"), [
    (r"\$36", ["36", r"\$36", "$36", r"36\text{ dollars}", "36.00"], ["-36", "3.6", r"\$35"]),
    (r"\$32,\!348", ["32348", "32,348", r"\$32{,}348"], ["32", "348"]),
    (r"0.\overline{3}", [r"\frac13", "1/3", "0.(3)", "0.333333"], ["0", "0.3", "0.33", "3", "33333333/100000001"]),
    ("0.33333333", ["1/3"], ["0.33333334"]),
    (r"1.2\overline{34}", [r"\frac{611}{495}"], ["1.2", "1.234"]),
    (r"12\frac12", ["12.5", "25/2", r"12 \tfrac{1}{2}", "12 1/2"], ["12", "6", "13/2", r"12\frac13"]),
    (r"12\frac12\%", ["12.5", r"12.5\%", "0.125", "12.5 percent"], ["12", r"12\%", "1.25"]),
    (r"\frac12\%", ["0.005", "0.5%"], ["0.5", "50"]), ("100%", ["100"], ["1", "10"]),
    ("0.5", [r"50\%", r"\frac12", ".5"], [r"0.5\%", "5", r"5\%"]),
    (r"2.5 \times 10^3", ["2500", "2.5e3", r"2.5\cdot 10^{3}", "2,500"], ["2.5", r"2.5\times 10^4", "7.5"]),
    ("2500", [r"2.5 \times 10^3"], [r"25 \times 10^2", r"250 \times 10", r"2.5 \times 1000", "50^2", "2.5"]),
    (r"5\text{ ft }2\text{ in}", ["5 ft 2 in", r"5\text{ ft}, 2\text{ in}"],
     ["5", "2", r"2\text{ ft }5\text{ in}", "62"]),
    ("A", ["(A)", r"\text{A}", r"\textbf{(A)}", "A. 36", r"\textbf{(A)}\ 36"],
     ["B", "A, B", "A or B", "(A) or 36", "B. 36"]),
    (r"\$1,234 and \$5,678", ["1234, 5678"], ["1, 234, 5, 678", "1234"]),
    ("(1,2)", ["(1, 2)", r"\left(1,2\right)"], ["(2,1)", "1", "[1,2]"]),
    ("42", [r"\text{42}", r"\textbf{42}", r"\mathbf{42}", "{42}", r"\fbox{42}", r"\text{42 apples}", "x = 42"],
     ["4{2}", "24"]),
    ("1,234", [r"1\,234", "1{,}234", "1 234"], ["1", "234", "235", "1,235"]),
    ("x = 5", ["5", "x=5", "x = 2 + 3 = 5"], ["y = 5", "x = 6", "x"]),
    (r"\angle ABC = 30^\circ", ["30", "30^{\\circ}"], [r"\angle ABD = 30^\circ", "60"]),
    ("x = 1 \\text{ or } x = 2", ["x=2, x=1", "1, 2"], ["2", "x = 1"]),
    ("1011_2", ["1011", "1011_{2}"], ["1011_3", "11", "1"]),
    (r"\text{Sunday}", ["Sunday", "sunday", r"\textbf{Sunday}"], ["Monday", r"\text{not Sunday}", "Sun"]),
    (r"3:45\text{ p.m.}", ["3:45 p.m."], ["3:45", r"3:45\text{ a.m.}"]),
    (r"4\pi\text{ cm}^2", [r"4\pi", r"4\pi\text{ cm}^2", r"4 \pi cm^2"], ["4", r"2\pi"]),
    ("2^{10}", ["1024", "2^{10}", "4^5"], ["20", "210"]),
    # spaces between digits
    ("2 1/2", ["2.5", r"2\frac12"], ["21/2", r"\frac{21}{2}"]), ("(12,3)", ["(12, 3)"], ["(1 2,3)"]),
    # words that introduce a number
    (r"\text{Area: }24", ["24", r"24\text{ cm}^2"], ["42"]),
    (r"18\frac{\text{m}}{\text{s}}", ["18", r"18\text{ m/s}"], ["1"]),
    (r"18^{\text{th}}", ["18", r"18\text{th}"], ["8"]),
    # words that change the number
    (r"\$40\text{ loss}", [r"40\text{ loss}"], [r"\$40\text{ profit}", "40"]),
    # lists, entry by entry
    ("x=24, y=36", ["24, 36", "y=36, x=24", "(24, 36)", r"x = 24 \text{ and } y = 36"],
     ["36, 24", "(36,24)", "x=36, y=24"]),
    ("x=3, x=-3", ["-3, 3", r"\pm 3"], ["3", "3, 3"]),
    ("(x,y) = (3,-5)", ["(3,-5)", "x=3, y=-5"], ["(-5,3)", "(a,b) = (3,-5)"]),
    ("1,2", ["2, 1", "1 and 2", r"x \in \{1,2\}"], ["3-2,4-2", "1, 4-2", "1,2,2", "1"]),
    (r"(1, \sqrt{3})", [r"(1, \sqrt3)"], [r"(2-1, \sqrt3)", r"(\sqrt3, 1)"]),
    (r"0.\overline{3}, 2", [r"2, \frac13"], ["0.3, 2"]),
    # other spellings
    (r"-\frac{11}{6}", [r"\frac{11}{-6}", r"-\left(\frac{11}{6}\right)", "-(11/6)", "11/-6"],
     [r"\frac{-11}{-6}", "-(-11/6)"]),
    (r"\frac12", [r"\frac{-1}{-2}", r"\frac{{1}}{{2}}"], [r"-\frac{-1}{-2}"]),
    (r"0.\dot{1}\dot{8}", [r"\frac{2}{11}"], ["0.18", "0"]),
    ("18", [r"\Large 18", r"\phantom{0}18", r"18\hspace{2pt}\text{cm}", r"\underline{18}", r"\textcolor{red}{18}",
            r"{\color{red}18}"], [r"1\phantom{0}8", "1 8", r"\underline{1}8"]),
])  # fmt: skip
def test_equal_forms_are_paid_and_near_misses_are_not(reference, right, wrong):
    assert [answer for answer in [reference, *right] if not paid(answer, reference)] == []
    assert [answer for answer in wrong if paid(answer, reference)] == []


@pytest.mark.parametrize("form", [
    "twice {}", r"\text{double }{}", "log {}", r"\cos {}", "cos {}", "sqrt {}", r"\text{square root of }{}",
    r"\text{sum of }{}", r"\text{reciprocal of }{}", r"\text{no }{}", r"\text{isn't }{}", r"\text{either }{}",
    r"\text{maybe }{}", r"\text{about }{}", r"\text{one over }{}", r"\text{anything but }{}", r"\text{unknown, }{}",
    r"\text{less than }{}", r"\text{before }{}", r"\text{one }{}", "{} mod", "{} bn", "{} crore", "{} grand", "{} mil",
    r"{}\text{ lakh}", r"{}\text{ lakhs}", r"{}\text{ mln}", r"{}\text{ gross}", r"{}\text{ score}", r"{}\text{ K}",
    r"{}\text{ million}", r"{}\text{ dozens}", r"{}\text{ tens}", r"{}\text{ less}", r"{}\text{ more}",
    r"{}\text{ eighths}", r"{}\text{ doubled}", r"{}\text{ zero}", r"{}\text{ northwards}", "{}/x", "{}/y", "{}/n",
    r"{}/\text{n}", "{}/xy", "{} x", r"{}\text{ x}",
])  # fmt: skip
def test_numbers_with_unknown_words_are_different(form):
    assert not paid(form.replace("{}", "18"), "18")
    assert not paid("18", form.replace("{}", "18"))


@pytest.mark.parametrize("form", [
    r"\text{about }24", "at least 24", r"24\text{ (approximately)}", "24 or more", r"\text{Route }66",
    r"24\text{ red apples}",
])  # fmt: skip
def test_references_with_unknown_words_are_refused(form):
    assert "unknown word" in (found := read_reference(form).problem) or "is no known unit or word" in found


@pytest.mark.parametrize("form", ["NaN", "nan", "inf", "-inf", "Infinity", r"\text{nan}", "null"])
def test_missing_values_are_neither_references_nor_answers(form):
    assert "is no value" in read_reference(form).problem
    assert not paid(form, form)
    assert not paid(form, r"\infty")
    assert paid(r"\infty", r"\infty")


@pytest.mark.parametrize("answer", [
    "36 \\div 2", "36\\div 2\\div 1", "(36)/(2)", "36/2", "\\frac{36}{2}", "\\dfrac{18}{1}", "18/1", "18:1", "9+9",
    "20-2", "--18", "-(-18)", "18 + 0", "18 \\cdot 1", "2 \\times 9", "2\u00d79", "36 \u00f7 2", "(3)(6)", "2(9)",
    "{2}{9}", "1.8 \\times 10", "18 \\times 10^0", "0.18 \\times 10^2", "180 \\times 10^{-1}", "18e0", "\\binom{18}{1}",
    "\\dbinom{18}{17}", "\\tbinom{18}{1}", "{18 \\choose 1}", "18e^0", "18^1", "\\sqrt{324}", "\\sqrt[3]{5832}",
    "\\log_2 2^{18}", "\\ln e^{18}", "18 x^0", "\\frac{18!}{17!}", "18!/17!", "\\sum_{i=1}^{18} 1",
    "\\prod_{i=18}^{18} i", "\\max(18, 3)", "\\min\\{18, 30\\}", "\\gcd(36, 54)", "|{-18}|",
    "\\lfloor 18.5 \\rfloor", "118 \\bmod 100",
    "50\\% of 36", "50\\% \\times 36", "\\{36 \\div 2\\}", "{36 \\div 2}", "\\text{36/2}", "\\mathbf{9 + 9}",
    "\\left(36 \\div 2\\right)", "\\boxed{36 \\div 2}", "\\boxed{36} \\div 2", "36 \\div \\boxed{2}", "17\\frac{2}{2}",
    "17\\frac33", "16\\frac{4}{2}", "\\int_0^{18} 1 dx", "\\lim_{x \\to 18} x", "18\\sin 90^\\circ", "-18i^2",
])  # fmt: skip
def test_repeated_questions_are_not_paid(answer):
    assert not paid(answer, "18")
    assert not paid(answer, "18.0")


@pytest.mark.parametrize(("response", "total"), [
    *((text, 1.0) for text in (
        "\\boxed{42}" + " and so on" * 1_000, "\\boxed{42}" + "\n" * 100_000, "\\boxed{7} then \\boxed{42}",
        "\\boxed{42}, \\boxed{42}", "\\fbox{42}", "\\boxed {42}", "$\\boxed 42$ is it", "\\boxed42",
        "\\boxed{\\boxed{42}}", "\\boxed{x \\boxed{42}",
    )),
    *((text, 0.0) for text in (
        "\\boxed{42} then \\boxed{7}", "\\boxed{42} or \\boxed{7}", "$\\boxed{7}$, $\\boxed{42}$",
        "\\boxed{4\\boxed{2}}", "\\boxed{42} \\boxed{7", "\\boxed{}", "\\boxedness 42",
    )),
])  # fmt: skip
def test_last_box_counts(response, total):
    assert score(response, {"answer": "42"}).total == total
    assert score(response, {"answer": "42"}).parts["format"] == float("\\boxedness" not in response)


@pytest.mark.parametrize("response", [
    "\\boxed{" * 20_000, "{" * 20_000 + "\\boxed{7}", "\\boxed 1 " * 10_000 + "{", "\\fbox" * 20_000,
    "\\boxed{7}, " * 10_000, *(f"\\boxed{{{text}}}" for text in (
        "{" * 40_000 + "}" * 40_000, "18 " + "aa " * 600 + "!", "18 " + "cm/" * 600 + "!", "aa" * 900 + "!18",
        "aa " * 600 + "!18", "f(x)" * 400 + "+=7", "(" * 900 + "7" + ")" * 900, "\\text{a " * 250 + "18",
        "1 234 " * 300, "9" * 1_900, "1e999999999", "1.5e999", "0.(" + "9" * 1_900 + "1)",
    )),
])  # fmt: skip
def test_hostile_responses_are_scored_in_time(response):
    assert score(response, {"answer": "18"}).total == 0.0
    read_reference(response)


def test_numbers_equal_a_naive_reading():
    rng = random.Random(1)
    for _ in range(500):
        whole, top, more = rng.randrange(2_000_000), rng.randrange(1, 50), rng.randrange(1, 50)
        (sign, mark), spot = rng.choice(((1, ""), (-1, "-"))), "".join(rng.choices("0123456789", k=rng.randrange(1, 5)))
        tail, bottom = rng.choice(("", r"\text{ cm}^2", r"^\circ", " dollars")), top + more
        value, part = sign * Fraction(whole), sign * Fraction(top, bottom)
        cases = {
            f"{mark}\\${whole:,}{tail}": value,
            f"{mark}{whole:,}".replace(",", "\\,") + tail: value,
            f"{mark}{whole}.{spot}{tail}": sign * Fraction(f"{whole}.{spot}"),
            f"{mark}\\frac{{{top}}}{{{bottom}}}{tail}": part,
            f"{mark}{whole}\\dfrac{{{top}}}{{{bottom}}}{tail}": value + part,
            f"{mark}{whole} {top}/{bottom}{tail}": value + part,
            f"{mark}{whole}.\\overline{{{spot}}}{tail}": value + sign * Fraction(int(spot), 10 ** len(spot) - 1),
            f"{mark}{top / 10 + 1} \\times 10^{{{len(spot)}}}": sign * (Fraction(top, 10) + 1) * 10 ** len(spot),
        }
        assert {text: read_number(typeset(text)) for text in cases} == {text: (cases[text], False) for text in cases}


def test_equal_wrong_lists_have_the_same_vote():
    def vote(answer):
        return score(f"\\boxed{{{answer}}}", {"answer": "7, 8"}).said

    assert vote("3, 0.5") == vote(r"\{\frac12, 3\}") == "1/2, 3"
    assert vote("x=3, y=4") == vote("y=4, x=3") != vote("x=4, y=3")
    assert vote("(3, 4)") != vote("(4, 3)")
    assert vote("8, 7") == "7, 8"


@pytest.mark.slow
def test_edited_references_agree_with_math_verify_except_for_rules():
    figures, unexplained = compared(800, seed=7)
    assert unexplained == []
    assert min(sum(n for name, n in figures.items() if name.startswith(edit)) for edit in ("again", "part")) > 100


@pytest.mark.slow
def test_endless_computations_end_at_the_deadline():
    """`9^{9^{9}}` is computed only if the reference is an expression."""
    cases = [
        ("the answer is $\\frac{2}{4}$", r"\frac{1}{2}", 1.0, 0.0), ("so \\boxed{x^2+2x+1}", r"(x+1)^2", 1.0, 1.0),
        ("I do not know", r"\frac{1}{2}", 0.0, 0.0), ("\\boxed{9^{9^{9^{9}}}}", "5", 0.0, 1.0),
        ("\\boxed{9^{9^{9^{9}}}}", "2^{10}", 0.0, 0.0), ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0, 1.0),
    ]  # fmt: skip
    truths = [json.dumps({"answer": truth}) for _, truth, *_ in cases]
    with ScoringPool("data.math:score", RewardConfig(num_processes=1, deadline_s=5)) as pool:
        scores = pool.score([response for response, *_ in cases], truths)
        assert [(one.total, one.parts.get("format", 0.0)) for one in scores] == [case[2:] for case in cases]
        assert pool.timeouts + pool.errors == 1
        assert scores[-2].failure is not None
        votes = ["\\boxed{1/2}", "\\boxed{\\frac12}", "\\boxed{0.5}", "\\boxed{2}", "\\boxed{2.0}", "none"]
        said = [each.said for each in pool.score(votes, [json.dumps({"answer": "2"})] * len(votes))]
        assert said == ["1/2", "1/2", "1/2", "2", "2", None]  # right responses have the reference
