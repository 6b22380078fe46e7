"""Answers that differ from the reference or state several things are never scored as correct."""

import itertools
import re

import pytest

from data import countdown, gsm8k, math, sort_digits

REFERENCES = ("18", "7", "-3", "1000", "2.5")

# Many short texts in a row.
# fmt: off
# What makes of an answer that holds the right number ({}) another one.
SECOND_NUMBERS = [
    f"{{}}{joint}{other}"
    for joint, other in itertools.product(
        (
            " or ", "/", " / ", "*", " * ", " x ", "+", " - ", "^", "**", ", ", " ", " to ", "-", "\u2013", "=",
            " = ", ":", " and ", "; ", "e", "E", "e-", "_", "(", "%", "?", "\u00d7", "\u00f7", "\u00b7", "|", "~",
            ". No, ", "! Or ", "\u00b2", "\\times ", "\\cdot ",
        ),
        ("19", "5", "\u0661"),
    )
]
OTHER_WORDS = [
    f"{{}} {words}"
    for words in (
        "million", "thousand", "hundred", "dozen", "billion", "and a half", "or nineteen", "squared", "cubed",
        "times ten", "plus two", "minus two", "point five", "over two", "tenths", "or so", "is wrong",
    )
]
OTHER_SIGNS = [
    "\u2212{}", "minus {}", "negative {}", "not {}", "- {}", ".{}", "1,{}", "1/{}", "3 * {}", "9^{}", "\u0661{}",
    "{}k", "{}M", "{}\u00bd", "{}\u00b2", "{}1", "{},5", "{}.5.2", "5 or {}", "5 {}", "{}e", "x{}",
]
HOSTILE = [*SECOND_NUMBERS, *OTHER_WORDS, *OTHER_SIGNS]
HARMLESS = ["{}", "{}.", "{} dollars", "{} miles per hour", "${}", "**{}**", "{}%", "{}kg", "({})", "{} dollars."]


def published_strict(response: str, reference: str) -> bool:
    """Apply the published strict rule: the last `#### <number>` of the last 300 characters, as text."""
    found = re.findall(r"#### (-?[0-9.,]+)", response[-300:])
    return bool(found) and found[-1].replace(",", "").replace("$", "") == reference


@pytest.mark.parametrize("reference", REFERENCES)
def test_gsm8k_takes_no_answer_that_says_another_number(reference):
    truth = {"answer": reference}
    wrong = []
    for template in HOSTILE:
        answer = template.replace("{}", reference)
        for response in (f"so #### {answer}", f"####{answer}", f"#### {answer} eggs\nDone.", f"The answer is {answer}"):
            found = gsm8k.score(response, truth)
            # Where no mark is there the last number counts: `18 = 19` says 19, and `19. Or 18` says 18.
            numeric = found.parts["numeric"] if "####" in response else 0.0
            if found.total or numeric:
                wrong.append(response)
    assert wrong == []


@pytest.mark.parametrize("reference", REFERENCES)
def test_gsm8k_takes_the_number_with_what_may_stand_around_it(reference):
    truth = {"answer": reference}
    for template in HARMLESS:
        answer = template.replace("{}", reference)
        for response in (f"3 * 6, so #### {answer}", f"####{answer}", f"The answer is {answer}", f"9 + 9 = {answer}"):
            assert gsm8k.score_numeric(response, truth).total == 1.0, response
    for response in (f"#### {reference}", f"#### {reference} dollars", f"#### {reference}\nQ: 5 + 3 = ?"):
        assert gsm8k.score(response, truth).total == 1.0, response


def test_what_the_strict_reading_takes_the_field_takes_too():
    bodies = [template.replace("{}", "18") for template in (*HOSTILE, *HARMLESS)]
    marks = ("#### {}", "####{}", "#### 5 #### {}", "#### {} #### x", "#### {}" + " and more" * 40, "{}")
    answers = [mark.replace("{}", body) for mark, body in itertools.product(marks, bodies)]
    taken = [answer for answer in answers if gsm8k.score(answer, {"answer": "18"}).total]
    assert len(taken) >= 6
    assert all(published_strict(answer, "18") for answer in taken)


@pytest.mark.parametrize(
    "answer",
    [
        "#### 18 or 19", "#### 18/19", "#### 18e5", "#### 18*10", "#### 18 million", "#### 1,8",
        "#### 19 #### 18 #### x", "#### " + "1" * 40 + "18", "#### 5." + "0" * 20 + "18", "#### \\frac{18}{19}",
        "#### \\frac{1}{18}",
    ],
)
def test_gsm8k_answers_that_were_taken_for_18(answer):
    for scorer in (gsm8k.score, gsm8k.score_numeric):
        assert scorer(answer, {"answer": "18"}).total == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "18/19 or 1/18", "it costs 18 million", "it is .18", "\u221218", "it is 17\u201318", "17 or 18", "10 * 18",
        "it is not 18", "1,18", "9 - 18", "x = - 18", "1" * 299 + "18", "9" * 400 + "18" + " " * 298, "\\frac{1}{18}",
        "18k",
    ],
)
def test_a_part_of_another_number_is_no_answer(text):
    assert gsm8k.score_numeric(text, {"answer": "18"}).total == 0.0


def mathematics(answer: str, reference: str = "18") -> float:
    return math.score(answer, {"answer": reference}).total


@pytest.mark.parametrize("wrapper", ["\\boxed{{}}", "The answer is {}", "{}", "${}$"])
def test_math_takes_no_answer_that_says_another_number(wrapper):
    answers = [wrapper.replace("{}", template.replace("{}", "18")) for template in HOSTILE]
    assert [answer for answer in answers if mathematics(answer)] == []


