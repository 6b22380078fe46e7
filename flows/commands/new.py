"""The command `millrace new task|experiment|scorer NAME`, which writes a first custom file that runs unchanged."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flows.commands import complete
from rlcore.errors import ConfigError

SCORER = '''"""A scorer: countdown's, with the length of the response as one more part.

    {command}

A part is a metric (`reward/short/mean`) and does not change the reward, which is `total`. docs/data.md describes what
a scorer may return. Model output is untrusted: parse it, never evaluate it.
"""

from collections.abc import Mapping

from data.countdown import score as score_countdown
from rlcore.score import Score

_SHORT = 20


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score one response: any text, also an empty one."""
    score = score_countdown(response, ground_truth)
    is_short = float(len(response) <= _SHORT)
    return Score(score.total, {{**score.parts, "short": is_short}}, score.said)
'''
EXPERIMENT = """# {command}
# The differences from the base experiment; docs/settings.md lists every key.
defaults: [countdown_demo, _self_]
name: "{name}"
optim:
  lr: 1e-4
trainer:
  total_steps: 40
"""
TASK = '''"""A task in one file: products of two numbers.

    {command}

`build` makes the rows, `score` scores a response; docs/data.md walks through both.
"""
'''
COMMANDS = {
    "task": "millrace run experiment=debug data=custom data.build={name}:build data.scorer={name}:score",
    "experiment": "millrace run experiment={name}.yaml",
    "scorer": "millrace run experiment=debug data.scorer={name}:score",
}
"""The command that runs the new file, by kind of file."""


def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="task|experiment|scorer",
            help="The kind of file.",
            autocompletion=complete.choices("task", "experiment", "scorer"),
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="File name without its suffix.")],
) -> None:
    """Write a first task, experiment or scorer into this folder. The file runs unchanged.

    Examples:
      millrace new task my_task
      millrace new experiment mine

    Raises:
        ConfigError: if the kind is unknown, the name is invalid, or the file already exists.
    """
    from rlcore.storage.publish import write_text_atomically

    if kind not in COMMANDS:
        raise ConfigError(f"KIND: must be one of {', '.join(COMMANDS)}; got {kind}")
    file = Path(f"{name}.yaml" if kind == "experiment" else f"{name}.py")
    _require_free(kind, name, file)
    command = COMMANDS[kind].format(name=name)
    text = {"task": TASK, "experiment": EXPERIMENT, "scorer": SCORER}[kind].format(command=command, name=name)
    if kind == "task":
        from data import multiplication

        source = Path(multiplication.__file__).read_text(encoding="utf-8")
        text += source.split('"""', 2)[2].removeprefix("\n").replace('"multiplication"', f'"{name}"')
    write_text_atomically(file, text)
    print(f"{file.absolute()} is written; it runs unchanged:\n  {command}")


def _require_free(kind: str, name: str, file: Path) -> None:
    if kind == "experiment":
        pattern, letters, first = r"[a-z0-9][a-z0-9_-]{0,63}", "small letters, digits, _ and -", "a letter or digit"
    else:
        pattern, letters, first = r"[a-z][a-z0-9_]{0,63}", "small letters, digits and _", "a letter"
    if not re.fullmatch(pattern, name):
        raise ConfigError(f"NAME: must be {letters}, at most 64, and begin with {first}; got {name!r}")
    if keyword.iskeyword(name):
        raise ConfigError(f"NAME: must not be a Python keyword; got {name!r}. Choose another, such as my_{name}")
    if file.exists():
        raise ConfigError(f"NAME: {file.absolute()} exists already. Choose another name, or remove the file")
    if kind != "experiment" and find_spec(name) is not None:
        raise ConfigError(f"NAME: must not be an existing module; got {name}. Choose another, such as my_{name}")
