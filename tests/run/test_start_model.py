"""What is known of the model of step 0, and the line that shows it."""

from pathlib import Path
from types import MappingProxyType

import pytest

from rlcore.run.start_model import StartModel
from rlcore.storage.manifest import Manifest


def manifest(**values: object) -> Manifest:
    return Manifest(MappingProxyType(values), ())


def test_a_model_from_elsewhere_has_no_figures() -> None:
    found = StartModel.of(Path("m"), None, cached=True)
    assert (found.directory, found.cached, found.steps, dict(found.figures)) == (Path("m"), True, 0, {})
    assert found.is_over
    assert str(found) == "no supervised steps: training starts from m"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"reward": 0.25, "held_out_loss": 1.23456, "loss": 9}, "reward 0.250, held-out-loss 1.235 after 7 steps"),
        ({"held_out_loss": 2, "accuracy": 0.5, "reward": None}, "held-out-loss 2.000 after 7 steps"),
    ],
)
def test_the_line_shows_reward_and_held_out_loss(values: dict[str, object], shown: str) -> None:
    for cached, skipped in ((True, ", skipped: done before"), (False, "")):
        found = StartModel.of(Path("m"), manifest(steps=7, kind="model", **values), cached=cached)
        assert str(found) == f"{shown}{skipped} (m)"
        assert found.figures == {name: value for name, value in values.items() if value is not None}


def test_a_warm_start_that_is_not_over_says_what_is_saved() -> None:
    assert str(StartModel(Path("m"), False, 3, is_over=False)) == "step 3 is saved"
