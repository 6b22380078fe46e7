"""Tasks of the package verifiers: the prompts and rewards of a taskset, without a harness.

A taskset whose tasks need tools, a runtime or a separate environment is refused.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import islice
from pkgutil import resolve_name
from typing import Any

from data.rows import Message, Row, TaskRows
from rlcore.config.data import VerifiersData
from rlcore.errors import MODULE_REMEDY, ConfigError, DataError
from rlcore.rollout.environment import await_value
from rlcore.score import Score
from rlcore.user_code import code_for

VERSION = 1  # increase it when the same settings give different rows
PACKAGE = "verifiers"
# methods of a task that need the runtime or the tool servers of a harness
_HOOKS = ("setup", "finalize", "stage_verifier", "toolsets")


def inputs(settings: VerifiersData) -> dict[str, str]:
    """Return the version of the package and the digests of the taskset's files. Raises ConfigError if the package is
    missing, and DataError if the taskset cannot be used."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "data=verifiers: the package verifiers must be installed, and is not. In the checkout: "
            "pip install -e '.[verifiers]'"
        )
    _taskset(settings.taskset, json.dumps(settings.taskset_options))
    digests = {source.name: source.sha256 for source in code_for(settings.taskset)}
    return {PACKAGE: metadata.version(PACKAGE), **digests}


def build(settings: VerifiersData, seed: int) -> TaskRows:
    """Return the tasks in random order. The first tasks are held out. An infinite taskset keeps its order."""
    count, split = settings.validation_size, {**settings.taskset_options, **settings.validation_options}
    rows = _rows(settings, settings.taskset_options, seed)
    held_out = list(islice(_rows(settings, split, seed) if settings.validation_options else rows, count))
    train = islice(rows, settings.train_size)
    name = settings.taskset.partition(":")[0]
    return TaskRows(name, "verifiers", settings.template, {"validation": held_out, "train": train})


def _rows(settings: VerifiersData, options: Mapping[str, Any], seed: int) -> Iterator[Row]:
    document = json.dumps(options)
    tasks = _taskset(settings.taskset, document)
    for place, task in enumerate(tasks.shuffle(seed) if tasks.bounded else tasks):
        if place == 0:  # all tasks have one type
            _require_no_harness(settings.taskset, tasks, task)
        truth = {"taskset": settings.taskset, "options": document, "task": task.data.model_dump_json()}
        yield Row(tuple(_messages(settings.taskset, task.data)), truth)


def _messages(name: str, data: Any) -> Iterator[Message]:
    if data.system_prompt is not None:
        yield Message("system", data.system_prompt)
    if isinstance(data.prompt, str):
        yield Message("user", data.prompt)
        return
    for message in data.prompt or ():
        if not isinstance(message.content, str) or message.role == "tool" or getattr(message, "tool_calls", None):
            raise _needs(name, f"more than text in the prompt of task {data.idx}")
        yield Message(message.role, message.content)
    if not data.prompt:
        raise _needs(name, f"a user who begins task {data.idx}")


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by the weighted rewards of the task. The score's parts are the unweighted rewards and the task's
    metrics."""
    v1 = import_module(f"{PACKAGE}.v1")
    tasks = _taskset(str(ground_truth["taskset"]), str(ground_truth["options"]))
    kind = type(tasks).task_type()
    task = kind(kind.data_type().model_validate_json(str(ground_truth["task"])), tasks.config.task)
    state = import_module(f"{PACKAGE}.v1.state").state_cls(kind)()
    about = v1.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash)
    trace = v1.Trace(task=about, agent=v1.AgentInfo(config=v1.AgentConfig()), state=state, is_completed=True, ok=True)
    texts = [(message.role, message.content) for message in _messages(str(ground_truth["taskset"]), task.data)]
    kinds = {"system": v1.SystemMessage, "user": v1.UserMessage, "assistant": v1.AssistantMessage}
    for place, (role, content) in enumerate([*texts, ("assistant", response)]):
        is_sampled = place == len(texts)
        parent = place - 1 if place else None
        trace.nodes.append(v1.MessageNode(parent=parent, message=kinds[role](content=content), sampled=is_sampled))
    await_value(task.score(trace))
    parts = {name: value for name, value in trace.metrics.items() if value is not None}
    parts |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return Score(trace.reward, parts)


@cache
def _taskset(name: str, options: str) -> Any:
    try:
        v1, generic = (import_module(f"{PACKAGE}.v1{part}") for part in ("", ".utils.generic"))
        kind = resolve_name(name)
        if not (isinstance(kind, type) and issubclass(kind, v1.Taskset)):
            raise TypeError(f"{name} is no subclass of verifiers.v1.Taskset")
        config = generic.concrete_type(kind, v1.TasksetConfig, origin=v1.Taskset) or v1.TasksetConfig
        tasks: Any = kind(config.model_validate(json.loads(options)))
    except Exception as error:  # a user's module can raise anything
        raise DataError(
            "data.taskset: must name a taskset as module:Class, with fields of its config in data.taskset_options; got "
            f"{name!r} with {options} ({type(error).__name__}: {error}). {MODULE_REMEDY}."
        ) from error
    module = name.partition(":")[0]
    for own in (sys.modules[module], sys.modules[module.partition(".")[0]]):
        for exported in (getattr(own, each, None) for each in getattr(own, "__all__", ())):
            if isinstance(exported, type) and issubclass(exported, v1.Env | v1.Harness):
                raise _needs(name, f"{exported.__name__} of its package")
    return tasks


def _require_no_harness(name: str, tasks: Any, task: Any) -> None:
    v1, kind = import_module(f"{PACKAGE}.v1"), type(task)
    for own, base in ((kind, v1.Task), (type(tasks), v1.Taskset)):
        overridden = {hook for each in own.__mro__[: own.__mro__.index(base)] for hook in vars(each)}
        if found := sorted(overridden.intersection(_HOOKS)):
            raise _needs(name, f"a harness for its method {found[0]}")
    if kind.NEEDS_CONTAINER:
        raise _needs(name, "a container")
    for hook in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise _needs(name, f"a runtime for {hook.__name__}")
    if not task.hooks("reward") and not task.plugged_judges():
        raise _needs(name, "a reward, and has none")


def _needs(name: str, what: str) -> DataError:
    return DataError(
        f"data.taskset: must have tasks with a prompt and rewards of the response alone; {name} needs {what}. Take "
        "another taskset, or write an environment (docs/environments.md)"
    )
