"""From composed settings and value overrides to a `RunConfig`, or to every mistake in them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlcore.config.base import covers, leaves
from rlcore.config.data import TASKS, CountdownData
from rlcore.config.problems import Findings, Problem, did_you_mean, nearest, settings_error, shown
from rlcore.config.rules import broken_rules
from rlcore.config.run import RunConfig, all_keys, free_mappings, section_names
from rlcore.config.suite import SUITES, suites_in

NULLABLE_SECTIONS = ("critic", "model.lora")
"""Sections that `null` switches off."""


@dataclass(frozen=True, slots=True)
class Written:
    """An override of one value: its dotted key, the value, its text, and whether the key is deleted."""

    key: str
    value: Any
    text: str
    delete: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted keys of the values that it gives."""
        return tuple(leaves({self.key: self.value}))


# ---------------------------------------------------------------------- overrides over composed settings


def put(settings: dict[str, Any], written: Written, findings: Findings) -> None:
    """Put one override into nested plain settings, in place. Unknown keys are found later, by `validate`."""
    key, value = written.key, written.value
    sets_section = key in section_names() and not written.delete and not isinstance(value, dict)
    if sets_section and not (value is None and key in NULLABLE_SECTIONS):
        inside = next(name for name in sorted(all_keys()) if name.startswith(f"{key}."))
        findings.add(Problem(key, "is a section, not a value", shown(value), f"Set one of its keys, such as {inside}"))
        return
    *outer, last = key.split(".")
    inner = settings
    for part in outer:
        if inner.get(part) is None:
            inner[part] = {}
        inner = inner[part]
        if not isinstance(inner, dict):
            rule = f"there is no such setting: {part} is a value, not a section"
            findings.add(Problem(key, rule, shown(value), "docs/settings.md lists every key"))
            return
    if written.delete and last not in inner:
        rule = "there is nothing of that name to delete"
        findings.add(Problem(key, rule, f"~{key}", did_you_mean(key, all_keys()).strip()))
    elif written.delete:
        inner.pop(last)
    elif isinstance(value, dict) and isinstance(inner.get(last), dict):
        inner[last] = _merged(inner[last], value)
    else:
        inner[last] = value


def _merged(settings: Any, more: Any) -> Any:
    if not (isinstance(settings, dict) and isinstance(more, dict)):
        return more
    return settings | {name: _merged(settings.get(name), value) for name, value in more.items()}


