"""The command `millrace new KIND NAME`, which writes a working example of a custom file, or a new project's folder."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows import SOURCE_FOLDER
from rlcore.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")
"""The folder of templates. For a task or an environment, a module of `data/` is copied instead of a template."""
Kind = Literal["task", "scorer", "loss", "advantage", "environment", "experiment", "suite", "sweep", "slurm", "project"]
COMMANDS: dict[Kind, str] = {
    "task": "millrace run experiment=debug data=custom data.build={name}:build data.scorer={name}:score",
    "scorer": "millrace run experiment=debug data.scorer={name}:score",
    "loss": "millrace run experiment=debug algo.policy_loss={name}:loss",
    "advantage": "millrace run experiment=debug algo.advantage={name}:advantage",
    "environment": "millrace run experiment=number_guessing data.build={name}:build data.environment={name}:Game",
    "experiment": "millrace run experiment={name}.yaml",
    "suite": "millrace run experiment=debug validation.suites=[{name}.yaml]",
    "sweep": "millrace sweep {name}.yaml",
    "slurm": "sbatch {name}.sbatch",
    "project": "make run",
}
"""The command that runs the written file, for each kind of file."""
SUFFIXES = {"experiment": ".yaml", "suite": ".yaml", "sweep": ".yaml", "slurm": ".sbatch", "project": ""}
"""The suffix of the written file, for each kind whose suffix is not `.py`."""
COPIED = {"task": "sort_digits", "environment": "number_guessing"}  # modules of `data/`
PROJECT = {
    "Makefile": "Makefile", "README.md": "README.md", "gitignore": ".gitignore",
    "conf/experiment/baseline.yaml": "conf/experiment/baseline.yaml", "conf/data/task.yaml": "conf/data/NAME.yaml",
    "conf/sweep/lr.yaml": "conf/sweep/lr.yaml", "tests/test_task.py": "tests/test_NAME.py",
}  # fmt: skip
"""The path of the written file in the project's folder, for each template of a project."""


def new(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What to write.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the file without its suffix, or of the folder.")],
) -> None:
    """Write a first custom file, or a project's folder, into the working directory. The written files run unchanged.

    Examples:
      millrace new task my_task
      millrace new experiment mine
      millrace new project my_research
    """
    target = Path(f"{name}{SUFFIXES.get(kind, '.py')}")
    _require_free(name, target, is_module=target.suffix in ("", ".py"))
    if kind == "project":
        for template, path in PROJECT.items():
            text = (TEMPLATES / "project" / template).read_text(encoding="utf-8")
            _write(target / path.replace("NAME", name), text.replace("NAME", name))
        _write(target / f"{name}.py", _text("task", name, COMMANDS["project"], ".py"))
        print(f"{target.absolute()} is written; it runs unchanged:\n  cd {name} && git init && {COMMANDS['project']}")
        return
    command = COMMANDS[kind].format(name=name)
    _write(target, _text(kind, name, command, target.suffix))
    print(f"{target.absolute()} is written; it runs unchanged:\n  {command}")


def _text(kind: Kind, name: str, command: str, suffix: str) -> str:
    if kind not in COPIED:
        text = (TEMPLATES / f"{kind}{suffix}").read_text(encoding="utf-8")
        return text.replace("COMMAND", command).replace("NAME", name)
    source = (SOURCE_FOLDER / "data" / f"{COPIED[kind]}.py").read_text(encoding="utf-8")
    head, docstring, code = source.split('"""', 2)
    first_line = docstring.partition("\n")[0]
    return f'{head}"""{first_line}\n\n    {command}\n"""{code}'.replace(f'"{COPIED[kind]}"', f'"{name}"')


def _write(file: Path, text: str) -> None:
    from rlcore.storage.publish import write_text_atomically

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, text)


def _require_free(name: str, target: Path, *, is_module: bool) -> None:
    if is_module:
        pattern, letters, first = r"[a-z][a-z0-9_]{0,63}", "small letters, digits and _", "a letter"
    else:
        pattern, letters, first = r"[a-z0-9][a-z0-9_-]{0,63}", "small letters, digits, _ and -", "a letter or digit"
    if not re.fullmatch(pattern, name):
        raise ConfigError(f"NAME: must be {letters}, at most 64, and begin with {first}; got {name!r}")
    if keyword.iskeyword(name):
        raise ConfigError(f"NAME: must not be a Python keyword; got {name!r}. Choose another, such as my_{name}")
    if target.exists():
        raise ConfigError(f"NAME: {target.absolute()} exists already. Choose another name, or remove it")
    if is_module and find_spec(name) is not None:
        raise ConfigError(f"NAME: must not be an existing module; got {name}. Choose another, such as my_{name}")
