"""Settings for tests, without checks of rules: from words, and with another value under one key."""

from typing import Any, Literal, get_args, get_origin

import yaml

from rlcore.config import RunConfig
from rlcore.config.run import all_keys

HELD = "model.path=some/model"
SHORT = {
    "$FILES": "data.train_file=README.md data.validation_file=README.md reward.num_processes=1",
    "$JUDGE": "data.scorer=data.judge:score reward.num_processes=2 reward.deadline_s=31 reward.judge.model=m "
    "reward.judge.url=http://127.0.0.1:8000/v1",
    "$MIXTURE": "data.task=mixture data.parts=[{data:{task:countdown}},{data:{task:custom}}]",
    "$WEIGHED": "algo.advantage=gdpo reward.weights.correct=1 reward.weights.format=0.5",
    "$GPUS": "rollout.engine=vllm rollout.tensor_parallel_size=2 runtime.backend=ray runtime.num_workers=2",
    "$RAY": "runtime.backend=ray runtime.num_workers=4",
    "$WARM": "warm_start.enabled=true",
}  # words of the cases that stand for others
LITERALS = {
    "data.operations": ["*"],
    "tracking.report_to": ["wandb"],
    "data.options": ["x"],
    "data.taskset_options": {"split": "train"},
    "data.validation_options": {"split": "test"},
    "data.search_tries": 3,
    "validation.suites": [{"name": "x", "data": {"task": "countdown"}}],
    "data.parts": [{"data": {"task": "countdown"}}],
    "model.lora.target_modules": ["q_proj"],
    "tags": {"owner": "you"},
    "data.chat_template_kwargs": {"enable_thinking": False},
    "algo.policy_loss_options": {"width": 1.0},
    "reward.weights": {"correct": 1.0},
    "algo.teacher.by_source": {"gsm8k": "a/b"},
    "algo.advantage_options": {"k": 2},
    "pass_rates.keep": [0.1, 0.9],
    "pass_rates.band": [0.2, 0.8],
}


def settings(words: str, base: str = HELD) -> RunConfig:
    nested: dict[str, Any] = {"data": {"task": "countdown"}}
    for short, long in SHORT.items():
        words = words.replace(short, long)
    for word in [*base.split(), *words.split()]:
        key, _, value = word.partition("=")
        inner = nested
        for part in key.split(".")[:-1]:
            inner = inner.setdefault(part, {})
        # A mapping in braces needs a space after its colons, and words have none; `::` is a colon of a value.
        spaced = value.replace("::", "\0").replace(":", ": ").replace("\0", ":")
        inner[key.rpartition(".")[2]] = yaml.safe_load(spaced if "{" in value else value)
    if nested["data"]["task"] != "countdown":
        own = ("task", "train_file", "validation_file", "parts", "scorer", "taskset")
        nested["data"] = {name: value for name, value in nested["data"].items() if name in own}
    return RunConfig.model_validate(nested)


def other_value(key: str, value: Any) -> list[Any]:
    """Return other values of the key's type, some of which may be out of range."""
    annotation = all_keys()[key][0].annotation
    if key in LITERALS:
        return [LITERALS[key]]
    choices = [
        choice
        for field in all_keys()[key]
        for part in (field.annotation, *get_args(field.annotation))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    if choices:
        # From the end, so that a schedule does not become constant: then the number of steps would not count either.
        return [choice for choice in reversed(choices) if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value / 2, value - 1, value + 0.5, 0.75 * value]
    if isinstance(value, tuple | list):
        return [["a.b:c"]]
    return ["other"] if "str" in str(annotation) else [3.5, 100_000, 0.5]


def changed(base: dict[str, Any], key: str) -> RunConfig:
    config = RunConfig.model_validate(base)
    settings = config.model_dump()
    *outer, last = key.split(".")
    inner = settings
    for part in outer:
        inner = inner[part]
    for value in other_value(key, inner[last]):
        inner[last] = value
        try:
            found = RunConfig.model_validate(settings)
        except ValueError:
            continue
        if found != config:
            return found
    raise AssertionError(f"no other value found for {key}")
