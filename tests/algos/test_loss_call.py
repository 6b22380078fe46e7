"""Trial of custom losses and advantages before training."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.algos.loss_call import (
    bind_advantage,
    bind_policy_loss,
    check_results,
    gradient_problem,
    loss_problem,
    main,
    require_advantage,
    require_policy_loss,
)
from rlcore.algos.losses import PolicyLoss
from rlcore.config.algo import POLICY_LOSSES, AlgoConfig
from rlcore.errors import ConfigError, UserCodeError
from rlcore.models.memory import OutOfMemory, catch_out_of_memory
from rlcore.workers.group import LocalGroup
from tests.helpers.small_run import prepare, train

HEAD = """
import torch
from dataclasses import replace
from types import SimpleNamespace
from rlcore.algos.losses import PolicyLoss, ppo_clip
def loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings):
    found = ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)
"""


Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A function that writes an importable module and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_module(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write_module


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_built_in_losses_pass(name: str) -> None:
    require_policy_loss(AlgoConfig(policy_loss=name))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("found", None),
        ("replace(found, loss=2 * found.loss)", None),
        ("found.loss", "returns Tensor on two responses of three tokens"),
        ("SimpleNamespace(loss=found.loss)", "returns SimpleNamespace"),
        ("replace(found, loss=found.loss.detach())", "returns a loss without a gradient"),
        ("replace(found, loss=(found.loss - found.loss.detach()).detach() + 0 * found.loss)", "has no gradient"),
        ("replace(found, loss=found.loss / 0)", "is not finite"),
        ("1 / 0", r"raises ZeroDivisionError: division by zero \(.*own_loss.py:8\)"),
    ],
)  # fmt: skip
def test_custom_loss_is_tried(returned: str, message: str | None, write: Write) -> None:
    settings = AlgoConfig(policy_loss=f"{write('own_loss', f'{HEAD}    return {returned}')}:loss")
    if message is None:
        require_policy_loss(settings)
        return
    with pytest.raises(ConfigError, match=rf"algo\.policy_loss: .* got own_loss:loss, which .*{message}.*must return"):
        require_policy_loss(settings)


SEEN = """
import torch
from rlcore.algos.losses import ppo_clip
seen = []
def loss(*values, behavior_logprobs, entropy, group_ids, settings):
    seen.extend([*values, behavior_logprobs, entropy, group_ids])
    return ppo_clip(*values, settings=settings)
def advantage(scores, group_ids, *, lengths, parts, part_weights):
    seen.extend([scores, group_ids, lengths, parts, part_weights])
    return scores
"""


def test_the_trial_data_are_consistent(write: Write) -> None:
    """A custom function may rely on every relation of the values that training gives it."""
    name = write("own_seen", SEEN)
    require_policy_loss(AlgoConfig(policy_loss=f"{name}:loss"))
    policy, old, advantages, mask, sequence_ids, num_sequences, behavior, entropy, groups = sys.modules[name].seen
    assert {len(one) for one in (policy, old, advantages, mask, sequence_ids, behavior, entropy)} == {6}
    assert (sequence_ids.tolist(), num_sequences, groups.tolist()) == ([0, 0, 0, 1, 1, 1], 2, [0, 0])
    assert mask.tolist() == [False, True, True] * 2
    assert bool((policy < 0).all() & (old <= 0).all() & (behavior <= 0).all() & (entropy >= 0).all())
    assert advantages.unique_consecutive().tolist() == [1.0, -1.0]
    sys.modules[name].seen.clear()
    require_advantage(AlgoConfig(advantage=f"{name}:advantage"))
    scores, group_ids, lengths, parts, part_weights = sys.modules[name].seen
    assert group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert {len(scores), len(lengths), len(parts)} == {6}
    assert parts.shape[1] == len(part_weights) == 2
    assert {(0.0, 1.0), (1.0, 0.0)} == {tuple(row) for row in parts.tolist()}
    assert bool((lengths >= 1).all())
    assert all(0 < scores[group_ids == group].mean() < 1 for group in (0, 1)), "both groups have an advantage"


@pytest.mark.parametrize(("changes", "message"), [
    ({"loss": torch.tensor(1.0)}, r"returns loss of shape \[\] and torch.float32, not of one float a token"),
    ({"clipped": torch.zeros(6)}, r"returns clipped of shape \[6\] and torch.float32, not of one bool a token"),
    ({"log_ratio": None}, "returns NoneType as log_ratio"),
])  # fmt: skip
def test_loss_field_of_wrong_shape_is_rejected(changes: dict[str, Any], message: str) -> None:
    """Tests check every constructor's types; a run does not."""
    found = object.__new__(PolicyLoss)
    fields = {name: torch.zeros(6) for name in ("loss", "log_ratio")}
    masks = {name: torch.zeros(6, dtype=torch.bool) for name in ("clipped", "clipped_lower")}
    for name, value in (fields | masks | changes).items():
        object.__setattr__(found, name, value)
    assert re.search(message, gradient_problem(found, torch.zeros(6)))
    with pytest.raises(UserCodeError, match=rf"^algo\.policy_loss: mine:loss {message}"):
        check_results(lambda policy: found, "algo.policy_loss", "mine:loss", loss_problem)(torch.zeros(6))


