"""The base class of all sections of settings, and functions for dotted keys and paths."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from rlcore.errors import ConfigError

Run = Any
"""The type `RunConfig`, which the modules of its sections cannot import."""
FILE_ENDINGS = (".yaml", ".yml")
"""The file endings of paths. A value without such an ending is the name of a file in `conf/`."""

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
"""The folder of the groups, experiments, suites and sweeps that come with Millrace."""
CONFIG_DIR_VARIABLE = "MILLRACE_CONFIG_DIR"
"""The environment variable with the user's folder in the form of `conf/`. The option `--config-dir` sets it."""


def conf_dirs() -> list[Path]:
    """Return the user's folder of groups, experiments, suites and sweeps if there is one, and then `CONF_DIR`."""
    own = os.environ.get(CONFIG_DIR_VARIABLE)
    if own and not Path(own).is_dir():
        raise ConfigError(
            f"--config-dir or {CONFIG_DIR_VARIABLE}: must be an existing folder; got {own}. Create it first"
        )
    return [*([Path(own).resolve()] if own else []), CONF_DIR]


def group_members(group: str) -> tuple[str, ...]:
    """Return the sorted names of the files in `<group>/` of all `conf_dirs`."""
    return tuple(sorted({file.stem for folder in conf_dirs() for file in (folder / group).glob("*.yaml")}))


def member_file(group: str, name: str) -> Path:
    """Return the file `<group>/<name>.yaml`. A file in the user's folder has precedence over a file in `CONF_DIR`."""
    files = [folder / group / f"{name}.yaml" for folder in conf_dirs()]
    return next(filter(Path.is_file, files), files[-1])


def expand_path(path: str) -> Path:
    """Return a path with `~` expanded. Unlike Path.expanduser, keep `~name` if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def expand_home(path: str | None) -> str | None:
    """Return a setting with `~` expanded. The setting may be None or a hub id. Fields use this as a validator."""
    return path and os.path.expanduser(path)  # noqa: PTH111


def is_function_name(name: str) -> bool:
    """Return whether a name has the form `module:function`."""
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


class MayChange:
    """An annotation of a setting or section that may change when a run resumes and is not part of the fingerprint."""


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


def keys_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name (after `prefix`) and the field of each setting in a section and its subsections."""
    for name, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        if not inner:
            yield prefix + name, field
        for member in inner:
            yield from keys_of(member, f"{prefix}{name}.")


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
    """Return the value of a dotted key. Return `absent` if one of its sections is null or lacks the next name."""
    found: Any = section
    for part in name.split("."):
        found = getattr(found, part, absent)
    return found
