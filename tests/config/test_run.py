"""Methods of the settings, their keys, and the page docs/settings.md."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import RunConfig
from rlcore.config.algo import CriticConfig
from rlcore.config.base import GROUPS, expand_path
from rlcore.config.documents import REFERENCE_FILE, reference
from rlcore.config.model import ModelConfig
from rlcore.config.rollout import ValidationConfig
from rlcore.config.run import PathsConfig, all_keys


@pytest.mark.parametrize(("settings", "answers"), [
    ({"trainer": {"batch_size": 5}, "rollout": {"samples_per_prompt": 3}}, 15),
    ({"trainer": {"batch_size": 5}, "rollout": {"samples_per_prompt": 3}, "runtime": {"num_workers": 2}}, 8),
    ({"trainer": {"batch_size": 5}, "rollout": {"samples_per_prompt": 3, "tensor_parallel_size": 2},
      "runtime": {"num_workers": 4}}, 8),
    ({"trainer": {"batch_size": 5}, "rollout": {"samples_per_prompt": 3, "max_num_seqs": 7}}, 7),
    ({"trainer": {"batch_size": 128}, "rollout": {"samples_per_prompt": 1, "finish_share": 0.9}}, 142),
])  # fmt: skip
def test_concurrent_responses_of_engine(settings: dict[str, Any], answers: int) -> None:
    assert RunConfig.model_validate(settings).concurrent_responses == answers


@pytest.mark.parametrize(("every", "due"), [(0, [0, 5]), (2, [0, 2, 4, 5]), (1, [0, 1, 2, 3, 4, 5]), (9, [0, 5])])
def test_validation_is_due_at_ends_and_intervals(every: int, due: list[int]) -> None:
    validation = ValidationConfig(every_steps=every)
    assert [step for step in range(6) if validation.is_due(step, 5)] == due


def test_home_is_expanded_for_known_users() -> None:
    assert expand_path("~/x") == Path.home() / "x"
    assert expand_path("~nobody77/x") == Path("~nobody77/x")
    assert PathsConfig(root="~/runs").root == str(Path.home() / "runs")
    assert PathsConfig(root="~nobody77/runs").root == "~nobody77/runs"
    for section in (ModelConfig, CriticConfig):
        paths = [section(path=path).path for path in ("~/m", "~nobody77/m", "./m/", "owner/m", None)]
        assert paths == [f"{Path.home()}/m", "~nobody77/m", "./m/", "owner/m", None]


def test_settings_page_is_current_and_has_every_key():
    assert REFERENCE_FILE.read_text(encoding="utf-8") == reference(), "run `make generated`"
    found = [name for name in re.findall(r"(?m)^\| `(.*?)` \|", reference()) if name not in GROUPS]
    assert sorted(found) == sorted(name for name, keys in all_keys().items() for _ in keys)
