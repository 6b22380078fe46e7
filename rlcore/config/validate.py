"""From nested plain values to a `RunConfig`, or to every mistake in them."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlcore.config.data import DATA_SECTIONS, CountdownData
from rlcore.config.keys import all_keys, leaves, section_names
from rlcore.config.problems import Problem, did_you_mean, nearest, shown
from rlcore.config.rules import broken_rules
from rlcore.config.run import RunConfig

TASKS = {section.model_fields["task"].default: section for section in DATA_SECTIONS}
"""Each task's section by the task's name."""


@dataclass
class Findings:
    """What is wrong so far. Rules that read an `unsound` key or section are not judged."""

    problems: list[Problem] = field(default_factory=list)
    unsound: set[str] = field(default_factory=set)

    def add(self, problem: Problem, *unsound: str) -> None:
        """Note a problem, and which keys have no trustworthy value because of it."""
        if problem not in self.problems:
            self.problems.append(problem)
        self.unsound.update(unsound or (problem.key,))


def validate(settings: Mapping[str, Any], findings: Findings, texts: Mapping[str, str]) -> RunConfig:
    """Check keys, types, ranges and rules. Every mistake goes to `findings`; wrong values are left out of the result.

    Args:
        settings: nested plain values.
        findings: what is wrong already; receives what is found.
        texts: dotted key -> how its value was written, for keys given as overrides.
    """
    config = _typed(deepcopy(dict(settings)), findings, texts)
    for problem in broken_rules(config, findings.unsound):
        findings.add(problem)
    return config


def _typed(settings: dict[str, Any], findings: Findings, texts: Mapping[str, str]) -> RunConfig:
    """The settings without what is wrong in them. Each round takes out at least one wrong value, so it ends."""
    while True:
        try:
            # Strict JSON: true is no number and "5" is none either, but 1 is a fine float and a list a fine tuple.
            return RunConfig.model_validate_json(json.dumps(settings), strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                _settle(detail, settings, findings, texts)


def _settle(detail: ErrorDetails, settings: dict[str, Any], findings: Findings, texts: Mapping[str, str]) -> None:
    parts = _path(detail)
    key = ".".join(parts)
    value = detail["input"]
    if detail["type"] == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        # A name made of digits reads as a number; as it was written it is a fine string.
        _put(settings, parts, texts.get(key, str(value)))
        return
    if inside := _inside_list(detail, parts):
        rule, got = detail["msg"].replace("Input should be", "must be"), shown(value)
        if detail["type"] == "extra_forbidden":
            rule = "there is no such setting"
        findings.add(Problem(key, f"{inside}: {rule}", got, _described(key)))
    elif detail["type"] == "extra_forbidden":
        for name, inner in leaves({key: value}).items():
            _add_unknown(name, inner, settings, findings, in_files=not _is_written(name, texts))
    else:
        findings.add(_wrong_value(key, detail))
    _take_out(settings, parts)


def _path(detail: ErrorDetails) -> list[str]:
    """The settings' path to a mistake: pydantic puts a union's tag and a list's index into it, which name no key."""
    loc = list(detail["loc"])
    if loc[0] == "data" and len(loc) > 1 and loc[1] in TASKS:
        del loc[1]
    parts: list[str] = []
    for part in loc:
        if isinstance(part, int) or ".".join(parts) in all_keys().keys() - {"tags"}:
            break
        parts.append(part)
    return parts


def _inside_list(detail: ErrorDetails, parts: list[str]) -> str:
    """Where in a list of sections a mistake is, '' where it is in none: `entry 0: data.train_size`."""
    rest = [part for part in detail["loc"] if part not in TASKS][len(parts) :]
    if len(rest) < 2 or not isinstance(rest[0], int):
        return ""
    return f"entry {rest[0]}: {'.'.join(map(str, rest[1:]))}"


def _add_unknown(name: str, value: Any, settings: Mapping[str, Any], findings: Findings, *, in_files: bool) -> None:
    got = shown(value) + (" from a settings file" if in_files else "")
    owners = [task for task, section in TASKS.items() if name.removeprefix("data.") in section.model_fields]
    if name.startswith("data.") and owners:
        task = settings["data"].get("task", CountdownData().task)
        rule = f"is a setting of task {' or '.join(owners)}, and the task is {task}"
        findings.add(Problem(name, rule, got, f"Leave it out, or add data={owners[0]}"))
        return
    proposal = nearest(name, all_keys())
    remedy = f"Did you mean {proposal}?" if proposal else "docs/settings.md lists every key"
    # What was meant by the wrong key is not known, so rules about the right one would mislead.
    findings.add(Problem(name, "there is no such setting", got, remedy), name, *([proposal] if proposal else []))


def _wrong_value(key: str, detail: ErrorDetails) -> Problem:
    value = detail["input"]
    rule = detail["msg"].replace("Input should be", "must be").replace("String should", "must")
    if detail["type"] in ("model_type", "model_attributes_type", "union_tag_invalid", "dict_type"):
        inside = sorted(name for name in all_keys() if name.startswith(f"{key}."))
        hint = f"such as {inside[0]}" if inside else "such as tags.owner=me"
        return Problem(key, "is a section, not a value", shown(value), f"Set one of its keys, {hint}")
    remedy = ""
    if detail["type"] == "literal_error":
        expected = detail.get("ctx", {}).get("expected", "")
        if isinstance(value, bool) and "'off'" in expected:
            remedy = "In YAML write it in quotes: 'off' without them is the boolean false. "
        else:
            remedy = did_you_mean(str(value), expected.replace("'", "").replace(" or ", ", ").split(", "))
    return Problem(key, rule, shown(value), (remedy + _described(key)).strip())


def _described(key: str) -> str:
    keys = all_keys().get(key)
    if not keys:
        return f"docs/settings.md describes {key if key in section_names() else 'every key'}"
    field_info = keys[0].field
    default = shown(field_info.get_default(call_default_factory=True, validated_data={}))
    return f"{(field_info.description or '').rstrip('.').replace(chr(10), ' ')} (default {default})"


def _is_written(name: str, texts: Mapping[str, str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in texts)


def _put(settings: dict[str, Any], parts: list[str], value: Any) -> None:
    *outer, last = parts
    for part in outer:
        settings = settings[part]
    settings[last] = value


def _take_out(settings: dict[str, Any], parts: list[str]) -> None:
    *outer, last = parts
    for part in outer:
        settings = settings.get(part, {})
    settings.pop(last, None)
