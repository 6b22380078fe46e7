"""The countdown task: reach a target by an equation that uses each number exactly once.

With the template `bare`, the whole response is the equation. With `few-shot`, the equation is in the first pair
`<answer>...</answer>`, because a base model continues with further problems. With any other template, the equation is
in the last pair.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from data.arithmetic import evaluate
from data.rows import Message, Row, TaskRows
from rlcore.score import Score

if TYPE_CHECKING:
    from data.countdown_problems import Problem
    from rlcore.config.data import CountdownData

VERSION = 1  # increase it when the same settings give different rows
WELL_FORMED_SCORE = 0.1
_OPEN, _CLOSE = "<answer>", "</answer>"

_TASK = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "({operations}) and each number can only be used once. Show your work in <think> </think> tags. And return the "
    "final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
_BASE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant first works it out in the "
    f"mind and then gives the answer.\nUser: {_TASK}\nAssistant: Let me solve this step by step.\n<think>"
)
_QWEN_INSTRUCT = (
    "<|im_start|>system\nYou are a helpful assistant. You work the problem out in the mind before you answer."
    f"<|im_end|>\n<|im_start|>user\n{_TASK}<|im_end|>\n"
    "<|im_start|>assistant\nLet me solve this step by step.\n<think>"
)
_FEW_SHOT = (
    "Reach the target with the numbers, each used exactly once, and the operations {operations}.\n\n"
    "Numbers: 3, 5, 8\nTarget: 16\nAnswer: <answer> 3 + 5 + 8 </answer>\n\n"
    "Numbers: 20, 4, 9\nTarget: 15\nAnswer: <answer> 20 - 9 + 4 </answer>\n\n"
    "Numbers: 7, 30, 12\nTarget: 25\nAnswer: <answer> 30 - 12 + 7 </answer>\n\n"
    "Numbers: {listed}\nTarget: {target}\nAnswer:"
)
# The scratch tokenizer has one token for each integer and each sign.
_BARE = "{spaced} : {target} ="
_TEMPLATES = {"bare": _BARE, "base": _BASE, "qwen-instruct": _QWEN_INSTRUCT, "chat": _TASK, "few-shot": _FEW_SHOT}
_SOLUTIONS = {
    "bare": "{equation}",
    "base": " {work} </think>\n<answer> {equation} </answer>",
    "qwen-instruct": " {work} </think>\n<answer> {equation} </answer>",
    "chat": "<think> {work} </think>\n<answer> {equation} </answer>",
    "few-shot": " <answer> {equation} </answer>",
}
_FORMS = {"bare": "bare", "few-shot": "first"}


def build(settings: "CountdownData", seed: int) -> TaskRows:
    """Build the rows of both splits. The same settings and seed always give the same rows.

    Raises DataError if the settings allow too few problems."""
    from data.countdown_problems import generate

    return TaskRows(
        data_source="countdown",
        ability="math",
        prompt_form="chat" if settings.template == "chat" else "text",
        splits={split: _rows(settings, problems, seed) for split, problems in generate(settings, seed).items()},
    )


def inputs(settings: "CountdownData") -> Mapping[str, str]:
    """Return an empty dict, because the rows have no input files."""
    return {}


def _rows(settings: "CountdownData", problems: "Iterable[Problem]", seed: int) -> Iterator[Row]:
    for problem in problems:
        numbers = problem.numbers
        content = _TEMPLATES[settings.template].format(
            numbers=list(numbers),
            listed=", ".join(map(str, numbers)),
            spaced=" ".join(map(str, numbers)),
            target=problem.target,
            operations=", ".join(settings.operations),
        )
        ground_truth: dict[str, str | int | float | list[int]] = {"target": problem.target, "numbers": list(numbers)}
        if settings.template in _FORMS:
            ground_truth["form"] = _FORMS[settings.template]
        yield Row(
            prompt=(Message("user", content),),
            ground_truth=ground_truth,
            difficulty=problem.difficulty,
            solution=_solution(settings, problem, problem.solution, seed),
            distractor=_solution(settings, problem, problem.distractor, seed) if problem.distractor else "",
        )


def _solution(settings: "CountdownData", problem: "Problem", equation: str, seed: int) -> str:
    """Return a response whose answer is `equation`. If the template has a `<think>` section, this section shows the
    equation's value. If `data.search_tries` is set, the section instead shows failed tries and then the steps of the
    equation.
    """
    last = evaluate(equation)
    assert last is not None
    if settings.search_tries is None:
        work = f"{equation} = {last.value}"
    else:
        tries = problem.wrong_tries(settings.search_tries, settings.operations, seed)
        wrong = [one for one in map(evaluate, tries) if one is not None]
        work = "".join(f"{one.solution_steps()}, no\n" for one in wrong) + last.solution_steps()
    return _SOLUTIONS[settings.template].format(work=work, equation=equation)


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response. The part `format` is 1 if the answer is one well-formed expression."""
    form, target, numbers = (ground_truth.get(name) for name in ("form", "target", "numbers"))
    if not isinstance(target, int | float) or not isinstance(numbers, Sequence):
        raise TypeError(f"the ground truth of countdown is {{target, numbers}}, got {str(dict(ground_truth))[:100]}")
    equation = response if form == "bare" else tagged_answer(response, first=form == "first")
    expression = None if equation is None else evaluate(equation)
    vote = None if equation is None else "".join(equation.split())
    if expression is None:
        return Score(0.0, {"correct": 0.0, "format": 0.0}, vote)
    if expression.value == target and sorted(expression.numbers) == sorted(numbers):
        return Score(1.0, {"correct": 1.0, "format": 1.0}, vote)
    return Score(0.0 if form == "bare" else WELL_FORMED_SCORE, {"correct": 0.0, "format": 1.0}, vote)


def tagged_answer(response: str, *, first: bool = False) -> str | None:
    """Return the text inside the last complete `<answer>` pair, or None if there is no such pair.

    With `first`, return the text inside the first complete pair instead. The time is linear in the response's length.
    """
    close = response.find(_CLOSE, max(response.find(_OPEN), 0)) if first else response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, max(close, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return response[start : response.find(_CLOSE, start)]
