"""The settings as text: complete YAML, the file of an experiment, and the reference page docs/settings.md."""

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from rlcore.config.base import CONF_DIR, EXCLUSIVE_GROUPS, GROUPS, Bound, Section, group_members, sections_of, value_at
from rlcore.config.problems import format_value
from rlcore.config.run import RunConfig

REFERENCE_FILE = CONF_DIR.parent / "docs" / "settings.md"
NOT_WRITTEN = {"run_id", "tags", "paths", "tracking"}
"""The settings that belong to one run or one machine. They are not written to an experiment's file."""


def to_yaml(config: Section | dict[str, Any] | list[Any]) -> str:
    """Return the settings of a run or section, or a part of them, as YAML that YAML 1.1 parsers and OmegaConf read."""
    plain = config.model_dump(mode="json") if isinstance(config, Section) else config
    return yaml.safe_dump(plain, sort_keys=False, width=120, default_flow_style=False)


def experiment_text(config: RunConfig, comment: str) -> str:
    """Return an experiment's file that produces these settings, except the settings in `NOT_WRITTEN`. The file begins
    with `comment` as a YAML comment."""
    members = {"data": config.data.task, "critic": "default" if config.critic else "none"}
    base = RunConfig.model_validate({"data": {"task": config.data.task}, "critic": {} if config.critic else None})
    document: dict[str, Any] = {"defaults": [{f"override /{group}": member} for group, member in members.items()]}
    document |= _differences(config.model_dump(mode="json", exclude=NOT_WRITTEN), base.model_dump(mode="json"))
    lines = [f"# {line}" for line in comment.splitlines()]
    return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, width=120)])


def _differences(settings: Any, base: Any) -> Any:
    if not (isinstance(settings, dict) and isinstance(base, dict)):
        return settings
    return {key: _differences(value, base.get(key)) for key, value in settings.items() if value != base.get(key, ...)}


_INTRODUCTION = """\
<!-- Generated from rlcore/config by `make generated`. -->
# Settings

This page lists the type, range, default and meaning of every setting of a run. An override is written `key=value`, as
in `millrace run experiment=countdown_demo trainer.total_steps=40 'tags.note="a b"'`. Write a list as `[a,b]`, a mapping
as `{a: 1, b: 2}` and an empty value as `null`. `--cfg job` prints all settings of an experiment. Settings that
contradict each other, unknown keys and values out of range are reported together, before anything is loaded. The rules
are declared with the settings in `rlcore/config/`.
"""


def reference() -> str:
    """Return the Markdown text of docs/settings.md: the type, range, default and meaning of every setting."""
    return "\n".join([_INTRODUCTION, *_groups(), *_section("", RunConfig, "The run itself")])


def _groups() -> Iterator[str]:
    yield "## Groups\n"
    yield "An override such as `algo=ppo` chooses a member of a group, which sets many keys together."
    yield "Each member is a file in `conf/<group>/`.\n"
    yield "| group | members | default |"
    yield "| --- | --- | --- |"
    for group, default in sorted(GROUPS.items()):
        yield f"| `{group}` | {', '.join(f'`{member}`' for member in group_members(group))} | `{default}` |"
    exclusive = " or ".join(f"`{group}`" for group in EXCLUSIVE_GROUPS)
    yield f"\nIf you choose another member of the group {exclusive},"
    yield "the values that the experiment's file sets in the section of this group are ignored.\n"


def _section(name: str, section: type[Section], title: str = "") -> Iterator[str]:
    plain = {key: field for key, field in section.model_fields.items() if not sections_of(field.annotation)}
    yield f"## {title or f'`{name}`'}\n"
    if name:
        yield f"{inspect.getdoc(section)}\n"
    if plain:
        yield "| key | type | default | meaning |"
        yield "| --- | --- | --- | --- |"
        for key, field in plain.items():
            yield _row(f"{name}.{key}".lstrip("."), field)
        yield ""
    for key, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        for member in inner:
            dotted = f"{name}.{key}".lstrip(".")
            title = f"`{dotted}` with `{key}={member.model_fields['task'].default}`" if len(inner) > 1 else ""
            if field.default is None:
                title = f"`{dotted}` (null unless chosen)"
            yield from _section(dotted, member, title)


def _row(key: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    default = "required" if field.is_required() else f"`{format_value(value)}`".replace("\n", r"\n")
    meaning = " ".join((field.description or "").split())
    cells = (f"`{key}`", _values_text(field), default, meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values_text(field: FieldInfo) -> str:
    """Return the type of a setting, its range, and its bounds by other settings.

    >>> _values_text(FieldInfo(annotation=int | None, ge=1, lt=9))
    'whole number, >= 1 and < 9, or null'
    """
    is_union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    text = " or ".join(_type_text(kind) for kind in kinds if kind is not NoneType)
    # pydantic keeps the pattern in a private class
    text += "".join(f" that matches `{rule.pattern}`" for rule in field.metadata if hasattr(rule, "pattern"))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{signs[name]} {getattr(rule, name)}" for rule in field.metadata for name in signs if hasattr(rule, name)
    ]
    text += f", {' and '.join(limits)}" if limits else ""
    text += ", or null" if NoneType in kinds else ""
    return "; ".join([text, *(_bound_text(rule) for rule in field.metadata if isinstance(rule, Bound))])


def _bound_text(bound: Bound) -> str:
    others = " ".join(f"`{word}`" if "." in word else word for word in bound.others.split())
    if not bound.only_with:
        return f"must {bound.words} {others}"
    is_on = "true" if isinstance(value_at(RunConfig(), bound.only_with), bool) else "not 0"
    return f"must {bound.words} {others} if `{bound.only_with}` is {is_on}"


def _type_text(annotation: Any) -> str:
    words = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    if annotation in words:
        return words[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        *others, last = (f"`{part}`" for part in parts)
        return f"{', '.join(others)} or {last}" if others else f"always {last}"
    if origin is tuple and parts[-1] is not ...:
        return f"list of {len(parts)} {_type_text(parts[0])}s"
    if origin is tuple and get_origin(parts[0]) is Literal:
        return f"list with any of {', '.join(f'`{part}`' for part in get_args(parts[0]))}"
    if origin is tuple:
        return f"list of {_type_text(parts[0])}"
    if origin is dict:
        values = {float: "numbers", str: "texts"}.get(parts[1], "values, each a number, a text, true or false")
        return f"mapping from names to {values}"
    assert issubclass(annotation, Section), annotation
    return f"sections with keys among {', '.join(f'`{name}`' for name in annotation.model_fields)}"


if __name__ == "__main__":
    REFERENCE_FILE.write_text(reference(), encoding="utf-8")
    print(REFERENCE_FILE.relative_to(CONF_DIR.parent))
