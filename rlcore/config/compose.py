"""Build one validated `RunConfig` from an experiment and overrides. Only this module imports Hydra.

Values come, from lowest to highest priority, from the defaults in `rlcore.config`, the chosen group options in `conf/`,
the experiment's files, and the overrides."""

import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from rlcore.config import check
from rlcore.config.algo import CriticConfig
from rlcore.config.base import (
    EXCLUSIVE_GROUPS,
    FILE_ENDINGS,
    GROUPS,
    conf_dirs,
    covers,
    group_members,
    leaves,
    unused_settings,
    value_at,
)
from rlcore.config.data import TASKS
from rlcore.config.problems import (
    Findings,
    Problem,
    did_you_mean,
    foreign_key_hint,
    format_value,
    nearest,
    settings_error,
)
from rlcore.config.run import RunConfig, all_keys, section_names

EXPERIMENT_HINT = "Did you mean experiment="
_ROOT = "millrace"
# Hydra's state is global and not safe between threads.
_LOCK = Lock()


@dataclass(frozen=True, slots=True)
class Composition:
    """The result of `compose`: the settings without wrong values, the mistakes that were found, and the sources of
    the settings.

    `files`: the experiment's files, its own file last. `members`: the chosen option of each group. `override_keys`: the
    keys and groups that overrides set. `file_keys`: the keys that the last of `files` sets and no override sets.
    `sources`: for each key, "override", the experiment's file that sets it, or the chosen option of its group.
    The source is '' if there is none of these."""

    config: RunConfig
    problems: Sequence[Problem]
    files: Sequence[str]
    members: Mapping[str, str]
    override_keys: Collection[str]
    file_keys: Collection[str]
    sources: Mapping[str, str]

    def unused_settings(self, swept: Collection[str] = ()) -> list[str]:
        """Return a warning for each setting that an override or the experiment's file sets and that has no effect.
        `swept`: the keys that differ between a sweep's runs."""
        return unused_settings(self.config, self.override_keys, self.file_keys, swept)

    def require_valid(self) -> "Composition":
        """Return this composition if its settings have no mistakes. Otherwise raise a ConfigError that lists all
        mistakes."""
        if self.problems:
            raise settings_error(self.problems)
        return self


def load_config(overrides: Sequence[str], *, experiment: str | None = None) -> RunConfig:
    """Return the settings of an experiment (its name or file) with the overrides applied. Without an experiment, the
    overrides are applied to the defaults. Raises one ConfigError that lists all mistakes."""
    return compose(overrides, experiment=experiment).require_valid().config


def compose(overrides: Sequence[str], *, experiment: str | None = None) -> Composition:
    """Compose settings as `load_config` does. Instead of raising an error for mistakes, return the mistakes, and the
    settings without the wrong values."""
    findings = Findings()
    choices, values = _read_overrides(overrides, experiment, findings)
    named = choices.pop("experiment", None)
    files = [] if named is None else check.experiment_files(named, findings)
    chosen = {**(files[-1].members if files else {}), **choices}
    settings, members = _compose_groups(chosen, findings)
    findings.sources |= {group: f"conf/{group}/{member}.yaml" for group, member in members.items()}
    for file in files:
        _, of_file = _compose_groups(file.members, findings)
        replaced = {group for group in EXCLUSIVE_GROUPS if of_file[group] != members[group]}
        kept = {key: value for key, value in file.keys.items() if key not in replaced}
        findings.sources |= dict.fromkeys(leaves(kept), file.name)
        settings = check.as_plain(OmegaConf.merge(settings, kept))
    findings.values = leaves(settings)
    config = _validate_settings(settings, values, findings)
    given = _texts(values).keys()
    in_file = leaves(files[-1].keys).keys() - given if files else frozenset()
    shown_files = [file.name for file in files]
    chosen_options = {group: f"{group}={member}" for group, member in members.items()}
    sources = {
        key: findings.sources.get(key) or chosen_options.get(key.partition(".")[0], "") for key in findings.values
    }
    sources |= dict.fromkeys(given, "override")
    overridden = given | choices.keys()
    return Composition(config, findings.problems, shown_files, members, overridden, in_file, sources)