@pytest.mark.parametrize(
    "answer",
    [
        "The answer is 18. No, 19.", "\\boxed{19=18}", "\\boxed{\\neg 18}", "\\boxed{\\not 18}",
        "\\boxed{\\approx 18}", "\\boxed{\\foo 18}", "\\boxed{18_8}", "\\boxed{18'}", "\\boxed{18\\text{ million}}",
        "\\boxed{18\\text{ is wrong}}", "\\boxed{\\text{not }18}", "\\boxed{x=19=18}", "\\boxed{x=19, x=18}",
        "\\boxed{> 18}", "\\boxed{\\le 18}", "\\boxed{x \\ne 18}", "\\boxed{9+9}", "\\boxed{2\\cdot 9}",
        "\\boxed{18*1}", "\\boxed{\\frac{36}{2}}", "\\boxed{36/2}", "\\boxed{\\sqrt{324}}", "\\boxed{18",
        "\\boxed{18} or \\boxed{19}", "$18$ or $19$", "It is 18\nor 19", "The answer is not 18",
    ],
)
def test_math_answers_that_math_verify_takes_for_18(answer):
    assert mathematics(answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("18", "18"), ("x = 18", "18"), ("9+9=18", "18"), ("\\boxed{9+9=18}", "18"), ("\\boxed{f(2)=18}", "18"),
        ("\\boxed{18.0}", "18"), ("**Answer:** 18", "18"), ("The answer is 18 dollars.", "18"),
        ("The final answer is $18$. I hope it is correct.", "18"), ("\\boxed{18\\text{ dollars}}", "18"),
        ("\\boxed{18 dollars}", "18"), ("\\boxed{\\$18}", "18"), ("\\boxed{18^\\circ}", "18"),
        ("\\boxed{18\\%}", "18\\%"), ("\\[ \\boxed{18} \\]", "18"), ("first \\boxed{3}, then \\boxed{18}", "18"),
        ("\\boxed{1{,}000}", "1000"), ("\\boxed{10,\\!000}", "10000"), ("\\boxed{-\\frac{1}{2}}", "-0.5"),
        ("\\boxed{\\frac{2}{4}}", "\\frac12"), ("\\boxed{3,2}", "2,3"),
        ("\\boxed{3\\text{ or }5}", "3 \\text{ or } 5"), ("\\boxed{\\text{Monday}}", "\\text{Monday}"),
        ("\\boxed{y = 2x+1}", "2x+1"), ("\\boxed{1011_2}", "1011_2"), ("\\boxed{10^6}", "10^6"),
        ("\\boxed{x>3}", "x>3"), ("\\boxed{(-\\infty,3)\\cup(3,\\infty)}", "(-\\infty,3)\\cup(3,\\infty)"),
        ("\\boxed{\\text{(A)}}", "A"), ("\\boxed{ab}", "ab"),
        ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("1/2", "\\frac12"),
    ],
)
def test_math_takes_what_says_the_reference(answer, reference):
    assert mathematics(answer, reference) == 1.0


COUNTDOWN = {"target": 10, "numbers": [2, 3, 8]}


@pytest.mark.parametrize("form", ["tags", "first", "bare"])
def test_countdown_takes_nothing_but_the_numbers_once_and_the_target(form):
    right = "(8 - 3) * 2"
    truth = COUNTDOWN if form == "tags" else {**COUNTDOWN, "form": form}
    hostile = [
        f"{right} = 10", f"{right} or 8", f"{right}, 8 + 2", f"{right} {right}", f"({right}", f"{right})",
        f"-{right}", f"+{right}", "(8 \u2212 3) * 2", "(8 - 3) \u00d7 2", "(8 - 3)2", "2(8 - 3)", "(8 - 3) ** 2",
        "8 // 3 * 2", "(8 - 03) * 2", "(8.0 - 3) * 2", "10", "8 + 2", "8 + 2 + 3 - 3", "8 + 2 * 3 / 3", "82 - 3",
        "1" * 2_000, f"{right} # 10", f"{right}\u00a0", "(\u0668 - 3) * 2", "8 + 2 + 0 * 3", "8 + 3 - 1",
        "2 * 8 - 3 * 2", f"{right} <answer>", f"{right} + 3 / (8 - 8)", "8e0 + 2", "8 % 3 + 8",
    ]
    wrap = "{}" if form == "bare" else "so <answer> {} </answer>"
    assert countdown.score(wrap.format(right), truth).total == 1.0
    assert [text for text in hostile if countdown.score(wrap.format(text), truth).total == 1.0] == []
    assert countdown.score(right if form != "bare" else f"<answer> {right} </answer>", truth).total == 0.0


def test_sort_digits_takes_single_digits_in_order_alone():
    truth = {"digits": "1 4 4 7"}
    hostile = [
        "1447", "1 4 47", "1 4 7 4", "1 4 4 7 7", "1 4 4", "1 4 4 7.", "1, 4, 4, 7", "[1 4 4 7]", "01 4 4 7",
        "1 4 4 +7", "\uff11 4 4 7", "1 4 4 7\u00b2", "", "7 4 4 1 = 1 4 4 7",
    ]
    assert [text for text in hostile if sort_digits.score(text, truth).total] == []
    assert sort_digits.score(" 1 4\n4 7 ", truth).total == sort_digits.score("1 4 4 7", truth).total == 1.0
