"""From an experiment's name and overrides to one validated `RunConfig`. The only module that imports Hydra.

The defaults of `rlcore.config` are stored in Hydra as the base of every group, so that each key can be overridden
without `+`, and the files in `conf/` hold differences alone. Overrides are Hydra's:

    data=gsm8k              another member of a group (data, model, algo, critic, rollout, runtime)
    trainer.total_steps=5   a value; `+key=` means the same
    critic.warmup_steps=3   a key of a section that is null (critic, model.lora) switches the section on
    tags.owner=me           any name below tags
    ~tags.owner             back to the default

`experiment` names a file in `conf/experiment`, or any other file of that form by its path, ending in .yaml. Such a file
may build on others of its kind, by paths from its folder: `defaults: [mine.yaml, _self_]`.
"""

import json
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from rlcore.config.algo import CriticConfig
from rlcore.config.base import FILE_ENDINGS, covers, leaves
from rlcore.config.check import Written, as_plain, filled_in, put, validate
from rlcore.config.data import TASKS
from rlcore.config.problems import Findings, Problem, did_you_mean, nearest, settings_error, shown
from rlcore.config.rules.effects import without_effect
from rlcore.config.run import RunConfig, all_keys
from rlcore.config.suite import put_suites

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {
    "data": "countdown",
    "model": "scratch",
    "critic": "none",
    "algo": "grpo",  # after critic, since Hydra goes from last to first and algo=ppo chooses the critic
    "rollout": "hf",
    "runtime": "local",
}
"""Each group and its default member."""
EXCLUSIVE_GROUPS = ("data", "critic")
"""Groups whose members have different keys. The section in an experiment's file belongs to the member that the file
chooses, and is left out where an override, or a file that builds on it, chooses another one."""
EXPERIMENT_MEANT = "Did you mean experiment="
_ROOT = "millrace"
# @_global_: an experiment's keys are those of the whole settings, so its files need no package header.
_EXPERIMENT = "experiment@_global_"
_OUTSIDE = "file_from_elsewhere"
# Hydra's state is global and not safe between threads.
_LOCK = Lock()


def experiment_names() -> tuple[str, ...]:
    """Names of the experiments in `conf/experiment`, sorted."""
    return group_members("experiment")


