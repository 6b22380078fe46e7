"""Programming problems with tests, read from jsonl files. The program of a response runs in the sandbox.

Each line of `train.jsonl` and `test.jsonl` has a `question`, `tests`, and optionally a `solution`. A test has one of
two forms. An object such as `{"stdin": "3 4", "stdout": "7"}` gives the input and the expected output of the program. A
test that is a text is Python code, which runs after the program in the same process. Problems in the form of HumanEval
have `prompt`, `test` and `entry_point` instead.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from data.records import Record, records
from data.rows import Message, Row, TaskRows
from rlcore.config.data import CustomData
from rlcore.errors import DataError
from rlcore.sandbox import ProgramResult, current_limits
from rlcore.sandbox import run_python as run_in_sandbox
from rlcore.score import Score

_INSTRUCTION = "Answer with one Python program in a block that begins with ```python and ends with ```."
_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)
_BROKEN = re.compile(r"^(SyntaxError|IndentationError|TabError): ", re.MULTILINE)
_CONTINUES = re.compile(r"[\r\n]*(?: {2}|\t)")
_AFTER_THE_FUNCTION = re.compile(r"\n(?:class|def|#|if|print|@|```)")  # the usual stop sequences of HumanEval
_SPLITS = {"train": "train", "validation": "test"}


def build(settings: CustomData, seed: int) -> TaskRows:
    """Return the first `data.train_size` and `data.validation_size` problems. Raises DataError if a line is invalid."""
    if len(settings.options) != 1:
        raise DataError(f"data.options: must name the folder of train.jsonl and test.jsonl; got {settings.options}")
    most = {"train": settings.train_size, "validation": settings.validation_size}
    return TaskRows(
        data_source="code",
        ability="code",
        prompt_form="chat",
        splits={split: _rows(settings.options[0], name, most[split]) for split, name in _SPLITS.items()},
    )


def _rows(folder: str, name: str, most: int) -> Iterator[Row]:
    for number, record in enumerate(records(folder, name)):
        if number == most:
            return
        solution = record.values.get("solution")
        yield Row(
            prompt=(Message("user", f"{record.text('question')}\n\n{_INSTRUCTION}"),),
            ground_truth={"tests": json.dumps(_read_tests(record))},
            solution=f"```python\n{solution}\n```" if solution else "",
            where=record.where,
        )


def _read_tests(record: Record) -> list[Any]:
    tests = record.values.get("tests")
    if isinstance(tests, list) and tests and all(map(_is_test, tests)):
        return tests
    raise DataError(
        f'{record.where}: tests: must be a list of {{"stdin": ..., "stdout": ...}} or of texts with Python; got '
        f"{json.dumps(tests)[:200]}; repair or remove the line"
    )


def _is_test(test: object) -> bool:
    if isinstance(test, str):
        return bool(test.strip())
    return isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("stdin", "stdout"))


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by the share of tests that its program passes. All tests of a response share the time limit
    `sandbox.time_s`. The part `compiles` of the score is 0 after a syntax error."""
    if "entry_point" in ground_truth:
        program = _completed(str(ground_truth["prompt"]), response, str(ground_truth["entry_point"]))
        tests = [f"{ground_truth['test']}\ncheck({ground_truth['entry_point']})"]
    else:
        program, tests = program_of(response), json.loads(str(ground_truth["tests"]))
    passed, until = 0, time.monotonic() + current_limits().time_s
    compiles: bool | None = None  # None: not known yet
    for test in tests:
        if (left := until - time.monotonic()) <= 0:
            break
        is_passed, ran = _run_test(program, test, left)
        passed += is_passed
        if not is_passed and compiles is None and _BROKEN.search(ran.stderr):  # in the program or in evaluated text
            compiles = _compiles(program, until - time.monotonic())
        if compiles is False:
            break  # the other tests cannot pass either
    return Score(passed / len(tests), {"passed": float(passed == len(tests)), "compiles": float(compiles is not False)})


def program_of(response: str) -> str:
    """Return the last code block of a response, or the whole response if it has no code block."""
    found = _BLOCK.findall(response)
    return str(found[-1]) if found else response


def _completed(prompt: str, response: str, entry_point: str) -> str:
    """Append a response to a prompt that begins a function. The response continues the function (indented) or defines
    the whole function again."""
    if not _CONTINUES.match(response):
        definition = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)
        blocks = _BLOCK.findall(response) or [response]
        response = next(filter(definition.search, reversed(blocks)), blocks[-1])
    if _CONTINUES.match(response):
        response = _AFTER_THE_FUNCTION.split(response.lstrip("\r\n"), maxsplit=1)[0]
    return f"{prompt.rstrip()}\n{response}"


def _compiles(program: str, time_s: float) -> bool:
    ran = run_in_sandbox(f"compile({program!r}, 'program', 'exec')", "", time_s)
    return ran.stop_reason != "" or ran.code == 0


def _run_test(program: str, test: str | Mapping[str, str], time_s: float) -> tuple[bool, ProgramResult]:
    if isinstance(test, str):
        word = secrets.token_hex(8)
        both = f"_word = input()\nexec(compile({program!r}, 'program', 'exec'))\n{test}\nprint(chr(10) + _word)\n"
        ran = run_in_sandbox(both, word, time_s)
        return ran.stop_reason == "" and ran.code == 0 and ran.stdout.endswith(f"\n{word}\n"), ran
    ran = run_in_sandbox(program, test["stdin"], time_s)
    return ran.stop_reason == "" and ran.code == 0 and _lines(ran.stdout) == _lines(test["stdout"]), ran


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_python(program: str) -> str:
    """Run a Python program without network or files, and read what it prints.

    Args:
        program: The whole program. It has to print its result."""
    ran = run_in_sandbox(program)
    if ran.stop_reason == "time":
        return f"{ran.stdout}\nerror: the program was ended after its time"
    problem = ran.stderr.strip().splitlines()[-1:] if ran.code else []
    return "\n".join([ran.stdout.rstrip(), *problem]).strip()
