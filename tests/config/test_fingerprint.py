"""Dependence of fingerprints on every key."""

from pathlib import Path

import pytest

from rlcore.config import CountdownData, RunConfig, data
from rlcore.config import fingerprint as fingerprints
from rlcore.config.base import covers, leaves
from rlcore.config.fingerprint import changed_settings, fingerprint, fixed_settings, may_change, settings_fingerprint
from rlcore.config.run import all_keys, section_names
from tests.helpers.settings import changed

# Every section is there: a critic, adapters, a schedule that reads the number of steps.
FULL = {"critic": {"optim": {"schedule": "cosine"}}, "model": {"lora": {}}, "tags": {"owner": "me"}}
FULL["algo"] = {"advantage": "gae", "teacher": {"path": "a/teacher"}}
TASKS = {task: FULL | {"data": {"task": task}} for task in data.TASKS}
COUNTS_WITH = {"warm_start.enabled": {"warm_start.steps_per_chunk"}}
"""Other settings that count only with a key."""
CHANGEABLE = [
    (task, key)
    for task, base in TASKS.items()
    for key in [name for name in leaves(RunConfig.model_validate(base).model_dump()) if not name.startswith("tags.")]
    if (task == "countdown" or key.startswith("data.")) and key != "data.task"
] + [("countdown", "tags")]
STEPS = [{"trainer": {"total_steps": steps}} for steps in (100, 200)]


def lasting(config: RunConfig) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in fixed_settings(config).items()}


@pytest.mark.parametrize(("task", "key"), CHANGEABLE)
def test_fingerprint_changes_with_every_fixed_key(task, key):
    before, after = RunConfig.model_validate(TASKS[task]), changed(TASKS[task], key)
    same = settings_fingerprint(before) == settings_fingerprint(after)
    assert same == any(key == may or key.startswith(f"{may}.") for may in may_change())
    differing = {name for name, _ in lasting(before) ^ lasting(after)}
    assert bool(differing) != same
    assert all(covers(key, name) for name in differing - COUNTS_WITH.get(key, set()))


def test_keys_tasks_and_exceptions_are_complete():
    assert {key for _, key in CHANGEABLE} == all_keys().keys() - {"data.task"}
    prints = {settings_fingerprint(RunConfig.model_validate(base)) for base in TASKS.values()}
    assert len(prints) == len(TASKS)
    assert may_change() <= {*all_keys(), *section_names()}
    assert {"paths", "tags", "critic.optim.offload", "rollout.memory_share"} <= may_change()


@pytest.mark.parametrize(("sections", "free"), [
    ({}, True), ({"optim": {"warmup_steps": 5}}, True), ({"critic": {}}, True),
    ({"optim": {"schedule": "cosine"}}, False), ({"optim": {"warmup_ratio": 0.1}}, False),
    ({"critic": {"optim": {"schedule": "linear"}}}, False),
])  # fmt: skip
def test_total_steps_may_change_without_schedule(sections, free):
    short, long = (RunConfig.model_validate(sections | steps) for steps in STEPS)
    assert fingerprints.total_steps_may_change(short) == free
    assert (settings_fingerprint(short) == settings_fingerprint(long)) == free
    changed = {("trainer.total_steps", "100"), ("trainer.total_steps", "200")}
    assert lasting(short) ^ lasting(long) == (set() if free else changed)


@pytest.mark.parametrize(("warm_start", "may_change"), [
    ({"enabled": True}, False),
    ({"enabled": True, "stop_at_reward": 0.3}, True),
    ({"enabled": True, "held_out_rows": 0}, True),
    ({"enabled": True, "max_steps": 20}, True),  # one chunk
    ({"enabled": False}, True),
])  # fmt: skip
def test_warm_start_chunks_count_if_best_is_chosen(warm_start, may_change):
    runs = [RunConfig(warm_start=warm_start | more) for more in ({}, {"steps_per_chunk": 20})]
    usual, shorter = map(settings_fingerprint, runs)
    assert (usual == shorter) == may_change


def test_fingerprint_is_pinned():
    """A changed fingerprint would make every finished run and dataset be made again."""
    content = {"b": [1, 2.5, None, True], "a": "ü"}
    for payload in (content, dict(reversed(content.items()))):
        assert fingerprint("data", payload) == "1753bb32d13d5981"
    assert fingerprint("data", [{"x": content}]) == fingerprint("data", [{"x": dict(reversed(content.items()))}])
    assert len({fingerprint(stage, payload) for stage in ("a", "b") for payload in (1, "1", [1], None, {})}) == 10
    section = CountdownData()
    assert fingerprint("x", section) == fingerprint("x", section.model_dump(mode="json"))


@pytest.mark.parametrize("payload", [object(), {"a": 1j}, float("nan")])
def test_fingerprint_rejects_other_values(payload):
    with pytest.raises((TypeError, ValueError), match=r"pass plain values|JSON compliant"):
        fingerprint("x", payload)


def test_run_ids():
    config = RunConfig(name="mine", seed=7)
    assert (found := fingerprints.run_id(config)) == f"mine-s7-{settings_fingerprint(config)[:8]}"
    assert fingerprints.run_id(config.model_copy(update={"run_id": "given"})) == "given"
    elsewhere = RunConfig.model_validate({"name": "mine", "seed": 7, "paths": {"root": "other"}})
    assert fingerprints.run_directory(elsewhere) == Path("other/runs") / found


def test_changed_settings_differ_from_defaults():
    config = RunConfig.model_validate(
        {"optim": {"lr": 0.5}, "algo": {"kl": {"where": "loss"}}, "trainer": {"total_steps": 7, "batch_size": 8},
         "rollout": {"max_num_seqs": 3}}
    )  # fmt: skip
    assert changed_settings(config, "optim", "algo.kl") == {"optim.lr": 0.5, "algo.kl.where": "loss"}
    assert changed_settings(config, "trainer") == {"trainer.batch_size": 8}, "their number may change"
    assert changed_settings(config, "rollout", "opti") == {}


def test_fixed_settings_of_parts_have_no_seed():
    part = {"data": {"task": "countdown"}}
    suites = {"suites": [{"name": "x", **part}]}
    config = RunConfig.model_validate({"data": {"task": "mixture", "parts": [part, part]}, "validation": suites})
    lasting = fixed_settings(config)
    assert [one["data"]["task"] for one in lasting["data.parts"]] == ["countdown"] * 2
    assert "seed" not in str(lasting["data.parts"])
    assert "validation.suites" not in lasting