def group_members(group: str) -> tuple[str, ...]:
    """Names of the files in `conf/<group>`, sorted."""
    return tuple(sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml")))


def load_config(overrides: Sequence[str], *, experiment: str | None = None) -> RunConfig:
    """Compose the settings and check everything that can be checked without loading anything heavy.

    Args:
        overrides: Hydra overrides; `experiment=<name>` may be among them.
        experiment: name of a file in `conf/experiment`, or the path of another one; None takes the defaults.

    Raises:
        ConfigError: one message with every mistake: key, rule, value got, what to do.
    """
    ((config, problems),) = judge_settings([overrides], experiment=experiment)
    if problems:
        raise settings_error(problems)
    return config


def judge_settings(
    many: Sequence[Sequence[str]], *, experiment: str | None = None
) -> list[tuple[RunConfig, Sequence[Problem]]]:
    """Settings of each list of overrides, without wrong values, and the problems in them.

    Hydra composes once for all lists with the same experiment and members of groups, and not again in this process
    while their files stay as they are.
    """
    found: list[tuple[RunConfig, Sequence[Problem]]] = []
    for overrides in many:
        findings = Findings()
        request = _read(overrides, experiment, findings)
        with _LOCK:
            choices = tuple(sorted(request.choices.items()))
            settings, of_files = deepcopy(_composed(request.experiment, choices, _state_of_files(request.experiment)))
        findings.problems += of_files.problems
        findings.unsound |= of_files.unsound
        found.append((_checked(settings, request.values, findings), findings.problems))
    return found


def checked_config(settings: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Nested plain settings that were composed before, with the values of overrides put over them.

    Raises:
        ConfigError: one message with every mistake.
    """
    findings = Findings()
    request = _read(overrides, None, findings)
    for group in [*request.choices, *(["experiment"] if request.experiment else [])]:
        findings.add(Problem(group, "cannot be chosen over settings that are there", group, "Give the keys one by one"))
    found = _checked(settings, request.values, findings)
    if findings.problems:
        raise settings_error(findings.problems)
    return found


def _checked(settings: dict[str, Any], values: Sequence[Written], findings: Findings) -> RunConfig:
    """Plain settings with values put over them, as a typed config without the wrong ones."""
    for written in values:
        put(settings, written, findings)
    put_suites(settings, findings)
    # Settings are checked as JSON, and its keys are texts, where YAML's may be true or 1.
    settings = json.loads(json.dumps(settings, default=str))
    texts = {
        name: written.text if isinstance(written.value, int | float) else ""
        for written in values
        for name in written.names
    }
    return validate(filled_in(settings, findings), findings, texts)


def idle_settings(
    config: RunConfig, overrides: Sequence[str], *, experiment: str | None = None, swept: Collection[str] = ()
) -> list[str]:
    """A line for each setting that an override or the experiment's own file gives and that cannot have an effect.

    Args:
        config: the settings that `load_config` made of the same arguments.
        swept: keys that differ from point to point of a sweep.
    """
    request = _read(overrides, experiment, Findings())
    given = {key for written in request.values if not written.delete for key in written.names}
    in_file: set[str] = set()
    if (named := request.experiment) is not None:  # its own file, without those that it builds on
        in_file = leaves(_content(named, named)).keys() - given - {"defaults"}
    return without_effect(config, given | request.choices.keys(), in_file, swept)


def composed_of(overrides: Sequence[str], *, experiment: str | None = None) -> tuple[Sequence[str], Mapping[str, str]]:
    """Files of the experiment in the order in which they are merged, and the member of each group.

    The arguments are those of a `load_config` that has raised nothing.
    """
    request = _read(overrides, experiment, Findings())
    chosen = [f"{group}={member}" for group, member in request.choices.items()]
    with _LOCK:
        _store_defaults()
        with _hydra():
            if request.experiment is None:
                files, members = [], _compose(chosen)[1]
            else:
                named = f"{_EXPERIMENT}={_member_of(request.experiment)}"
                files, members = _layers(named)[0], _compose([named, *chosen])[1]
    own = _own_files(request.experiment)
    shown_files = [str(own.get(file, f"experiment/{file}.yaml")) for file in files]
    return shown_files, {group: members[group] for group in GROUPS}


@dataclass(slots=True)
class _Request:
    """The overrides that could be parsed."""

    experiment: str | None = None
    choices: dict[str, str] = field(default_factory=dict)
    values: list[Written] = field(default_factory=list)


def _read(overrides: Sequence[str], experiment: str | None, findings: Findings) -> _Request:
    """Sort the overrides into groups and values; find those that cannot be read or contradict each other."""
    request, parser = _Request(), OverridesParser.create()
    given: dict[str, Any] = {}
    if experiment is not None:
        given["experiment"] = experiment
        _choose(request, "experiment", experiment, findings)
    for text in overrides:
        override = _parsed(parser, text)
        if isinstance(override, Problem):
            unsound = ["data"] if override.key == "data.task" else []
            if EXPERIMENT_MEANT in override.remedy:  # the other settings are its own
                unsound = list(RunConfig.model_fields)
            findings.add(override, *unsound)
            continue
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        parts = leaves({key: value}) if not override.is_delete() else {key: "~"}
        again = [name for name in parts if name in given and given[name] != parts[name]]
        for name in again:
            got = f"{shown(given[name])} and {shown(parts[name])}"
            findings.add(Problem(name, "is given more than once, with different values", got, "Keep one of them"))
        given |= parts
        if again:
            continue
        if key in GROUPS or key == "experiment":
            _choose(request, key, value, findings)
        else:
            request.values.append(Written(key, value, text.partition("=")[2], override.is_delete()))
    return request


def _parsed(parser: OverridesParser, text: str) -> Override | Problem:
    """One override by Hydra's grammar, or why there is none."""
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0] if "=" in text else "there is no = in it"
        remedy = "Write key=value, and quote spaces, commas and ~: 'key=\"~/a, b\"'"
        if "=" not in text and (text in experiment_names() or text.endswith(FILE_ENDINGS)):
            remedy = f"Write key=value. {EXPERIMENT_MEANT}{text}?"
        return Problem("override", f"cannot be read ({reason})", repr(text), remedy)
    key = override.key_or_group
    if not key:
        return Problem("override", "cannot be read (no key)", repr(text), "Write key=value")
    if override.package is not None or "/" in key:
        rule = "packages and group paths have no meaning here"
        return Problem(key, rule, repr(text), "Write the dotted key alone")
    if override.is_sweep_override():
        rule = "is a sweep over several values, and this is one run"
        return Problem(key, rule, repr(text), "Give one value; a list is written key=[a,b]")
    groups = (*GROUPS, "experiment")
    if key not in (*groups, *RunConfig.model_fields) and nearest(key, [*groups, *all_keys()]) in groups:
        remedy = f"Did you mean {nearest(key, groups)}={text.partition('=')[2]}?"
        return Problem(key, "there is no such setting", repr(text), remedy)
    if key == "data.task":
        task = "countdown" if override.is_delete() else shown(override.value())
        return Problem(key, "follows from the group", repr(text), f"Choose a task as a group: data={task}")
    return override


def _choose(request: _Request, group: str, value: Any, findings: Findings) -> None:
    """Choose a member of a group, or add the problem that there is none of that name."""
    if value is None and group == "critic":
        value = "none"
    if value is None and group == "experiment":
        return
    if group == "experiment" and str(value).endswith(FILE_ENDINGS):
        if reason := _why_unreadable(Path(value)):
            got = str(value) if Path(value).is_absolute() else f"{value} in {Path.cwd()}"
            remedy = f"Name a file that this process can read, or one of {', '.join(experiment_names())}"
            findings.add(Problem(group, reason, got, remedy), *RunConfig.model_fields)
        else:
            request.experiment = str(value)
        return
    members = group_members(group)
    if value not in members:
        remedy = f"{did_you_mean(str(value), members)}There are {', '.join(members)}"
        unsound = list(RunConfig.model_fields) if group == "experiment" else [group]
        findings.add(Problem(group, "must name a file in conf/" + group, shown(value), remedy), *unsound)
    elif group == "experiment":
        request.experiment = value
    else:
        request.choices[group] = value


def _why_unreadable(file: Path) -> str:
    """Why this process cannot read settings in a file; '' if it can, and where the composition says it better."""
    try:
        if file.is_dir():
            return "must be a file, not a folder"
        if not file.is_file():
            return "there is no such file"
        return "" if isinstance(safe_load(file.read_bytes()), dict) else "its file must hold keys and values"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (YAMLError, UnicodeError):
        return ""


def _state_of_files(experiment: str | None) -> tuple[Hashable, ...]:
    """What differs once a file is changed that a composition reads: in `conf/`, or one's own elsewhere."""
    known = [file.stat() for file in sorted(CONF_DIR.glob("*/*.yaml"))]
    own = [(str(file), file.read_bytes() if file.is_file() else b"") for file in _own_files(experiment).values()]
    return str(CONF_DIR), *own, *((one.st_ino, one.st_size, one.st_mtime_ns) for one in known)


@lru_cache(maxsize=64)
def _composed(
    experiment: str | None, choices: tuple[tuple[str, str], ...], files: tuple[Hashable, ...]
) -> tuple[dict[str, Any], Findings]:
    """The settings by Hydra, without value overrides, and the problems in their files; the caller holds the lock.

    An earlier composition is taken where the experiment, the members of groups and the state of the files are the same.
    """
    findings = Findings()
    _store_defaults()
    try:
        with _hydra():
            settings = _choices_composed(experiment, dict(choices), files)
            lost = [] if experiment is None else list(_lost_keys(experiment))
            for problem in lost:
                findings.add(problem, *RunConfig.model_fields)
            return _with_own_keys(settings, experiment) if lost else settings, findings
    except MissingConfigException as error:
        findings.add(_missing_default(error, experiment or "none"), *RunConfig.model_fields)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        named = experiment or "none"
        reason = " ".join(str(error).split()).replace(f"experiment/{_OUTSIDE}", named)
        if isinstance(error, RecursionError):
            reason = "one of them builds on itself"
        remedy = "Mend the file; conf/experiment/debug.yaml shows the form"
        if unknown := re.search(r"Could not override '([^']+)'\. No match", reason):
            groups = [f"/{group}" for group in GROUPS]
            remedy = f"{did_you_mean(f'/{unknown[1]}', groups)}There are {', '.join(groups)}"
        place = "" if named.endswith(FILE_ENDINGS) else " in conf/"
        problem = Problem("experiment", f"its files{place} cannot be read ({reason})", named, remedy)
        findings.add(problem, *RunConfig.model_fields)
    settings = RunConfig().model_dump(mode="json")
    try:
        return _with_own_keys(settings, experiment), findings
    except (OmegaConfBaseException, YAMLError, OSError, ValueError):
        return settings, findings


def _with_own_keys(settings: dict[str, Any], experiment: str | None) -> dict[str, Any]:
    """Settings with the keys of the experiment's own file over them, so that mistakes in these are found.

    Without exclusive sections: which member they are written for is not known.
    """
    if experiment is None:
        return settings
    own = _content(experiment, experiment)
    known = {key: value for key, value in own.items() if key not in ("defaults", *EXCLUSIVE_GROUPS)}
    return as_plain(OmegaConf.merge(settings, known))


def _lost_keys(experiment: str) -> Iterator[Problem]:
    """A problem for each file whose keys are overridden by files that it builds on, since these are merged later."""
    own_files = _own_files(experiment)
    for own, path in (own_files or {experiment: Path(experiment)}).items():
        content = _content(own, experiment)
        if "_self_" not in content.pop("defaults", [])[:-1]:
            continue
        files = _layers(f"{_EXPERIMENT}={own}")[0]
        later = files[files.index(own) + 1 :]
        over = leaves(as_plain(OmegaConf.merge(*(_content(file, experiment) for file in later)))) if later else {}
        lost = [
            key
            for key, value in leaves(content).items()
            if any((covers(key, name) or covers(name, key)) and (key, value) != (name, over[name]) for name in over)
        ]
        if lost:
            bases = " and ".join(own_files.get(file, Path(file)).name for file in later)
            rule = f"_self_ must be the last of its defaults, or it loses {', '.join(lost)} to {bases}"
            yield Problem("experiment", rule, f"_self_ before {bases} in {path}", f"Put _self_ behind {bases}")


def _missing_default(error: MissingConfigException, named: str) -> Problem:
    """The defaults in an experiment's file name a file that is not in `conf/`."""
    group, _, member = (error.missing_cfg_file or "").rpartition("/")
    members = group_members(group) if group in (*GROUPS, "experiment") else ()
    rest = f"{did_you_mean(member, members)}There are {', '.join(members or ['experiment', *GROUPS])}"
    return Problem("experiment", "its defaults must name files in conf/", f"{error.missing_cfg_file} in {named}", rest)


def _choices_composed(
    experiment: str | None, choices: Mapping[str, str], state: tuple[Hashable, ...]
) -> dict[str, Any]:
    """The settings with exclusive sections made anew: from the member chosen and the files that choose it too."""
    chosen = [f"{group}={member}" for group, member in choices.items()]
    if experiment is None:
        return _compose(chosen)[0]
    named = f"{_EXPERIMENT}={_member_of(experiment)}"
    settings, members = _compose([named, *chosen])
    own_members = _own_members(named, state)
    files = list(own_members)
    if not chosen and len(files) == 1:
        return settings
    for group in EXCLUSIVE_GROUPS:
        fitting = [file for file in files if own_members[file][group] == members[group]]
        if len(fitting) < len(files):
            sections = [_compose([f"{group}={members[group]}"])[0][group]]
            sections += [_content(file, experiment).get(group) for file in fitting]
            given = [section for section in sections if section is not None]
            settings[group] = OmegaConf.to_container(OmegaConf.merge(*given)) if given else None
    return settings


@lru_cache(maxsize=64)
def _own_members(named: str, _state: tuple[Hashable, ...]) -> dict[str, Mapping[str, str]]:
    """The experiment's file and those that it builds on, in the order in which Hydra merges them, each with the member
    of each group that it chooses by itself."""
    files, members = _layers(named)
    return {
        file: members if f"{_EXPERIMENT}={file}" == named else _layers(f"{_EXPERIMENT}={file}")[1] for file in files
    }


def _layers(named: str) -> tuple[list[str], Mapping[str, str]]:
    """Files of an experiment in the order in which Hydra merges them, and the member of each group."""
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list(config_name=_ROOT, overrides=[named], run_mode=RunMode.RUN)
    paths = [layer.config_path for layer in found.defaults if layer.config_path is not None]
    files = [path.removeprefix("experiment/") for path in paths if path.startswith("experiment/")]
    return files, dict(found.overrides.known_choices)


def _content(file: str, experiment: str) -> dict[str, Any]:
    """Content of one file of `conf/experiment`, or of the experiment's own file from elsewhere."""
    if file.endswith(FILE_ENDINGS):
        file = _OUTSIDE
    return as_plain(OmegaConf.load(_own_files(experiment).get(file, CONF_DIR / "experiment" / f"{file}.yaml")))


def _member_of(experiment: str) -> str:
    """Name of the experiment in its group; files from elsewhere are added to the group."""
    own = _own_files(experiment)
    names = {file: name for name, file in own.items()}
    for file, name in names.items():
        node, bases = OmegaConf.load(file), _bases_of(file)
        if isinstance(node, DictConfig) and bases:
            node.defaults = [names[bases[entry]] if entry in bases else entry for entry in node.defaults]
        ConfigStore.instance().store(group="experiment", name=name, node=node)
    return _OUTSIDE if own else experiment


def _own_files(experiment: str | None) -> dict[str, Path]:
    """An experiment's file from elsewhere and those that it builds on, by their names in the group."""
    files = [Path(experiment)] if experiment is not None and experiment.endswith(FILE_ENDINGS) else []
    for file in files:
        files += [base for base in _bases_of(file).values() if base not in files]
    return {_OUTSIDE + (f"_{number}" if number else ""): file for number, file in enumerate(files)}


def _bases_of(file: Path) -> dict[str, Path]:
    """The files from elsewhere in the defaults of one, by their entries; none where it cannot be read."""
    try:
        entries = safe_load(file.read_bytes())["defaults"]
        return {entry: (file.parent / entry).resolve() for entry in entries if str(entry).endswith(FILE_ENDINGS)}
    except (OSError, YAMLError, UnicodeError, KeyError, TypeError):
        return {}


def _compose(overrides: Sequence[str]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Settings as plain values with interpolations unresolved, and the member of each group."""
    composed = compose(_ROOT, overrides=list(overrides), return_hydra_config=True)
    choices = dict(composed.hydra.runtime.choices)
    settings = as_plain(composed)
    del settings["hydra"]
    return settings, choices


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra on `conf/`; its global state is restored afterwards."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            yield
    finally:
        # Not the instance from above: leaving the context puts another one in its place.
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = outer


def _store_defaults() -> None:
    """Make the defaults of the settings classes the base of each group; storing them again changes nothing."""
    store, defaults = ConfigStore.instance(), RunConfig().model_dump(mode="json")
    for group in GROUPS.keys() - set(EXCLUSIVE_GROUPS):
        store.store(group=group, name="defaults", node=defaults[group])
    for task, section in TASKS.items():
        store.store(group="data", name=f"{task}_defaults", node=section().model_dump(mode="json"))
    store.store(group="critic", name="defaults", node=CriticConfig().model_dump(mode="json"))
    members = [{group: member} for group, member in GROUPS.items()]
    rest = {name: value for name, value in defaults.items() if name not in GROUPS}
    order = ["_self_", *members, {f"optional {_EXPERIMENT}": None}]
    store.store(name=_ROOT, node={"defaults": order, **rest, "critic": None})
