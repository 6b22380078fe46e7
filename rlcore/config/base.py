"""The base class of all sections of settings, dotted keys, and rules between settings.

The annotation of a setting can contain a limit of its value (`Bound`) and a condition for its effect (`EffectiveWhen`).
A section lists other rules in `checks`, and the condition for the effect of the whole section in `effective`. In a rule
or condition, the key `.name` means a setting of the same section."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt, prod
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from rlcore.config.problems import Problem, format_value, plain_text
from rlcore.errors import ConfigError

Run = Any
"""A placeholder for the type `RunConfig`. An import of this type here would be circular."""
FILE_ENDINGS = (".yaml", ".yml")
"""The endings of settings files. If the user names an experiment, suite or sweep by a text with such an ending, the
text is a path. Any other text is the name of a file in `conf_dirs`."""

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
"""The folder of the groups, experiments, suites and sweeps that come with Millrace."""
CONFIG_DIR_VARIABLE = "MILLRACE_CONFIG_DIR"
"""The environment variable with the user's settings folder, laid out like `conf/`. `--config-dir` sets it."""

GROUPS = {
    "data": "countdown",
    "model": "scratch",
    "critic": "none",
    "algo": "grpo",  # after critic, since Hydra goes from last to first and algo=ppo chooses the critic
    "rollout": "hf",
    "runtime": "local",
}
"""The groups of settings, each with the option that is chosen by default."""
EXCLUSIVE_GROUPS = ("data", "critic")
"""The groups whose options have different keys. An experiment's file can choose an option and set keys of this option.
If the user chooses another option of the group, the keys that the file sets for its own option are dropped.
"""


def conf_dirs() -> list[Path]:
    """Return the folders with groups, experiments, suites and sweeps: first the user's folder, if one is set, and then
    `CONF_DIR`. Raises ConfigError if the user's folder does not exist."""
    own = os.environ.get(CONFIG_DIR_VARIABLE)
    if own and not Path(own).is_dir():
        raise ConfigError(
            f"--config-dir or {CONFIG_DIR_VARIABLE}: must be an existing folder; got {own}. Create it first"
        )
    return [*([Path(own).resolve()] if own else []), CONF_DIR]


def group_members(group: str) -> tuple[str, ...]:
    """Return the sorted names of a group's options: the files in the subfolder `<group>` of each folder in
    `conf_dirs`."""
    return tuple(sorted({file.stem for folder in conf_dirs() for file in (folder / group).glob("*.yaml")}))


def member_file(group: str, name: str) -> Path:
    """Return the file `<group>/<name>.yaml`. A file in the user's folder has precedence over a file in `CONF_DIR`."""
    files = [folder / group / f"{name}.yaml" for folder in conf_dirs()]
    return next(filter(Path.is_file, files), files[-1])


def expand_path(path: str) -> Path:
    """Return a path with `~` expanded. If `~name` names no user, return the path unchanged. Path.expanduser would raise
    an error."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


LOCAL_PATH = AfterValidator(lambda path: path and os.path.expanduser(path))  # noqa: PTH111
"""The annotation of a setting that is a path. `~` in the path is expanded. Null and hub ids stay unchanged."""


def is_function_name(name: str) -> bool:
    """Return whether a name has the form `module:function`."""
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


class MayChange:
    """An annotation of a setting or section that a user is allowed to change before a run resumes. The fingerprint of
    the settings does not include such settings."""


class Section(BaseModel):
    """A frozen group of settings. The string below a field documents the field's meaning, unit and range."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    checks: ClassVar[tuple[Any, ...]] = ()
    effective: ClassVar[Any] = None


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name (after `prefix`) and the field of each setting and subsection of a section."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for member in sections_of(field.annotation):
            yield from fields_of(member, f"{prefix}{name}.")


