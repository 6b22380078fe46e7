"""What the model of step 0 depends on, and what not."""

from pathlib import Path

import pytest

from rlcore.config.compose import load_config
from rlcore.run.inputs import start_model_fingerprint
from rlcore.storage.publish import read_manifest
from tests.small_run import prepare

FILTERED = Path("filtered/0123456789abcdef")


def fingerprint_with(*overrides: str, filtered: Path = FILTERED) -> str:
    return start_model_fingerprint(load_config(["experiment=debug", *overrides]), filtered)


@pytest.mark.parametrize(
    "override",
    [
        "seed=77",
        "model.scratch.num_layers=5",
        "model.dtype=bfloat16",
        "warm_start.lr=0.5",
        "warm_start.stop_at_reward=0.77",
        "rollout.max_response_tokens=17",
        "rollout.sampling.temperature=0.5",
        "rollout.sampling.top_p=0.5",
        "data.scorer=tests.run.harmful:never_ends",
    ],
)
def test_what_changes_the_start_model_changes_its_fingerprint(override: str) -> None:
    assert fingerprint_with(override) != fingerprint_with()


def test_an_edited_scorer_is_another_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = set()
    for reward in ("0.5", "1.0"):
        (tmp_path / "edited_scorer.py").write_text(f"def score(response, truth):\n    return {reward}\n")
        found.add(fingerprint_with("data.scorer=edited_scorer:score"))
    assert len(found) == 2


def test_the_rows_count_and_what_it_does_not_read_does_not() -> None:
    assert fingerprint_with(filtered=Path("filtered/fedcba9876543210")) != fingerprint_with()
    unread = ("optim.lr=0.5", "rollout.max_num_seqs=3", "reward.deadline_s=9", "validation.sampling.temperature=0.5")
    assert fingerprint_with(*unread) == fingerprint_with()


def test_another_temperature_is_another_warm_start(tmp_path: Path) -> None:
    """The same demonstrations, measured by other answers: each stops where its own reward says."""
    short = ("warm_start.max_steps=300", "warm_start.check_every=10")
    found = []
    for temperature in ("1.0", "0.01"):
        run = prepare(tmp_path, *short, f"rollout.sampling.temperature={temperature}")
        manifest = read_manifest(run.model_directory)
        assert manifest is not None
        found.append((manifest.values["steps"], manifest.values["reward"]))
    assert found[0] != found[1]