LATE = """import torch
from dataclasses import replace
from rlcore.algos.losses import ppo_clip
def inner(values):
    torch.cat([values, None])
def loss(policy_logprobs, *tensors, settings):
    if len(policy_logprobs) > 6:
        inner(policy_logprobs)
    return ppo_clip(policy_logprobs, *tensors, settings=settings)
def advantage(scores, group_ids):
    return scores[: max(6, len(scores) - 1)].double()
"""


def test_late_error_names_setting_function_and_line(tmp_path: Path, write: Write) -> None:
    write("own_late", LATE)
    run = prepare(tmp_path, "algo.policy_loss=own_late:loss", "warm_start.enabled=false")
    group = LocalGroup(run.config, str(run.model_directory))
    try:
        require_policy_loss(run.config.algo)
        message = re.escape("algo.policy_loss: own_late:loss raises TypeError: ")
        place = re.escape(f"({tmp_path}/own_late.py:5)")
        with pytest.raises(UserCodeError, match=rf"(?m)^{message}.* {place}$"):
            train(run, group, 1)
        short = prepare(tmp_path, "algo.advantage=own_late:advantage", "warm_start.enabled=false")
        require_advantage(short.config.algo)
        with pytest.raises(
            UserCodeError, match=r"(?m)^algo\.advantage: own_late:advantage returns 31 values for 32 responses$"
        ):
            train(short, group, 1)
    finally:
        group.close()