def keys_of(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of each setting in a section and its subsections."""
    return ((name, field) for name, field in fields_of(section) if not sections_of(field.annotation))


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """Return the section classes that a field may hold: none for a plain value, and several for a union of tasks."""
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, Section) else ()
    if get_origin(annotation) in (Union, UnionType):
        return tuple(section for member in get_args(annotation) for section in sections_of(member))
    return ()


def leaves(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat mapping with dotted keys. An empty mapping is kept as a value.

    >>> leaves({"algo": {"kl": {"coef": 0.1}}, "critic": None})
    {'algo.kl.coef': 0.1, 'critic': None}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def covers(name: str, key: str) -> bool:
    """Return whether a key is `name` itself or belongs to the section `name`."""
    return key == name or key.startswith(f"{name}.")


def value_at(section: Section, name: str, absent: Any = None) -> Any:
    """Return the value of a dotted key, or `absent` if the key does not exist or one of its sections is null."""
    found: Any = section
    for part in name.split("."):
        found = getattr(found, part, absent)
    return found


_ALLOWS: dict[str, Callable[[Any, Any], bool]] = {
    "divide": lambda value, bound: bound % value == 0,
    "be at most": lambda value, bound: value <= bound,
    "be at least": lambda value, bound: value >= bound,
    "be under": lambda value, bound: value < bound,
}
_MAX_DIVISORS = 12
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Rule:
    """A check of a section of settings. `reads`: the keys of all settings on which the result of the check depends."""

    reads: tuple[str, ...]
    check: Callable[[Any, Run], Problem | None]


def rule(key: str, others: str, says: str, holds: Callable[[Any, Run], bool], remedy: str) -> Rule:
    """Return a rule about the setting `key`. The rule is broken if `holds(section, run)` is false. `others`: the other
    keys that `holds` reads, separated by spaces. The message has the text `says`, the values of all these keys, and
    `remedy`."""

    def check(section: Any, run: Run) -> Problem | None:
        return None if holds(section, run) else Problem(key, says, _values_text(section, run, key, *names), remedy)

    names = tuple(others.split())
    return Rule((key, *names), check)


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit for the setting that declares it: a comparison (`words`) with other settings (`others`). For example, if
    `words` is `be at most`, the setting must be at most the value of `others`. `others` is a key, or a sum of keys
    (`a + b`). If `words` is `divide`, `others` is a key, or a product of keys (`a x b`).

    The limit is not checked if one of these settings is null or the setting in `only_with` is off. `remedy` can contain
    the placeholders `{bound}` (the value of `others`) and `{divisors}` (the largest divisors of this value).
    """

    words: Literal["divide", "be at most", "be at least", "be under"]
    others: str
    remedy: str = "Use one of {divisors}"
    only_with: str = ""

    def rule(self, key: str) -> Rule:
        """Return the rule that checks the value of the setting `key`."""
        names = tuple(self.others.replace(" x ", " + ").split(" + "))

        def check(section: Any, run: Run) -> Problem | None:
            value, *others = (_value(section, run, name) for name in (key, *names))
            if value is None or None in others or (self.only_with and not _value(section, run, self.only_with)):
                return None
            number = prod(others) if self.words == "divide" else sum(others)
            if _ALLOWS[self.words](value, number):
                return None
            whole = divisors(number) if self.words == "divide" else ""  # another kind of bound may be no whole number
            remedy = self.remedy.format(bound=number, divisors=whole)
            return Problem(key, f"must {self.words} {self.others}", _values_text(section, run, key, *names), remedy)

        return Rule((key, *names, *([self.only_with] if self.only_with else [])), check)


@cache
def rules_of(section: type[Section]) -> tuple[Rule, ...]:
    """Return the rules of a section: the bounds of its fields, and the rules in its `checks`."""
    fields = section.model_fields.items()
    bounds = (each.rule(f".{name}") for name, field in fields for each in field.metadata if isinstance(each, Bound))
    return (*bounds, *(each for kind in section.__mro__ for each in vars(kind).get("checks", ())))


def broken_rules(config: Run, unsound: Collection[str] = ()) -> list[Problem]:
    """Return a problem for each broken rule. A rule that reads a key or section in `unsound` is not checked."""
    found = []
    for prefix, section in sections_in(config):
        for each in rules_of(type(section)):
            reads = [_full_key(name, prefix) for name in each.reads]
            if any(covers(key, read) or covers(read, key) for read in reads for key in unsound):
                continue
            if problem := each.check(section, config):
                found.append(replace(problem, key=_full_key(problem.key, prefix)))
    return found


def sections_in(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield pairs of a key prefix and a section: the section itself, and all its subsections that are not null."""
    yield prefix, section
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from sections_in(inner, f"{prefix}{name}.")


def divisors(number: int) -> str:
    """Return a text with the 12 largest divisors of a number, or all if there are fewer, in ascending order."""
    low = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    found = sorted({*low, *(number // each for each in low)})
    return ", ".join(map(str, found[-_MAX_DIVISORS:]))


def _full_key(name: str, prefix: str) -> str:
    return prefix + name[1:] if name.startswith(".") else name


def _value(section: Section, run: Run, name: str) -> Any:
    return value_at(section, name[1:]) if name.startswith(".") else value_at(run, name)


def _values_text(section: Section, run: Run, key: str, *others: str) -> str:
    first, *rest = (_value_text(_value(section, run, name)) for name in (key, *others))
    values = [f"{name.rpartition('.')[2]} {value}" for name, value in zip(others, rest, strict=True)]
    return f"{first} with {', '.join(values)}" if values else first


def _value_text(value: object) -> str:
    if isinstance(value, Section):
        return "its settings"
    if isinstance(value, tuple) and value and all(isinstance(one, Section) for one in value):
        return str(len(value))
    return format_value(value)


@dataclass(frozen=True, slots=True)
class EffectiveWhen:
    """A condition on other settings. If it is not met, the setting that declares the condition has no effect.
    `by`: the keys of the other settings. The condition is met if at least one of them has a value in `values`, or a
    value that is not in `unless`. If `values` and `unless` are empty, at least one of the other settings must be on
    (not null, false, 0 or `off`).

    `by`, `values`, `unless` and `of` are words separated by spaces. `values` can also be a function that checks the
    value of a setting. `of`: the values of the declaring setting that depend on the condition (default: all). `why` and
    `remedy` replace the generated reason and remedy in the warning."""

    by: str
    values: str | Callable[[Any], bool] = ""
    unless: str = ""
    of: str = ""
    why: str = ""
    remedy: str = ""

    def is_met(self, value: Any) -> bool:
        """Return whether the condition is met if a setting in `by` has this value."""
        if callable(self.values):
            return self.values(value)
        if self.values or self.unless:
            text = plain_text(value)
            return text in self.values.split() if self.values else text not in self.unless.split()
        return value not in (None, False, 0, "off", "", ())

    def reason(self, by: dict[str, Any]) -> str | None:
        """Return a text that explains why the condition is not met: `why`, or the keys and values in `by`. Return None
        if the condition is met or `by` is empty."""
        if not by or any(map(self.is_met, by.values())):
            return None
        return self.why or ", ".join(f"{name}={format_value(value)}" for name, value in by.items())

    def fix(self, config: Run, name: str) -> str:
        """Return the remedy, such as `Set KEY=VALUE`: a change of the setting `name` that meets the condition.
        `name` is the first setting in `by`."""
        outer, _, last = name.rpartition(".")
        kind = type(value_at(config, outer) if outer else config).model_fields[last].annotation
        choices = get_args(kind) if get_origin(kind) is Literal else (True,) if kind is bool else ()
        words = [plain_text(choice) for choice in choices if self.is_met(choice)]
        if isinstance(self.values, str) and self.values:
            words = self.values.split()
        return f"Set {name}={' or '.join(words)}" if words else f"{'Change' if self.unless else 'Set'} {name}"


def unused_settings(
    config: Run, given: Collection[str], in_file: Collection[str] = (), swept: Collection[str] = ()
) -> list[str]:
    """Return warnings about settings that the user has set but that have no effect. Settings that have no effect for
    the same reason share one warning. A setting occurs in only one warning.

    `given`: the keys and groups that overrides set. `in_file`: the keys that an experiment's file sets. There is no
    warning about a key in the file if an override sets a setting on which the key's effect depends. `swept`: the keys
    and groups that differ between the points of a sweep. `config` has the settings that all points share."""
    values = leaves(config.model_dump(mode="json"))
    left = [key for key in values if key in given or key in in_file or key in swept]
    lines = []
    for (effect, names), scope in effects_in(config).items():
        if any(_below(name, swept) for name in names):
            continue
        is_switched = any(_below(name, given) for name in names)
        keys = [key for key in left if _below(key, scope) and key not in names and not (key in in_file and is_switched)]
        if effect.of:
            keys = [key for key in keys if key not in swept and values[key] in effect.of.split()]
        by = {name: value for name in names if (value := value_at(config, name, _ABSENT)) is not _ABSENT}
        reason = effect.reason(by) if keys else None
        if reason is None:
            continue
        left = [key for key in left if key not in keys]
        named = ", ".join(key if key in swept else f"{key}={format_value(values[key])}" for key in keys)
        have, them = ("have", "them") if len(keys) > 1 else ("has", "it")
        remedy = effect.remedy or effect.fix(config, next(iter(by)))
        lines.append(f"{named}: {have} no effect with {reason}. {remedy}, or leave {them} out")
    return lines


def effects_in(config: Run) -> dict[tuple[EffectiveWhen, tuple[str, ...]], list[str]]:
    """Return which settings and sections declare each condition, as a mapping to their keys. Each key of the mapping is
    a pair: the condition, and the dotted keys of the settings on which the condition depends (`by`)."""
    found: dict[tuple[EffectiveWhen, tuple[str, ...]], list[str]] = {}
    for prefix, section in sections_in(config):
        declared = [(prefix[:-1], section.effective)] if section.effective else []
        for name, field in type(section).model_fields.items():
            declared += [(prefix + name, each) for each in field.metadata if isinstance(each, EffectiveWhen)]
        for key, effect in declared:
            by = tuple(_full_key(name, prefix) for name in effect.by.split())
            found.setdefault((effect, by), []).append(key)
    return found


def _below(key: str, names: Collection[str]) -> bool:
    return any(covers(name, key) for name in names)
