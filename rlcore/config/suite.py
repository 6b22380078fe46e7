"""Files of settings: their content, and that of suites in place of their names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlcore.config.base import FILE_ENDINGS, expanded
from rlcore.config.problems import Findings, Problem, did_you_mean

SUITES_DIR = Path(__file__).resolve().parents[2] / "conf" / "suite"
SUITES = "validation.suites"


def content_of(file: Path) -> dict[str, Any] | str:
    """Keys and values of a YAML file, as OmegaConf reads them; or why there are none."""
    try:
        if not file.exists():
            return "there is no such file"
        if not file.is_file():
            return "must be a regular file"
        with file.open(encoding="utf-8") as opened:
            content = OmegaConf.to_container(OmegaConf.load(opened))
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        return f"cannot be read ({' '.join(str(error).split())})"
    if not content or not isinstance(content, dict):
        return "its file must hold keys and values"
    return {str(name): value for name, value in content.items()}


def put_suites(settings: dict[str, Any], findings: Findings) -> None:
    """Put the content of the files that `validation.suites` names in place of their names, in nested plain settings."""
    named = suites_in(settings)
    if any(isinstance(entry, str) for entry in named):
        settings["validation"]["suites"] = read_suites(named, findings)


def suites_in(settings: Mapping[str, Any]) -> list[Any]:
    """The value of `validation.suites` in nested plain settings; empty where it is no list."""
    section = settings.get("validation")
    named = section.get("suites") if isinstance(section, dict) else None
    return named if isinstance(named, list) else []


def read_suites(named: Sequence[Any], findings: Findings) -> list[Any]:
    """The content of the files that are named, as plain values; what is no name stays as it is."""
    found = [_read(entry) if isinstance(entry, str) else entry for entry in named]
    for problem in found:
        if isinstance(problem, Problem):
            findings.add(problem, SUITES)
    return [entry for entry in found if not isinstance(entry, Problem)]


def _read(name: str) -> dict[str, Any] | Problem:
    """The content of a suite's file, whose `name` is the file's unless it gives another; or why there is none."""
    is_path = name.endswith(FILE_ENDINGS)
    file = expanded(name) if is_path else SUITES_DIR / f"{name}.yaml"
    if not is_path and name not in (names := sorted(each.stem for each in SUITES_DIR.glob("*.yaml"))):
        remedy = f"{did_you_mean(name, names)}There are {', '.join(names)}; a path ends in .yaml"
        return Problem(SUITES, "must name files in conf/suite, or paths", name, remedy)
    content = content_of(file)
    if isinstance(content, str):
        got = name if Path(name).is_absolute() else f"{name} in {Path.cwd()}"
        return Problem(SUITES, content, got, "conf/suite/gsm8k.yaml shows the form")
    return {"name": file.stem, **content}
