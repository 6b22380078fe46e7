"""The countdown task: reach a target from given numbers, each used exactly once.

Rows, prompts and scorer. With tags (every template but `bare`) the equation stands between `<answer>` and
`</answer>`; text around it is free, and text without tags scores 0. The last finished pair counts; after a few-shot
prompt the first, since a base model goes on with problems of its own. In the `bare` template, meant for small models
made from nothing, the whole answer is the equation. Rows of these two templates are marked (`form` in the
ground truth), so a dataset cannot meet the wrong scorer.

    tags   1.0 correct, 0.1 one well-formed expression that is wrong (value, or numbers not used exactly once), else 0
    bare   1.0 correct, else 0
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from data.arithmetic import evaluate
from data.rows import Message, Row, TaskRows
from rlcore.score import Score

if TYPE_CHECKING:
    from data.countdown_problems import Problem
    from rlcore.config.data import CountdownData

VERSION = 1
"""Raise it when the rows of equal settings change."""
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
# Only symbols of the tokenizer made from nothing: each integer and each sign is one token.
_BARE = "{spaced} : {target} ="

_TEMPLATES = {"bare": _BARE, "base": _BASE, "qwen-instruct": _QWEN_INSTRUCT, "chat": _TASK, "few-shot": _FEW_SHOT}
CALCULATOR = "data.calculator:Countdown"
"""The environment whose turns a solution in the `bare` template shows."""
COMPUTED = "> {value} ="
"""What that environment replies to an equation."""
TURN_END = "<eos>"
"""How a turn ends in the text of a solution: the end token of the tokenizer made from nothing."""
# A whole answer, as it would go on from the prompt.
_ANSWERS = {
    "bare": "{work}{equation}",
    "base": " {work} </think>\n<answer> {equation} </answer>",
    "qwen-instruct": " {work} </think>\n<answer> {equation} </answer>",
    "chat": "<think> {work} </think>\n<answer> {equation} </answer>",
    "few-shot": " <answer> {equation} </answer>",
}

_FORMS = {"bare": "bare", "few-shot": "first"}


def build(settings: "CountdownData", seed: int) -> TaskRows:
    """The task's rows; the seed fixes every byte. Raises DataError where the settings allow too few problems."""
    from data.countdown_problems import generate

    problems = generate(settings, seed)
    return TaskRows(
        data_source="countdown",
        ability="math",
        prompt_form="chat" if settings.template == "chat" else "text",
        splits={split: _rows(settings, found, seed) for split, found in problems.items()},
    )


def inputs(settings: "CountdownData") -> Mapping[str, str]:
    """No files: every row is drawn."""
    return {}


def _rows(settings: "CountdownData", problems: "Iterable[Problem]", seed: int) -> Iterator[Row]:
    template = _TEMPLATES[settings.template]
    operations = ", ".join(settings.operations)
    for problem in problems:
        numbers = problem.numbers
        content = template.format(
            numbers=list(numbers),
            listed=", ".join(map(str, numbers)),
            spaced=" ".join(map(str, numbers)),
            target=problem.target,
            operations=operations,
        )
        ground_truth: dict[str, str | int | float | list[int]] = {"target": problem.target, "numbers": list(numbers)}
        if settings.template in _FORMS:
            ground_truth["form"] = _FORMS[settings.template]
        yield Row(
            prompt=(Message("user", content),),
            ground_truth=ground_truth,
            difficulty=problem.difficulty,
            solution=_answer(settings, problem, problem.solution, seed),
            distractor=_answer(settings, problem, problem.distractor, seed) if problem.distractor else "",
        )


def _answer(settings: "CountdownData", problem: "Problem", equation: str, seed: int) -> str:
    work = _work(settings, problem, equation, seed)
    return _ANSWERS[settings.template].format(work=work, equation=equation)


def _work(settings: "CountdownData", problem: "Problem", equation: str, seed: int) -> str:
    """What a solution shows before its answer: the value alone, or a search that ends at the equation. In the `bare`
    template nothing, or the turns of an episode with a calculator: an equation, the end of a turn, the reply.
    """
    last = evaluate(equation)
    assert last is not None
    tries = (
        [] if settings.search_tries is None else problem.wrong_tries(settings.search_tries, settings.operations, seed)
    )
    wrong = [(text, one) for text, one in zip(tries, map(evaluate, tries), strict=True) if one is not None]
    if settings.template == "bare":
        shown = wrong if settings.environment == CALCULATOR else []
        return "".join(f"{text} {TURN_END} {COMPUTED.format(value=one.value)} " for text, one in shown)
    if settings.search_tries is None:
        return f"{equation} = {last.value}"
    return "".join(f"{one.solution_steps()}, no\n" for _, one in wrong) + last.solution_steps()


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score an answer text. Parts: `correct` and `format` (one well-formed expression), each 0 or 1.

    Bounded in time and memory by the length of the text: exact arithmetic on a parsed expression.

    >>> score("so <answer> (8 - 3) * 2 </answer>", {"target": 10, "numbers": [2, 3, 8]}).total
    1.0
    >>> score("so <answer> 8 - 3 </answer>", {"target": 10, "numbers": [2, 3, 8]}).total
    0.1
    """
    form, target, numbers = (ground_truth.get(name) for name in ("form", "target", "numbers"))
    if not isinstance(target, int | float) or not isinstance(numbers, Sequence):
        raise TypeError(f"the ground truth of countdown is {{target, numbers}}, got {str(dict(ground_truth))[:100]}")
    bare = form == "bare"
    equation = response if bare else tagged_answer(response, first=form == "first")
    expression = None if equation is None else evaluate(equation)
    said = None if equation is None else "".join(equation.split())
    if expression is None:
        return Score(0.0, {"correct": 0.0, "format": 0.0}, said)
    if expression.value == target and sorted(expression.numbers) == sorted(numbers):
        return Score(1.0, {"correct": 1.0, "format": 1.0}, said)
    return Score(0.0 if bare else WELL_FORMED_SCORE, {"correct": 0.0, "format": 1.0}, said)


def tagged_answer(response: str, *, first: bool = False) -> str | None:
    """Text of the last (or first) finished `<answer>` pair, None without one. Linear in the length of the text.

    >>> tagged_answer("<answer> 1 </answer> no, <answer> 2 </answer> or <answer> 3")
    ' 2 '
    """
    close = response.find(_CLOSE, max(response.find(_OPEN), 0)) if first else response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, max(close, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return response[start : response.find(_CLOSE, start)]
