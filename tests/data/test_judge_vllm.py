"""A real vLLM server as judge: its texts are read, one that is no verdict gives no score, a wrong key is refused."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.config.rollout import JudgeConfig, RewardConfig
from rlcore.rollout.scoring import ScoringPool
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


def settings(url: str) -> RewardConfig:
    judge = JudgeConfig(
        url=url, model="judge", key_variable="JUDGE_KEY", prompt="{response}", max_tokens=24, deadline_s=60
    )
    return RewardConfig(num_processes=2, deadline_s=65, judge=judge)


def test_what_a_real_model_writes_without_a_score_is_no_verdict(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with ScoringPool(JUDGE, settings(url)) as pool:
        (prose,) = pool.score([ASKED], ["{}"])
    assert "must end with its one score; it has 0 in" in str(prose.failure)


def test_a_wrong_key_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "another")
    with ScoringPool(JUDGE, settings(url)) as pool:
        (score,) = pool.score([ASKED], ["{}"])
    assert "status 401" in str(score.failure)
