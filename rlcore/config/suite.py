"""Files of settings, suites among them; a run's settings with one suite, and the problems of all of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlcore.config.base import FILE_ENDINGS, covers, expand_path
from rlcore.config.data import FilterConfig, MappedData, MixtureData, ParquetData, TaskData
from rlcore.config.model import WarmStartConfig
from rlcore.config.problems import Findings, Problem, did_you_mean
from rlcore.config.rollout import EpisodeConfig, SuiteConfig, ValidationConfig
from rlcore.config.rules import broken_rules
from rlcore.config.run import RunConfig

SUITES_DIR = Path(__file__).resolve().parents[2] / "conf" / "suite"
SUITES = "validation.suites"


def read_yaml(file: Path) -> dict[str, Any] | str:
    """Return the keys and values of a YAML file, as OmegaConf reads them, or an error message."""
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


def resolve_suites(settings: dict[str, Any], findings: Findings) -> None:
    """Replace the file names in `validation.suites` by the files' content, in nested plain settings."""
    named = suites_in(settings)
    if any(isinstance(entry, str) for entry in named):
        settings["validation"]["suites"] = read_suites(named, findings)


def suites_in(settings: Mapping[str, Any]) -> list[Any]:
    """Return the value of `validation.suites` in nested plain settings, empty if it is no list."""
    section = settings.get("validation")
    named = section.get("suites") if isinstance(section, dict) else None
    return named if isinstance(named, list) else []


def read_suites(named: Sequence[Any], findings: Findings) -> list[Any]:
    """Return the content of the named files as plain values. Entries that are no names stay."""
    found = [_read(entry) if isinstance(entry, str) else entry for entry in named]
    for problem in found:
        if isinstance(problem, Problem):
            findings.add(problem, SUITES)
    return [entry for entry in found if not isinstance(entry, Problem)]


def _read(name: str) -> dict[str, Any] | Problem:
    """Return a suite file's content, with the file's name as the default of `name`, or a problem."""
    is_path = name.endswith(FILE_ENDINGS)
    file = expand_path(name) if is_path else SUITES_DIR / f"{name}.yaml"
    if not is_path and name not in (names := sorted(each.stem for each in SUITES_DIR.glob("*.yaml"))):
        remedy = f"{did_you_mean(name, names)}There are {', '.join(names)}; a path ends in .yaml"
        return Problem(SUITES, "must name files in conf/suite, or paths", name, remedy)
    content = read_yaml(file)
    if isinstance(content, str):
        got = name if Path(name).is_absolute() else f"{name} in {Path.cwd()}"
        return Problem(SUITES, content, got, "conf/suite/gsm8k.yaml shows the form")
    return {"name": file.stem, **content}


def suite_settings(config: RunConfig, suite: SuiteConfig) -> RunConfig:
    """Return a run's settings with the suite's data, seed, lengths and sampling. Its seed fixes both the rows and the
    sampled tokens."""
    prompt_tokens = suite.max_prompt_tokens or config.filter.max_prompt_tokens
    response_tokens = suite.max_response_tokens or config.rollout.max_response_tokens
    changes: dict[str, Any] = {
        "data": _held_out_only(suite.data).model_copy(update={"seed": suite.seed}),
        "seed": suite.seed,
        "filter": FilterConfig(max_prompt_tokens=prompt_tokens, duplicates="keep"),
        "rollout": config.rollout.model_copy(update={"max_response_tokens": response_tokens}),
        "validation": ValidationConfig(**dict(suite.evaluation)),
    }
    if not suite.data.environment:
        changes["episode"] = EpisodeConfig()  # its tools are shown where there is an environment to call them
    return config.model_copy(update=changes)


def _held_out_only(data: TaskData) -> TaskData:
    """Return a task's settings whose training rows, which are not read, need not exist."""
    if isinstance(data, ParquetData):
        return data.model_copy(update={"train_file": data.validation_file})
    if isinstance(data, MappedData):
        return data.model_copy(update={"train_split": data.validation_split})
    return data


def find_problems(run: RunConfig, unsound: Collection[str] = ()) -> list[Problem]:
    """Return every broken rule of a run, and of each of its datasets and suites as if it were the only one.

    Rules that read a key or section named in `unreliable` are skipped.
    """
    found = broken_rules(run, unsound)
    for key, name, alone in _single_datasets(run):
        if not any(covers(key, each) or covers(each, key) for each in unsound):
            found += [replace(each, key=key, rule=f"{name}: {each.key} {each.rule}")
                      for each in broken_rules(alone, unsound) if each not in found]  # fmt: skip
    return found


def _single_datasets(run: RunConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """Yield the key, the name and the settings of each dataset of a mixture and each suite as the only one."""
    for index, part in enumerate(run.data.parts if isinstance(run.data, MixtureData) else ()):
        yield "data.parts", f"entry {index} ({part.data.task})", run.model_copy(update={"data": part.data})
    for suite in run.validation.suites:  # the warm start learns from the run's own data
        alone = suite_settings(run, suite).model_copy(update={"warm_start": WarmStartConfig()})
        yield "validation.suites", suite.name, alone