def filled_in(settings: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The settings with every `${...}` replaced by its value. One that cannot be read, or points nowhere, is a problem,
    and the value that it stands in is left out."""
    if not any(_to_fill(settings)):
        return settings

    def keep(check: Callable[[tuple[str, ...], Any], object]) -> None:
        for path, value in list(_to_fill(settings)):
            try:
                check(path, value)
            except OmegaConfBaseException as error:
                rule = f"cannot be filled in ({str(error).splitlines()[0]})"
                key = ".".join(map(str, path))
                findings.add(Problem(key, rule, shown(value), "Name a setting that exists, or write a value"))
                _section_at(settings, path).pop(path[-1], None)

    keep(lambda _, value: OmegaConf.create([value]))
    tree = OmegaConf.create(settings)
    keep(lambda path, _: _filled(tree, path))
    return as_plain(OmegaConf.create(settings), resolve=True)


def _to_fill(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of each `${...}` and `???`. No dotted key: a name of `free_mappings` may have a dot itself."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _to_fill(value, (*above, name))
        elif "${" in str(value) or value == "???":
            yield (*above, name), value


def _filled(tree: Any, path: Sequence[str]) -> None:
    """Raise OmegaConfBaseException where the value at a path, or one in it, cannot be filled in."""
    for name in path:
        tree = tree[name]
    if OmegaConf.is_config(tree):
        OmegaConf.to_container(tree, resolve=True)


def as_plain(tree: Any, *, resolve: bool = False) -> dict[str, Any]:
    """OmegaConf's settings as plain values; with `resolve` every `${...}` is replaced by its value."""
    found = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


# ---------------------------------------------------------------------- keys, types, ranges and rules


def validate(settings: dict[str, Any], findings: Findings, texts: Mapping[str, str]) -> RunConfig:
    """Check keys, types, ranges and rules. Every mistake goes to `findings`; wrong values are taken out of `settings`.

    `texts`: by its dotted key, the text of each number that an override gives, and '' for any other value.
    """
    config = _typed(settings, findings, texts)
    for problem in broken_rules(config, findings.unsound):
        findings.add(problem)
    return config


def _typed(settings: dict[str, Any], findings: Findings, texts: Mapping[str, str]) -> RunConfig:
    """The settings without their mistakes: wrong values are removed until the rest is right.

    Raises:
        ConfigError: some of the values that are wrong cannot be removed.
    """
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in suites_in(settings)]
    suites = [name if isinstance(name, str) else "" for name in names]
    while True:
        text = json.dumps(settings)
        try:
            # Strict JSON: neither true nor "5" is a number, but 1 is a float and a list is a tuple.
            return RunConfig.model_validate_json(text, strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                _settle(detail, settings, findings, texts, suites)
        if json.dumps(settings) == text:
            raise settings_error(findings.problems)


def _settle(
    detail: ErrorDetails, settings: dict[str, Any], findings: Findings, texts: Mapping[str, str], suites: Sequence[str]
) -> None:
    parts = _path(detail)
    key = ".".join(parts)
    value = detail["input"]
    if ".".join(parts[:-1]) in free_mappings() and detail["loc"][-3:-1] == tuple(parts[-2:]):
        # pydantic has a mistake for each type that the value may have; as problems they are equal, and so one.
        rule = "must be true or false, a finite number or a text"
        findings.add(Problem(key, rule, shown(value), _described(".".join(parts[:-1]))))
    elif detail["type"] == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        # A name made of digits is parsed as a number; its text is the string that was meant.
        _put_text(settings, detail["loc"], texts.get(key) or str(value))
        return
    elif inside := _inside_list(detail, parts, suites if key == SUITES else ()):
        rule, remedy = rule_of(detail), _described(key)
        if detail["type"] == "extra_forbidden":
            rule = "there is no such setting"
            remedy = did_you_mean(str(detail["loc"][-1]), _siblings(detail, key)) or remedy
        findings.add(Problem(key, f"{inside}: {rule}", shown(value), remedy.strip()))
    elif detail["type"] == "extra_forbidden":
        for name, inner in leaves({key: value}).items():
            is_written = any(covers(given, name) or covers(name, given) for given in texts)
            _add_unknown(name, inner, settings, findings, in_files=not is_written)
    else:
        findings.add(_wrong_value(key, detail))
    _section_at(settings, parts).pop(parts[-1], None)


def _put_text(settings: Any, loc: Sequence[int | str], text: str) -> None:
    """Put a text where pydantic's path leads in nested plain settings, which lack the tags of unions."""
    *outer, last = loc
    for part in outer:
        if not isinstance(settings, dict) or part in settings:
            settings = settings[part]
    settings[last] = text


def _path(detail: ErrorDetails) -> list[str]:
    """Dotted path of a mistake. pydantic's has unions' tags and members and a list's index too, which are in no key."""
    loc = list(detail["loc"])
    if loc[0] == "data" and len(loc) > 1 and loc[1] in TASKS:
        del loc[1]
    parts: list[str] = []
    for part in loc:
        is_whole = ".".join(parts) in all_keys().keys() - free_mappings() or ".".join(parts[:-1]) in free_mappings()
        if isinstance(part, int) or is_whole:
            break
        parts.append(part)
    return parts


def _inside_list(detail: ErrorDetails, parts: list[str], names: Sequence[str]) -> str:
    """Place of a mistake in a list of sections: `entry 0: data.train_size`, or by a name; '' outside of one."""
    rest = [part for part in detail["loc"] if part not in TASKS][len(parts) :]
    if not rest or not isinstance(rest[0], int) or (len(rest) == 1 and detail["type"] != "model_type"):
        return ""
    entry = (names[rest[0]] if names else "") or f"entry {rest[0]}"
    return ": ".join([entry, *([".".join(map(str, rest[1:]))] if rest[1:] else [])])


def _siblings(detail: ErrorDetails, key: str) -> Iterable[str]:
    """Names of the section in a list, or of its task's settings, that an unknown name stands among."""
    above = detail["loc"][-2]
    if above in TASKS:
        return TASKS[str(above)].model_fields
    section = get_args(all_keys()[key][0].annotation)[0]
    return section.model_fields if isinstance(above, int) else ()


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
    # The value that the right key should have is not known, so rules about it would mislead.
    findings.add(Problem(name, "there is no such setting", got, remedy), name, *([proposal] if proposal else []))


def _wrong_value(key: str, detail: ErrorDetails) -> Problem:
    value = detail["input"]
    if detail["type"] in ("model_type", "model_attributes_type", "union_tag_invalid", "dict_type"):
        inside = sorted(name for name in all_keys() if name.startswith(f"{key}."))
        hint = f"such as {inside[0] if inside else f'{key}.name=value'}"
        return Problem(key, "is a section, not a value", shown(value), f"Set one of its keys, {hint}")
    remedy = ""
    if detail["type"] == "literal_error":
        expected = detail.get("ctx", {}).get("expected", "")
        if isinstance(value, bool) and "'off'" in expected:
            remedy = "In YAML write it in quotes: 'off' without them is the boolean false. "
        else:
            remedy = did_you_mean(str(value), expected.replace("'", "").replace(" or ", ", ").split(", "))
    return Problem(key, rule_of(detail), shown(value), (remedy + _described(key)).strip())


def rule_of(detail: ErrorDetails) -> str:
    """The rule that a value breaks, in our words."""
    told = detail["msg"].removeprefix("Value error, ")
    return told.replace("Input should be", "must be").replace("String should", "must")


def _described(key: str) -> str:
    if key not in all_keys():
        return f"docs/settings.md describes {key if key in section_names() else 'every key'}"
    field_info = all_keys()[key][0]
    default = shown(field_info.get_default(call_default_factory=True, validated_data={}))
    return f"{(field_info.description or '').rstrip('.').replace(chr(10), ' ')} (default {default})"


def _section_at(settings: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The nested mapping that holds the last part; an empty one where it was removed before."""
    for part in parts[:-1]:
        settings = settings.get(part, {})
    return settings
