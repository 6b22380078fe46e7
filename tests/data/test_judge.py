"""A model as judge, over real HTTP: its failures cost the answer its score, and nothing else."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.judge import JudgeError, read_verdict, score
from rlcore.config.rollout import JudgeConfig, RewardConfig
from rlcore.rollout.scoring import ScoringPool
from rlcore.rollout.scoring_worker import JUDGE_VARIABLE
from tests.data.judges import GOOD, HOSTILE, Judge, judging
from tests.storage.small_disk import fill
from tests.storage.small_disk import small_disk as small_disk

SECRET = "sk-do-not-tell-1234"
JUDGE = "data.judge:score"


@pytest.fixture(scope="module")
def server() -> Iterator[Judge]:
    with judging() as found:
        yield found


@pytest.fixture
def url(server: Judge) -> str:
    return server.url


def settings(url: str, *, num_processes: int = 4, deadline_s: float = 8, **judge: object) -> RewardConfig:
    given = {"url": url, "model": "judge", "key_variable": "JUDGE_KEY", "deadline_s": 4, **judge}
    return RewardConfig(num_processes=num_processes, deadline_s=deadline_s, judge=JudgeConfig.model_validate(given))


def here(monkeypatch: pytest.MonkeyPatch, reward: RewardConfig, response: str, **truth: str) -> float:
    """A verdict by the scorer in this process: what a process of its own adds is seen in the tests with a pool."""
    monkeypatch.setenv(JUDGE_VARIABLE, reward.judge.model_dump_json())
    return score(response, truth).total


def test_no_broken_judge_gives_a_score_and_each_is_counted(
    server: Judge, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    cases = [*GOOD, *HOSTILE]
    with caplog.at_level(logging.DEBUG), ScoringPool(JUDGE, settings(url)) as pool:
        scores = pool.score([f"an answer, case={case}" for case in cases], ['{"answer": "3"}'] * len(cases))
        counted = pool.unscored[0]
    found = dict(zip(cases, scores, strict=True))
    for case in GOOD:
        assert (found[case].total, dict(found[case].parts), found[case].failure) == (0.75, {"judge": 0.75}, None)
    for case in HOSTILE:
        assert found[case].failure, case
        assert SECRET not in found[case].failure
    assert counted == len(HOSTILE)
    assert SECRET not in caplog.text
    requests = server.seen
    assert "elsewhere" not in requests, "the key went to where a redirection pointed"
    assert [requests[case] for case in ("flaky", "status_500", "closes", "cut_off")] == [3] * 4
    assert [requests[case] for case in ("tag", "wrong_key", "redirect", "out_of_range")] == [1] * 4
    assert "status 401" in str(found["wrong_key"].failure)


@pytest.mark.parametrize(
    ("levels", "highest", "second"), [(2, 1, 1.0), (5, 4, 0.25), (11, 0.6666667, 0.1), (3, 7, 0.5)]
)
def test_structured_output_allows_levels_from_zero_to_the_highest(
    url: str, monkeypatch: pytest.MonkeyPatch, levels: int, highest: float, second: float
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    reward = settings(url, tries=1, levels=levels, highest=highest)
    assert here(monkeypatch, reward, "case=form") == pytest.approx(second, rel=1e-5)


def test_a_file_of_verdicts_is_shared_by_processes(
    server: Judge, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    reward = settings(url, num_processes=2, cache=str(tmp_path / "new" / "verdicts.sqlite"))
    before = server.seen["good"]
    for _ in range(2):
        with ScoringPool(JUDGE, reward) as pool:
            scores = pool.score(["once"] * 4, ["{}"] * 4)
        assert {score.total for score in scores} == {0.75}
    # two processes may ask at once; nobody asks later. One more is the first call, on an empty answer.
    assert server.seen["good"] - before <= 2 + 2


def test_a_verdict_counts_where_the_cache_is_full(url: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with ScoringPool(JUDGE, settings(url, num_processes=1, cache=str(small_disk / "verdicts.sqlite"))) as pool:
        pool.score(["before"], ["{}"])
        fill(small_disk)
        assert [score.total for score in pool.score(["once"], ["{}"])] == [0.75]


def test_rules_beside_the_judge_and_weights_over_both(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    reward = settings(url, num_processes=1, rules="data.countdown:score")
    truth = json.dumps({"numbers": [3, 4], "target": 7})
    with ScoringPool(JUDGE, reward) as pool:
        (score,) = pool.score(["<answer>3 + 4</answer>"], [truth])
    assert (score.total, score.parts["correct"], score.parts["judge"]) == (1.75, 1.0, 0.75)
    weighted = reward.model_copy(update={"weights": {"correct": 2.0, "judge": -1.0}})
    with ScoringPool(JUDGE, weighted) as pool:
        (score, failed) = pool.score(["<answer>3 + 4</answer>", "case=not_a_number"], [truth] * 2)
    assert (score.total, score.parts["total"]) == (1.25, 1.75)
    assert failed.failure, "a rule's score alone is not trained on"


@pytest.mark.parametrize(
    "text",
    ["", "1", '{"score": 1} or so', '{"score": true}', '{"score": "1"}', '{"score": 1e400}', '{"score": 1.0, "x": 2}',
     "<score>one</score>", "<score>1</score><score>1</score>", '{"score": 5}', '{"score": -0.1}'],
)  # fmt: skip
def test_only_one_final_number_in_range_is_a_verdict(text: str) -> None:
    with pytest.raises(JudgeError):
        read_verdict(text, 4)


def test_an_endpoint_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        told = f"no verdict of {address} (reward.judge.url) in 1 tries"
        with pytest.raises(JudgeError, match=re.escape(told)):
            here(monkeypatch, settings(address, tries=1), "1")
