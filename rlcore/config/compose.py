"""The composition of an experiment and overrides to one validated `RunConfig`. Only this module imports Hydra.

Hydra merges the chosen option of each group in `conf/` over the defaults of `rlcore.config`. The keys of an
experiment's files replace values of the groups, and overrides replace both.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
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
from yaml import YAMLError

from rlcore.config.algo import CriticConfig
from rlcore.config.base import FILE_ENDINGS, conf_dirs, group_members, leaves, member_file, unused_settings
from rlcore.config.check import ValueOverride, as_plain, read_yaml, validate_settings
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
from rlcore.config.run import RunConfig, all_keys

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
"""Groups with different keys in each option. If an override changes the option, the file's keys are dropped."""
EXPERIMENT_HINT = "Did you mean experiment="
_ROOT = "millrace"
# Hydra's state is global and not safe between threads.
_LOCK = Lock()


def experiment_names() -> tuple[str, ...]:
    """Return the sorted names of the experiments in `conf/experiment`."""
    return group_members("experiment")


@dataclass(frozen=True, slots=True)
class Composition:
    """Composed settings without wrong values, the problems, and the sources of the settings.

    `members`: the chosen option of each group. `override_keys`: the keys and groups that overrides set. `file_keys`:
    the keys that the experiment's own file sets and no override sets."""

    config: RunConfig
    problems: Sequence[Problem]
    files: Sequence[str]
    members: Mapping[str, str]
    override_keys: Collection[str]
    file_keys: Collection[str]

    def unused_settings(self, swept: Collection[str] = ()) -> list[str]:
        """Return warnings about given settings without an effect. `swept`: keys that differ between a sweep's runs."""
        return unused_settings(self.config, self.override_keys, self.file_keys, swept)

    def require_valid(self) -> "Composition":
        """Return the composition itself. Raises ConfigError with all mistakes if there are any."""
        if self.problems:
            raise settings_error(self.problems)
        return self


def load_config(overrides: Sequence[str], *, experiment: str | None = None) -> RunConfig:
    """Compose the settings of an experiment (name or file) or the defaults. Raises ConfigError with all mistakes."""
    return compose(overrides, experiment=experiment).require_valid().config


def compose(overrides: Sequence[str], *, experiment: str | None = None) -> Composition:
    """Return the composed settings together with their problems. The arguments are those of `load_config`."""
    findings = Findings()
    request = _read_overrides(overrides, experiment, findings)
    files = [] if request.experiment is None else _experiment_files(request.experiment, findings)
    chosen = {**(files[-1].members if files else {}), **request.choices}
    settings, members = _compose_groups(chosen, findings)
    findings.sources |= {group: f"conf/{group}/{member}.yaml" for group, member in members.items()}
    for file in files:
        findings.sources |= dict.fromkeys(leaves(file.keys), file.name)
        own = {
            group: member
            for group, member in _compose_groups(file.members, findings)[1].items()
            if group in EXCLUSIVE_GROUPS and group in file.keys and member != members[group]
        }
        settings = as_plain(OmegaConf.merge(settings, {key: file.keys[key] for key in file.keys if key not in own}))
    config = validate_settings(settings, request.values, findings)
    given = {key for written in request.values if not written.delete for key in written.names}
    in_file = leaves(files[-1].keys).keys() - given if files else frozenset()
    shown_files = [file.name for file in files]
    return Composition(config, findings.problems, shown_files, members, given | request.choices.keys(), in_file)


def swept_values(text: str) -> list[Any]:
    """Return the values of an override with several values (`seed=1,2`, `seed=range(1,4)`), or [] for another text."""
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
    """Apply overrides to composed nested plain settings. Raises ConfigError with all mistakes."""
    findings = Findings()
    request = _read_overrides(overrides, None, findings)
    for group in [*request.choices, *(["experiment"] if request.experiment else [])]:
        findings.add(Problem(group, "cannot be chosen over settings that are there", group, "Give the keys one by one"))
    found = validate_settings(settings, request.values, findings)
    if findings.problems:
        raise settings_error(findings.problems)
    return found


@dataclass(slots=True)
class _Request:
    """The parsed overrides of a command. `choices`: the option of each group."""

    experiment: str | None = None
    choices: dict[str, str] = field(default_factory=dict)
    values: list[ValueOverride] = field(default_factory=list)


