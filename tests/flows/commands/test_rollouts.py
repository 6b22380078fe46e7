"""`millrace rollouts`, `rescore` and `audit` on a run, from another folder, also with wrong words."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from flows.commands import rollouts
from flows.progress import printable
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.by_part import with_scorer
from tests.helpers.running import small
from tests.helpers.sessions import run_to_the_end
from tests.helpers.small_run import SmallRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("rollouts"), steps=2)
    run_to_the_end(run)
    return run


def test_answers_are_shown_as_a_page_and_as_json(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run.layout.run_dir)]
    rollouts.rollouts(words, kind="training", sort="-score", limit=3)
    page = capsys.readouterr().out
    assert page.count("-- step ") == page.count("\n=> ") == 3
    assert page.endswith("3 shown of 64 responses that match, of 256 on record\n")
    rollouts.rollouts(words, step="2", kind="training", limit=0, tokens=True, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [2] * 32
    assert all(len(row["token_ids"]) == len(row["behavior_logprobs"]) == row["num_tokens"] for row in rows)
    assert {"correct", "format"} == rows[0]["parts"].keys()


def test_a_models_text_does_nothing_to_a_terminal() -> None:
    assert printable("\x1b[31mred\x07\u202e") == "\\x1b[31mred\\x07\\u202e"


def test_rescore_and_audit_by_a_custom_scorer(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_scorer.py").write_text("def score(response, truth):\n    return float('+' in response)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, os.fspath(tmp_path)])
    words = [str(run.layout.run_dir)]
    rollouts.rescore(words, scorer="my_own_scorer:score", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["num_answers"] == 256
    assert found["mean_after"] > found["mean_before"]
    rollouts.rescore(words, kind="training", scorer="my_own_scorer:score")
    assert capsys.readouterr().out.startswith("64 responses by my_own_scorer:score: mean ")
    rollouts.audit(words)
    assert "none of the responses that must not score did" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        rollouts.audit(words, scorer="my_own_scorer:score")
    assert ended.value.code == 1
    assert "  response to another problem: " in capsys.readouterr().out


def test_weights_of_a_run_are_those_of_its_own_scorer(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_parts.py").write_text(
        "from rlcore.score import Score\ndef score(response, truth):\n    return Score(1.0, {'half': 0.5})\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, os.fspath(tmp_path)])
    copy = tmp_path / "weighted"
    shutil.copytree(run.layout.run_dir, copy)
    record = json.loads((copy / "run.json").read_text())
    record["settings"]["reward"]["weights"] = {"correct": 3.0}
    (copy / "run.json").write_text(json.dumps(record))

    def means(scorer: str, *weights: str) -> tuple[float, float]:
        rollouts.rescore([str(copy), *weights], scorer=scorer, as_json=True)
        found = json.loads(capsys.readouterr().out)
        return found["mean_before"], found["mean_after"]

    before, by_its_own = means(run.config.data.scorer)
    assert before > 0
    assert by_its_own == pytest.approx(3 * before), "answers of this run score 0 or 1"
    assert means("own_parts:score") == pytest.approx((before, 1.0))
    assert means("own_parts:score", "reward.weights={half: 4, total: 1}") == pytest.approx((before, 3.0))
    assert means(run.config.data.scorer, "reward.weights={correct: 5}") == pytest.approx((before, 5 * before))
    with pytest.raises(ConfigError, match=r"^reward\.weights: must name parts .*, got len\. .*: half, total$"):
        means("own_parts:score", "reward.weights={len: 1}")
    rollouts.rescore([str(copy)], scorer="own_parts:score")
    assert "the run's reward.weights (correct) apply to its own scorer only; the total of own_parts:score is used" in (
        capsys.readouterr().out
    )


def test_a_failing_scorer_is_reported(run: SmallRun) -> None:
    words = [str(run.layout.run_dir)]
    with pytest.raises(DataError, match=r"must score any text, but failed on \d+ responses of the audit"):
        rollouts.audit(words, scorer="math:prod")
    with pytest.raises(DataError, match="must score any text, but failed on all responses"):
        rollouts.rescore(words, scorer="math:prod", as_json=True)


def test_another_scorer_gets_ground_truths_without_scorer_names(run: SmallRun) -> None:
    """A row's own field of that name stays, and the run's own scorer reads it."""
    parts = "data.parts=[{data:{task:countdown}},{data:{task:gsm8k}}]"
    mixture = load_config(["data=mixture", "model.path=some/model", parts])
    named = with_scorer('{"answer": "3"}', "data.gsm8k:score")
    assert rollouts.ground_truth_converter(mixture, "my_own:score")(named) == '{"answer": "3"}'
    for config, scorer in ((mixture, None), (mixture, mixture.data.scorer), (run.config, "my_own:score")):
        assert rollouts.ground_truth_converter(config, scorer)(named) == named


@pytest.mark.parametrize("scorer", ["", "nope"])
def test_a_wrong_scorer_is_reported_by_its_option(run: SmallRun, scorer: str) -> None:
    with pytest.raises(ConfigError, match=f"^--scorer: must name a function as module:function, got '{scorer}'"):
        rollouts.rescore([str(run.layout.run_dir)], scorer=scorer)
    with pytest.raises(ConfigError, match=r"^--scorer: "):
        rollouts.audit([str(run.layout.run_dir)], scorer=scorer)


def test_tokens_are_for_json(run: SmallRun) -> None:
    with pytest.raises(ConfigError, match="--tokens: must come with --json"):
        rollouts.rollouts([str(run.layout.run_dir)], limit=1, tokens=True)


def test_a_run_without_answers_says_why(run: SmallRun) -> None:
    held = run.layout.answers.rename(run.layout.run_dir / "elsewhere")
    try:
        with pytest.raises(DataError, match="has no stored responses, either not yet"):
            rollouts.audit([str(run.layout.run_dir)])
    finally:
        held.rename(run.layout.answers)