def test_out_of_memory_in_custom_loss_is_recognized() -> None:
    def loss(values: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    call = check_results(loss, "algo.policy_loss", "mine:loss", loss_problem)
    assert isinstance(catch_out_of_memory(lambda: call(torch.zeros(6))), OutOfMemory)


OWN = """
import torch
from typing import Annotated
from pydantic import Field
from rlcore.algos.losses import PolicyLoss, ppo_clip
def loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings,
         width: Annotated[float, Field(gt=0)] = 0.5, rounds: int, behavior_logprobs, entropy, group_ids):
    found = ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)
    seen.append((width, rounds, behavior_logprobs, entropy, group_ids))
    return found
seen = []
"""


@pytest.fixture
def own(write: Write) -> str:
    """A loss with options and named tensors, in a separate file."""
    return f"{write('own_options', OWN)}:loss"


def test_custom_loss_gets_options_and_named_tensors(own: str) -> None:
    settings = AlgoConfig(policy_loss=own, policy_loss_options={"rounds": 3})
    tensors = [torch.zeros(6, requires_grad=True), torch.zeros(6), torch.ones(6), torch.ones(6, dtype=torch.bool)]
    given = {"behavior_logprobs": torch.ones(6), "entropy": torch.full((6,), 2.0), "group_ids": torch.tensor([4, 4])}
    bind_policy_loss(settings, given)(*tensors, torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    [(width, rounds, behavior, entropy, groups)] = sys.modules["own_options"].seen
    assert (width, rounds) == (0.5, 3)
    assert behavior is given["behavior_logprobs"]
    assert entropy is given["entropy"]
    assert groups is given["group_ids"]


@pytest.mark.parametrize(("name", "options", "message"), [
    ("own", {}, r"algo\.policy_loss_options\.rounds: is missing; got nothing\. loss has width, rounds"),
    ("own", {"rounds": 1.5}, r"policy_loss_options\.rounds: must be a valid integer.*; got 1\.5"),
    ("own", {"rounds": 1, "width": -1}, r"policy_loss_options\.width: must be greater than 0; got -1"),
    ("own", {"rounds": 1, "width": "inf"}, r"policy_loss_options\.width: must be a finite number; got inf"),
    ("own", {"rounds": 1, "width": -1, "widht": 1}, r"2 problems in the settings:\n  1\. .*_options\.width"),
    ("own", {"rounds": 1, "widht": 1},
     r"options\.widht: there is no such option; got 1\. Did you mean width\? .* has width, rounds"),
    ("sapo", {"tau": 1.0}, r"options\.tau: there is no such option.*sapo has tau_pos, tau_neg"),
    ("ppo_clip", {"tau": 1.0}, "ppo_clip has no options"),
])  # fmt: skip
def test_wrong_loss_option_is_reported(name: str, options: dict[str, Any], message: str, own: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_policy_loss(AlgoConfig(policy_loss=own if name == "own" else name, policy_loss_options=options))


def test_custom_advantage_gets_options_and_lengths() -> None:
    settings = AlgoConfig(advantage="tests.algos.custom_loss:scaled", advantage_options={"factor": 3})
    require_advantage(settings)
    scores, lengths = torch.tensor([1.0, 0.0]), torch.tensor([4, 16])
    given = {"lengths": lengths, "parts": scores[:, None], "part_weights": torch.ones(1)}
    found = bind_advantage(settings, **given)(scores, torch.tensor([0, 0]))
    assert found.tolist() == [3 * 0.5 / 2, 3 * -0.5 / 4]


@pytest.mark.parametrize(("options", "message"), [
    ({"factor": 0}, r"algo\.advantage_options\.factor: must be greater than 0; got 0\. scaled has factor"),
    ({"lengths": 1}, r"algo\.advantage_options\.lengths: there is no such option"),
])  # fmt: skip
def test_wrong_advantage_option_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_advantage(AlgoConfig(advantage="tests.algos.custom_loss:scaled", advantage_options=options))


@pytest.mark.parametrize(("returned", "message"), [
    ("scores.tolist()", "returns list"),
    ("scores.sum()", r"returns shape \[\] and torch.float32"),
    ("scores[:-1]", "returns 5 values for 6 responses"),
    ("scores > 0", r"returns shape \[6\] and torch.bool"),
    ("scores[None]", r"returns shape \[1, 6\] and torch.float32"),
    ("scores / 0", "returns what is not finite"),
    ("1 / 0", r"raises ZeroDivisionError: division by zero \(.*own_advantage.py:1\)"),
])  # fmt: skip
def test_wrong_advantage_result_is_reported(returned: str, message: str, write: Write) -> None:
    write("own_advantage", f"def advantage(scores, group_ids): return {returned}")
    with pytest.raises(ConfigError, match=rf"algo\.advantage: .* got own_advantage:advantage, which .*{message}"):
        require_advantage(AlgoConfig(advantage="own_advantage:advantage"))


@pytest.mark.parametrize(("settings", "code", "message"), [
    (AlgoConfig(), None, ""),
    (AlgoConfig(advantage="tests.algos.custom_loss:scaled"), None, ""),
    (AlgoConfig(advantage="builtins:len"), 1, "algo.advantage: must be an advantage to train with; got builtins:len"),
    (AlgoConfig(policy_loss="builtins:len"), 1, "algo.policy_loss: must be a loss to train with; got builtins:len"),
    (AlgoConfig(policy_loss="sapo", policy_loss_options={"tau": 1.0}), 2, "algo.policy_loss_options.tau: there is"),
])  # fmt: skip
def test_trial_exit_codes(settings, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(settings.model_dump_json()))
    if code is None:
        main()
    else:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    out = capsys.readouterr().out
    assert out.startswith(message)
    assert bool(out) == bool(message)