def _read_overrides(overrides: Sequence[str], experiment: str | None, findings: Findings) -> _Request:
    request, parser = _Request(), OverridesParser.create()
    given: dict[str, Any] = {}
    if experiment is not None:
        given["experiment"] = experiment
        _choose_member(request, "experiment", experiment, findings)
    for text in overrides:
        override = _parse_override(parser, text)
        if isinstance(override, Problem):
            unsound = ["data"] if override.key == "data.task" else []
            if EXPERIMENT_HINT in override.remedy:  # the other settings are its own
                unsound = list(RunConfig.model_fields)
            findings.add(override, *unsound)
            continue
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        parts = leaves({key: value}) if not override.is_delete() else {key: "~"}
        again = [name for name in parts if name in given and given[name] != parts[name]]
        for name in again:
            got = f"{format_value(given[name])} and {format_value(parts[name])}"
            findings.add(Problem(name, "is given more than once, with different values", got, "Keep one of them"))
        given |= parts
        if again:
            continue
        if key in GROUPS or key == "experiment":
            _choose_member(request, key, value, findings)
        else:
            request.values.append(ValueOverride(key, value, text.partition("=")[2], override.is_delete()))
    return request


def _parse_override(parser: OverridesParser, text: str) -> Override | Problem:
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0] if "=" in text else "there is no = in it"
        remedy = "Write key=value, and quote spaces, commas and ~: 'key=\"~/a, b\"'"
        if "=" not in text and (text in experiment_names() or text.endswith(FILE_ENDINGS)):
            remedy = f"Write key=value. {EXPERIMENT_HINT}{text}?"
        return Problem("override", f"cannot be read ({reason})", repr(text), remedy)
    key = override.key_or_group
    if not key:
        return Problem("override", "cannot be read (no key)", repr(text), "Write key=value")
    if override.package is not None or "/" in key:
        rule = "packages and group paths have no meaning here"
        return Problem(key, rule, repr(text), "Write the dotted key alone")
    if override.is_sweep_override():
        rule = "is a sweep over several values, and this is one run"
        return Problem(
            key,
            rule,
            repr(text),
            "Add -m to millrace run for a grid over the values, or give one; a list is written key=[a,b]",
        )
    groups = (*GROUPS, "experiment")
    is_known = key in (*groups, *RunConfig.model_fields)
    if not is_known and nearest(key, [*groups, *all_keys()]) in groups and not foreign_key_hint(key):
        remedy = f"Did you mean {nearest(key, groups)}={text.partition('=')[2]}?"
        return Problem(key, "there is no such setting", repr(text), remedy)
    if key == "data.task":
        task = "countdown" if override.is_delete() else format_value(override.value())
        return Problem(key, "follows from the group", repr(text), f"Choose a task as a group: data={task}")
    return override


def _choose_member(request: _Request, group: str, value: Any, findings: Findings) -> None:
    if value is None and group == "critic":
        value = "none"
    if value is None and group == "experiment":
        return
    if group == "experiment" and str(value).endswith(FILE_ENDINGS):
        request.experiment = str(value)
    elif (known := _unknown_member_remedy(group, value)) is not None:
        unsound = list(RunConfig.model_fields) if group == "experiment" else [group]
        findings.add(Problem(group, "must name a file in conf/" + group, format_value(value), known), *unsound)
    elif group == "experiment":
        request.experiment = value
    else:
        request.choices[group] = value


@dataclass(frozen=True, slots=True)
class _File:
    """One file of an experiment. `members`: the group options that this file and its base files choose."""

    name: str
    keys: Mapping[str, Any]
    members: Mapping[str, str]


def _experiment_files(named: str, findings: Findings, above: tuple[Path, ...] = ()) -> list[_File]:
    """Return the files of an experiment, base files first. A problem in a file makes every setting unreliable."""

    def wrong(rule: str, got: str, remedy: str) -> None:
        findings.add(Problem("experiment", rule, got, remedy), *RunConfig.model_fields)

    is_path = named.endswith(FILE_ENDINGS)
    path = Path(named) if is_path else member_file("experiment", named)
    content = "builds on itself" if path.resolve() in above else read_yaml(path)
    if isinstance(content, str):
        remedy = f"Fix it, or name one of {', '.join(experiment_names())}; conf/experiment/debug.yaml shows the form"
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
    files: list[_File] = []
    members: dict[str, str] = {}
    for group, member in [*(("experiment", base) for base in bases if base != "_self_"), *chosen]:
        if group == "experiment" and member.endswith(FILE_ENDINGS):
            member = str((path.parent / member).resolve())
        elif (known := _unknown_member_remedy(group, member)) is not None:
            wrong("its defaults must name files in conf/", f"{group}/{member} in {named}", known)
            continue
        if group != "experiment":
            members[group] = member
        elif base := _experiment_files(member, findings, (*above, path.resolve())):
            files += [file for file in base if file not in files]
            members |= base[-1].members
    return [*files, _File(str(path) if is_path else f"experiment/{named}.yaml", content, members)]


def _unknown_member_remedy(group: str, member: Any) -> str | None:
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
        settings = as_plain(hydra_compose(_ROOT, overrides=overrides, return_hydra_config=True))
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
