"""A real vLLM server as judge: verdicts for training, a text that is no verdict, and a wrong key."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.config.rollout import JudgeConfig, RewardConfig
from rlcore.errors import UnscoredError
from rlcore.rollout.scoring import ScoringPool
from rlcore.workers.group import LocalGroup
from tests.helpers.small_run import prepare, train
from tests.rollout.real_vllm import real_vllm

pytestmark = [*real_vllm(timeout_s=600), pytest.mark.lengthy]

KEY = "local-key"
JUDGE = "data.judge:score"
ASKED = "Tell me about the sea."


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "judge", "--api-key", KEY, "--max-model-len", "512"]
    command += ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "4"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as server:
        try:
            while not _is_up(port):
                assert server.poll() is None, log.read_text()[-4_000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def settings(url: str, **judge: object) -> RewardConfig:
    given = {"url": url, "model": "judge", "key_variable": "JUDGE_KEY", "prompt": "{response}", "max_tokens": 24}
    asked = JudgeConfig.model_validate({**given, "deadline_s": 60, **judge})
    return RewardConfig(num_processes=2, deadline_s=65, judge=asked)


def test_what_a_real_model_writes_without_a_score_is_no_verdict(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with ScoringPool(JUDGE, settings(url)) as pool:
        (prose,) = pool.score([ASKED], ["{}"])
    assert "must end with its one score; it has 0 in" in str(prose.failure)


def test_with_structured_output_each_answer_of_a_small_model_is_a_verdict(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    reward = settings(url, prompt=JudgeConfig().prompt, highest=4, levels=5, max_tokens=48)
    with ScoringPool(JUDGE, reward) as pool:
        scores = pool.score(["<answer>3 + 4</answer>", "banana"], ['{"numbers": [3, 4], "target": 7}'] * 2)
    assert [score.failure for score in scores] == [None, None]
    assert {score.total for score in scores} <= {0, 0.25, 0.5, 0.75, 1}
    assert [dict(score.parts) for score in scores] == [{"judge": score.total} for score in scores]


def test_verdicts_are_trained_on_and_a_step_without_any_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    asked = (
        f"data.scorer={JUDGE}", "reward.num_processes=2", "reward.deadline_s=65", f"reward.judge.url={url}",
        "reward.judge.model=judge", "reward.judge.key_variable=JUDGE_KEY", "reward.judge.deadline_s=60",
        "reward.judge.max_tokens=48", "reward.judge.highest=4", "trainer.batch_size=1", "trainer.mini_batch_size=1",
        "rollout.samples_per_prompt=2", "warm_start.enabled=false",
    )  # fmt: skip
    run = prepare(tmp_path, *asked)
    refused = pytest.raises(UnscoredError, match="step 1: has no metrics, for 2 responses have no score")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group, refused:
        train(run, group, 1)
    run = prepare(tmp_path, *asked, "reward.judge.levels=5")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        (step,) = train(run, group, 1)
    assert "reward/unscored_share" not in step
    assert 0 <= step["reward/judge/mean"] <= 1
    assert "actor/grad_norm" in step


def test_a_wrong_key_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "another")
    with ScoringPool(JUDGE, settings(url)) as pool:
        (score,) = pool.score([ASKED], ["{}"])
    assert "status 401" in str(score.failure)
