"""Reading the files of experiments and suites, reporting wrong settings, and checking the rules for each dataset."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic_core import ErrorDetails
from yaml import YAMLError

from rlcore.config.base import (
    FILE_ENDINGS,
    GROUPS,
    broken_rules,
    covers,
    expand_path,
    group_members,
    keys_of,
    leaves,
    member_file,
)
from rlcore.config.data import TASKS, CountdownData, FilterConfig, MappedData, MixtureData, ParquetData, TaskData
from rlcore.config.model import WarmStartConfig
from rlcore.config.problems import Findings, Problem, did_you_mean, foreign_key_hint, format_value, nearest
from rlcore.config.rollout import EpisodeConfig, SuiteConfig, ValidationConfig
from rlcore.config.run import RunConfig, all_keys, free_mappings, section_names

SUITES = "validation.suites"


def remove_value(settings: Any, path: Sequence[int | str]) -> Any:
    """Remove the value at this path from nested dictionaries. Return the value, or None if there is none."""
    *outer, last = path
    for part in outer:
        settings = settings.get(part, {})
    return settings.pop(last, None)


def as_plain(tree: Any, *, resolve: bool = False) -> dict[str, Any]:
    """Return OmegaConf's settings as nested dictionaries. If `resolve` is true, replace every `${...}` by its value."""
    found = OmegaConf.to_container(tree, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def error_path(detail: ErrorDetails, content: Any) -> tuple[int | str, ...]:
    """Return the keys and indices that lead to the value of a pydantic error in `content`. The path in the error can
    also contain names of union members, which are left out."""
    path: list[int | str] = []
    for part in detail["loc"]:
        if part in (content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()):
            content = content[part]
            path.append(part)
    return (*path, detail["loc"][-1]) if detail["type"] == "missing" else tuple(path)


def report_error(
    detail: ErrorDetails, given: Any, settings: dict[str, Any], findings: Findings, texts: Mapping[str, str]
) -> None:
    """Report a pydantic error in `findings`, and remove the wrong value from `settings`. If the value is a number where
    a string is required, convert the number to a string instead. `texts` maps each key that an override sets to its
    number as the user wrote it, or to '' if the value is not a number."""
    path = error_path(detail, given)
    at = next((number for number, part in enumerate(path) if isinstance(part, int)), len(path))
    key, inside = ".".join(map(str, path[:at])), path[at:]
    value, outer = detail["input"], key.rpartition(".")[0]
    values_of_outer = get_args(all_keys()[outer][0].annotation)[1] if outer in free_mappings() else None
    if isinstance(values_of_outer, UnionType):
        # pydantic reports a mistake for each type of the union. As problems they are equal.
        rule = "must be true or false, a finite number or a text"
        findings.add(Problem(key, rule, format_value(value), _describe(outer)))
    elif detail["type"] == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        # A name of digits is parsed as a number. Its text is the intended string.
        inner: Any = settings if error_path(detail, settings) == path else given
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = texts.get(key) or str(value)
        return
    elif len(inside) > 1 or (inside and detail["type"] == "model_type"):
        findings.add(_list_problem(key, inside, detail, given))
    elif detail["type"] == "extra_forbidden":
        for name, inner in leaves({key: value}).items():
            is_written = any(covers(written, name) or covers(name, written) for written in texts)
            _add_unknown(name, inner, settings, findings, in_files=not is_written)
    else:
        findings.add(_value_problem(key, detail, findings))
    remove_value(settings, path[:at])


def _list_problem(key: str, inside: Sequence[int | str], detail: ErrorDetails, given: Any) -> Problem:
    index, *rest = inside
    suite = suites_in(given)[int(index)] if key == SUITES else None
    name = suite.get("name") if isinstance(suite, dict) else None
    entry = name if isinstance(name, str) and name else f"entry {index}"
    wrong = ".".join(map(str, rest))
    rule, remedy = rule_text(detail), _describe(key)
    if detail["type"] == "extra_forbidden":
        (section,) = get_args(all_keys()[key][0].annotation)[:1]
        known = [each for each, _ in keys_of(section)]
        is_of_other_task = wrong in known
        rule = "the suite's task has no such setting" if is_of_other_task else "there is no such setting"
        remedy = "Leave it out" if is_of_other_task else did_you_mean(wrong, known).strip() or remedy
    return Problem(key, ": ".join([entry, *([wrong] if wrong else []), rule]), format_value(detail["input"]), remedy)


def _add_unknown(name: str, value: Any, settings: Mapping[str, Any], findings: Findings, *, in_files: bool) -> None:
    file = findings.sources.get(name) or findings.sources.get(name.partition(".")[0], "a settings file")
    got = format_value(value) + (f" from {file}" if in_files else "")
    owners = [task for task, section in TASKS.items() if name.removeprefix("data.") in section.model_fields]
    if name.startswith("data.") and owners:
        task = settings["data"].get("task", CountdownData().task)
        rule = f"is a setting of task {' or '.join(owners)}, and the task is {task}"
        findings.add(Problem(name, rule, got, f"Leave it out, or add data={owners[0]}"))
        return
    hint, proposal = foreign_key_hint(name), nearest(name, all_keys())
    if hint and proposal and not proposal.endswith(f".{name}"):
        proposal = None
    remedy = f"Did you mean {proposal}?" if proposal else hint or "docs/settings.md lists every key"
    # The value of the right key is unknown, so rules about it would mislead.
    findings.add(Problem(name, "there is no such setting", got, remedy), name, *([proposal] if proposal else []))


def _value_problem(key: str, detail: ErrorDetails, findings: Findings) -> Problem:
    value = detail["input"]
    if detail["type"] in ("model_type", "model_attributes_type", "union_tag_invalid", "dict_type"):
        inside = sorted(name for name in all_keys() if name.startswith(f"{key}."))
        hint = f"such as {inside[0] if inside else f'{key}.name=value'}"
        return Problem(key, "is a section, not a value", format_value(value), f"Set one of its keys, {hint}")
    remedy = ""
    if detail["type"] == "literal_error":
        expected = detail.get("ctx", {}).get("expected", "")
        if isinstance(value, bool) and "'off'" in expected:
            remedy = "In YAML write it in quotes: 'off' without them is the boolean false. "
        else:
            remedy = did_you_mean(str(value), expected.replace("'", "").replace(" or ", ", ").split(", "))
    source, before = findings.sources.get(key), findings.values.get(key)
    in_file = f", in {source} {format_value(before)}" if source and before != value else ""
    task = str(findings.values.get("data.task", ""))
    return Problem(key, rule_text(detail), format_value(value), (remedy + _describe(key, in_file, task)).strip())


def rule_text(detail: ErrorDetails) -> str:
    """Return the text of a pydantic error in the wording of Millrace's messages, such as `must be greater than 0`."""
    text = detail["msg"].removeprefix("Value error, ")
    return text.replace("Input should be", "must be").replace("String should", "must")


def _describe(key: str, in_file: str = "", task: str = "") -> str:
    if key not in all_keys():
        return f"docs/settings.md describes {key if key in section_names() else 'every key'}"
    field_info = all_keys()[key][0]
    if key.startswith("data.") and task in TASKS:
        field_info = TASKS[task].model_fields.get(key.removeprefix("data."), field_info)
    default = format_value(field_info.get_default(call_default_factory=True, validated_data={}))
    return f"{(field_info.description or '').rstrip('.').replace(chr(10), ' ')} (default {default}{in_file})"


def read_yaml(file: Path) -> dict[str, Any] | str:
    """Read a YAML file with OmegaConf. Return the keys and values in the file, or an error message."""
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


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """One file of an experiment. `members`: the group options that this file and its base files choose."""

    name: str
    keys: Mapping[str, Any]
    members: Mapping[str, str]


def experiment_files(named: str, findings: Findings, above: tuple[Path, ...] = ()) -> list[SettingsFile]:
    """Return the files of an experiment, base files first. If a file has a problem, the problem is added to `findings`,
    and all settings are marked as unreliable, so that the rules between settings are not checked."""

    def wrong(rule: str, got: str, remedy: str) -> None:
        findings.add(Problem("experiment", rule, got, remedy), *RunConfig.model_fields)

    is_path = named.endswith(FILE_ENDINGS)
    path = Path(named) if is_path else member_file("experiment", named)
    content = "builds on itself" if path.resolve() in above else read_yaml(path)
    if isinstance(content, str):
        names = ", ".join(group_members("experiment"))
        similar = {file.stem: file.name for file in path.parent.glob("*.y*ml")} if is_path and not path.exists() else {}
        near = nearest(path.stem, similar)
        remedy = f"Did you mean {similar[near]}? " if near else ""
        remedy += f"Fix it, or name one of {names}; conf/experiment/debug.yaml shows the form"
        wrong(content, f"{named} in {Path.cwd()}" if is_path and not path.is_absolute() else named, remedy)
        return []
    entries = content.pop("defaults", [])
    if not isinstance(entries, list):
        wrong("its defaults must be a list", f"{format_value(entries)} in {named}", "Such as [debug, _self_]")
        entries = []
    bases = [str(entry) for entry in entries if not isinstance(entry, dict)]
    if "_self_" in bases[:-1]:
        later = " and ".join(bases[bases.index("_self_") + 1 :])
        rule = "_self_ must be the last of its defaults: the keys of a file override those of the files it builds on"
        wrong(rule, f"_self_ before {later} in {named}", f"Put _self_ behind {later}")
    chosen = [(str(key).removeprefix("override ").removeprefix("/"), member)
              for entry in entries if isinstance(entry, dict) for key, member in entry.items()]  # fmt: skip
    files: list[SettingsFile] = []
    members: dict[str, str] = {}
    for group, member in [*(("experiment", base) for base in bases if base != "_self_"), *chosen]:
        if group == "experiment" and member.endswith(FILE_ENDINGS):
            member = str((path.parent / member).resolve())
        elif (known := unknown_member_remedy(group, member)) is not None:
            wrong("its defaults must name files in conf/", f"{group}/{member} in {named}", known)
            continue
        if group != "experiment":
            members[group] = member
        elif base := experiment_files(member, findings, (*above, path.resolve())):
            files += [file for file in base if file not in files]
            members |= base[-1].members
    return [*files, SettingsFile(str(path) if is_path else f"experiment/{named}.yaml", content, members)]


def unknown_member_remedy(group: str, member: Any) -> str | None:
    """Return None if the group has this option, otherwise a remedy with the nearest option and all known options."""
    groups = ("experiment", *GROUPS)
    if group not in groups:
        return f"{did_you_mean(group, groups)}There are {', '.join(groups)}"
    members = group_members(group)
    if member in members:
        return None
    is_here = Path("conf", group, f"{member}.yaml").is_file()
    hint = (
        f"Add --config-dir conf, which has {group}/{member}.yaml. " if is_here else did_you_mean(str(member), members)
    )
    return f"{hint}There are {', '.join(members)}"


def suites_in(settings: Mapping[str, Any]) -> list[Any]:
    """Return the list `validation.suites` in nested dictionaries, or an empty list if the value is not a list."""
    section = settings.get("validation")
    named = section.get("suites") if isinstance(section, dict) else None
    return named if isinstance(named, list) else []


def read_suites(named: Sequence[Any], findings: Findings) -> list[Any]:
    """Return the entries of `named`. An entry that is a suite's name or path is replaced by the content of the suite's
    file. Files that cannot be read are reported in `findings`."""
    found = [_read(entry) if isinstance(entry, str) else entry for entry in named]
    for problem in found:
        if isinstance(problem, Problem):
            findings.add(problem, SUITES)
    return [entry for entry in found if not isinstance(entry, Problem)]


def _read(entry: str) -> dict[str, Any] | Problem:
    """Return the content of a suite's file, or a problem. `entry`: a path, NAME, or NAME=SOURCE. SOURCE replaces
    `data.source` of the suite NAME."""
    is_path = entry.endswith(FILE_ENDINGS)
    name, _, source = (entry, "", "") if is_path else entry.partition("=")
    file = expand_path(name) if is_path else member_file("suite", name)
    if not is_path and name not in (names := group_members("suite")):
        remedy = f"{did_you_mean(name, names)}There are {', '.join(names)}; a path ends in .yaml"
        return Problem(SUITES, "must name files in conf/suite, or paths", name, remedy)
    content = read_yaml(file)
    if isinstance(content, str):
        got = name if Path(name).is_absolute() else f"{name} in {Path.cwd()}"
        return Problem(SUITES, content, got, "conf/suite/gsm8k.yaml shows the form")
    if source and isinstance(content.get("data"), dict):
        content["data"]["source"] = source
    return {"name": file.stem, **content}


def suite_settings(config: RunConfig, suite: SuiteConfig) -> RunConfig:
    """Return a run's settings, in which the data, seed, lengths and sampling are replaced by those of a suite."""
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
        changes["episode"] = EpisodeConfig()  # its tools need an environment
    return config.model_copy(update=changes)


def _held_out_only(data: TaskData) -> TaskData:
    if isinstance(data, ParquetData):
        return data.model_copy(update={"train_file": data.validation_file})
    if isinstance(data, MappedData):
        return data.model_copy(update={"train_split": data.validation_split})
    return data


def find_problems(run: RunConfig, unsound: Collection[str] = ()) -> list[Problem]:
    """Return a problem for each broken rule. Each dataset of a mixture and each suite is also checked alone.
    A rule is skipped if it reads a key or section in `unsound`."""
    found = broken_rules(run, unsound)
    for key, name, alone in _single_datasets(run):
        if not any(covers(key, each) or covers(each, key) for each in unsound):
            found += [replace(each, key=key, rule=f"{name}: {each.key} {each.rule}")
                      for each in broken_rules(alone, unsound) if each not in found]  # fmt: skip
    return found


def _single_datasets(run: RunConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """Yield the key and name of each dataset in a mixture and of each suite, with settings for only this dataset."""
    for index, part in enumerate(run.data.parts if isinstance(run.data, MixtureData) else ()):
        yield "data.parts", f"entry {index} ({part.data.task})", run.model_copy(update={"data": part.data})
    for suite in run.validation.suites:  # the warm start learns from the run's own data
        trainer = run.trainer.model_copy(update={"total_steps": run.total_steps})
        alone = suite_settings(run, suite).model_copy(update={"warm_start": WarmStartConfig(), "trainer": trainer})
        yield "validation.suites", suite.name, alone