def swept_values(text: str) -> list[Any]:
    """Return the values in a Hydra sweep override such as `seed=1,2` or `seed=range(1,4)`, or [] for any other text."""
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
        if not override.is_sweep_override():
            return []
        each = [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
        return [parser.parse_override(one).value() for one in each]
    except HydraException:
        return []


def override_config(settings: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Apply overrides of keys (not of groups) to complete settings, given as nested dicts, and return the checked
    result. Raises one ConfigError that lists all mistakes."""
    findings = Findings()
    choices, values = _read_overrides(overrides, None, findings)
    for group in choices:
        findings.add(Problem(group, "cannot be chosen over settings that are there", group, "Give the keys one by one"))
    found = _validate_settings(settings, values, findings)
    if findings.problems:
        raise settings_error(findings.problems)
    return found


def _read_overrides(
    overrides: Sequence[str], experiment: str | None, findings: Findings
) -> tuple[dict[str, str], list[Override]]:
    """Return the chosen options by group, such as `ppo` for `algo`, and the overrides of keys. The experiment is in the
    first, under `experiment`."""
    choices: dict[str, str] = {}
    values: list[Override] = []
    parser = OverridesParser.create()
    given: dict[str, Any] = {}
    if experiment is not None:
        given["experiment"] = experiment
        _choose_member(choices, "experiment", experiment, findings)
    for text in overrides:
        override = _parse_override(parser, text)
        if isinstance(override, Problem):
            unsound = ["data"] if override.key == "data.task" else []
            if EXPERIMENT_HINT in override.remedy:  # the other settings are its own
                unsound = list(RunConfig.model_fields)
            findings.add(override, *unsound)
            continue
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        parts = {key: "~"} if override.is_delete() else leaves({key: value})
        again = [name for name in parts if name in given and given[name] != parts[name]]
        for name in again:
            got = f"{format_value(given[name])} and {format_value(parts[name])}"
            findings.add(Problem(name, "is given more than once, with different values", got, "Keep one of them"))
        given |= parts
        if again:
            continue
        if key in GROUPS or key == "experiment":
            _choose_member(choices, key, value, findings)
        else:
            values.append(override)
    return choices, values


def _texts(values: Sequence[Override]) -> dict[str, str]:
    """Return the keys that overrides set. The value of a key is its number as the user wrote it, or '' if it has no
    number."""
    return {
        name: str(written.input_line).partition("=")[2] if isinstance(written.value(), int | float) else ""
        for written in values
        if not written.is_delete()
        for name in leaves({written.key_or_group: written.value()})
    }


def _parse_override(parser: OverridesParser, text: str) -> Override | Problem:
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0] if "=" in text else "there is no = in it"
        remedy = "Write key=value, and quote spaces, commas and ~: 'key=\"~/a, b\"'"
        if "=" not in text and (text in group_members("experiment") or text.endswith(FILE_ENDINGS)):
            remedy = f"Write key=value. {EXPERIMENT_HINT}{text}?"
        return Problem("override", f"cannot be read ({reason})", repr(text), remedy)
    key = override.key_or_group
    if not key:
        return Problem("override", "cannot be read (no key)", repr(text), "Write key=value")
    groups = (*GROUPS, "experiment")
    is_known = key in (*groups, *RunConfig.model_fields, *all_keys())
    rule = remedy = ""
    if key.partition(".")[0].partition("/")[0] == "hydra":
        rule = "Hydra's own settings (output folders, launchers, logging) are not supported"
        remedy = "Leave it out; paths.root sets the folder of the results"
    elif override.package is not None or "/" in key:
        rule = "packages and group paths have no meaning here"
        remedy = "Write the dotted key alone"
    elif override.is_sweep_override():
        rule = "is a sweep over several values, and this is one run"
        remedy = "Add -m to millrace run for a grid over the values, or give one; a list is written key=[a,b]"
    elif not is_known and nearest(key, [*groups, *all_keys()]) in groups and not foreign_key_hint(key):
        rule = "there is no such setting"
        remedy = f"Did you mean {nearest(key, groups)}={text.partition('=')[2]}?"
    elif key == "data.task":
        rule = "follows from the group"
        task = "countdown" if override.is_delete() else format_value(override.value())
        remedy = f"Choose a task as a group: data={task}"
    return Problem(key, rule, repr(text), remedy) if rule else override


def _choose_member(choices: dict[str, str], group: str, value: Any, findings: Findings) -> None:
    if value is None and group == "critic":
        value = "none"
    if value is None and group == "experiment":
        return
    if group == "experiment" and str(value).endswith(FILE_ENDINGS):
        choices[group] = str(value)
    elif (known := check.unknown_member_remedy(group, value)) is not None:
        unsound = list(RunConfig.model_fields) if group == "experiment" else [group]
        findings.add(Problem(group, "must name a file in conf/" + group, format_value(value), known), *unsound)
    else:
        choices[group] = value


def _validate_settings(settings: dict[str, Any], values: Sequence[Override], findings: Findings) -> RunConfig:
    """Apply the overrides in `values` to the settings. Add wrong values to `findings`, and return the settings without
    them.

    Raises ConfigError if a wrong value cannot be removed."""
    for written in values:
        _apply_override(settings, written, findings)
    if any(isinstance(entry, str) for entry in check.suites_in(settings)):
        settings["validation"]["suites"] = check.read_suites(check.suites_in(settings), findings)
    config = _validate_types(_interpolate(settings, findings), findings, _texts(values))
    for problem in check.find_problems(config, findings.unreliable):
        findings.add(problem)
    return config


def _apply_override(settings: dict[str, Any], written: Override, findings: Findings) -> None:
    key, value = written.key_or_group, written.value()
    *outer, last = key.split(".")
    inner = settings
    for part in outer:
        if inner.get(part) is None:
            inner[part] = {}
        inner = inner[part]
        if not isinstance(inner, dict):
            rule = f"there is no such setting: {part} is a value, not a section"
            findings.add(Problem(key, rule, format_value(value), "docs/settings.md lists every key"))
            return
    if written.is_delete() and key in section_names() and value_at(RunConfig(), key) is not None:
        rule = "is a section, and only single settings return to their defaults"
        example = min(name for name in all_keys() if covers(key, name))
        findings.add(Problem(key, rule, f"~{key}", f"Set its keys, or reset one, such as ~{example}"))
    elif written.is_delete() and last not in inner:
        rule = "there is no such key to delete"
        findings.add(Problem(key, rule, f"~{key}", did_you_mean(key, all_keys()).strip()))
    elif written.is_delete():
        inner.pop(last)
    elif written.is_add() and inner.get(last) is not None and not isinstance(value, dict | list):  # as in Hydra
        plain = str(written.input_line).removeprefix("+")
        findings.add(Problem(key, "exists already, and + adds only new keys", f"+{plain}", f"Write {plain}"))
    else:
        inner[last] = _merge(inner.get(last), value)


def _merge(settings: Any, more: Any) -> Any:
    if not (isinstance(settings, dict) and isinstance(more, dict)):
        return more
    return settings | {name: _merge(settings.get(name), value) for name, value in more.items()}


def _interpolate(settings: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the settings as JSON values, with each interpolation such as `${seed}` replaced by its value. Values that
    cannot be resolved are removed and added to `findings`."""
    while True:
        # The keys of JSON are texts, where those of YAML may be true or 1.
        settings = json.loads(json.dumps(settings, default=str))
        if "${" not in (text := json.dumps(settings)) and '"???"' not in text:
            return settings
        try:
            return check.as_plain(OmegaConf.create(settings), resolve=True)
        except OmegaConfBaseException as error:
            path = _path_of(str(error.full_key).partition("[")[0], settings)
            value = check.remove_value(settings, path)
            rule = f"cannot be filled in ({str(error).splitlines()[0]})"
            remedy = "Name a setting that exists, or write a value"
            findings.add(Problem(".".join(path), rule, format_value(value), remedy))


def _path_of(key: str, settings: Any) -> list[str]:
    for name, inner in settings.items() if isinstance(settings, dict) else ():
        if covers(name, key):
            return [name, *_path_of(key[len(name) + 1 :], inner)]
    return []


def _validate_types(settings: dict[str, Any], findings: Findings, texts: Mapping[str, str]) -> RunConfig:
    """Return the settings as a `RunConfig`. Wrong values are removed and added to `findings`. `texts` maps each key
    that an override sets to its number as the user wrote it, or to '' if the value is not a number. A setting that
    requires a string gets this text instead of the number."""
    while True:
        text = json.dumps(settings)
        try:
            # Strict JSON: neither true nor "5" is a number, but 1 is a float and a list is a tuple.
            return RunConfig.model_validate_json(text, strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                check.report_error(detail, json.loads(text), settings, findings, texts)
        if json.dumps(settings) == text:
            raise settings_error(findings.problems)


def _compose_groups(chosen: Mapping[str, str], findings: Findings) -> tuple[dict[str, Any], Mapping[str, str]]:
    files = [file for folder in conf_dirs() for file in sorted(folder.glob("*/*.yaml"))]
    state = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    try:
        with _LOCK:
            return deepcopy(_compose_cached(tuple(sorted(chosen.items())), tuple(state)))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        rule, got = f"its files cannot be read ({' '.join(str(error).split())})", " and ".join(map(str, conf_dirs()))
        findings.add(Problem("conf", rule, got, "Fix the file"), *RunConfig.model_fields)
        return RunConfig().model_dump(mode="json"), {**GROUPS, **chosen}


@lru_cache(maxsize=64)
def _compose_cached(
    chosen: tuple[tuple[str, str], ...], _files: tuple[Hashable, ...]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    store, defaults = ConfigStore.instance(), RunConfig().model_dump(mode="json")
    for group in GROUPS.keys() - set(EXCLUSIVE_GROUPS):
        store.store(group=group, name="defaults", node=defaults[group])
    for task, section in TASKS.items():
        store.store(group="data", name=f"{task}_defaults", node=section().model_dump(mode="json"))
    store.store(group="critic", name="defaults", node=CriticConfig().model_dump(mode="json"))
    rest = {name: value for name, value in defaults.items() if name not in GROUPS}
    members = [{group: member} for group, member in GROUPS.items()]
    store.store(name=_ROOT, node={"defaults": ["_self_", *members], **rest, "critic": None})
    with _hydra():
        overrides = [f"{group}={member}" for group, member in chosen]
        overrides += [f"hydra.searchpath=[file://{folder}]" for folder in conf_dirs()[1:]]
        settings = check.as_plain(hydra_compose(_ROOT, overrides=overrides, return_hydra_config=True))
    choices = settings.pop("hydra")["runtime"]["choices"]
    return settings, {group: choices[group] for group in GROUPS}


@contextmanager
def _hydra() -> Iterator[None]:
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dirs()[0]), version_base="1.3"):
            yield
    finally:
        # Leaving the context has replaced the instance from above.
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = outer
