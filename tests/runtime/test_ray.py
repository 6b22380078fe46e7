"""Ray actors give the numbers of the local worker, and report failures."""

import json
import pickle
import shutil
import stat
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
import torch

from rlcore.batching.pack import pack_demonstrations
from rlcore.batching.prompts import Demonstration
from rlcore.config import ScratchModel
from rlcore.config.compose import load_config
from rlcore.rollout.engine import SamplingRequest
from rlcore.runtime import cluster
from rlcore.runtime.cluster import private_folder, spilled_bytes, store_bytes
from rlcore.runtime.ray import as_array, as_tensor
from rlcore.trainer.metrics import Metrics
from rlcore.types import Prompt, Rollout, TrainBatch
from rlcore.workers.group import LocalGroup
from tests.helpers.forked import run_module
from tests.helpers.small_run import other_model, prepare, train
from tests.runtime.driver import STEPS

WAIT_S = 560  # on a machine that others keep busy too

pytestmark = [pytest.mark.needs_ray, pytest.mark.multiprocess, pytest.mark.timeout(WAIT_S + 40)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def test_object_store_fits_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    small = load_config(["experiment=debug"])
    lengths = small.filter.max_prompt_tokens + small.rollout.max_response_tokens
    answers = cluster.LEAST_STORE_BYTES // lengths // cluster.SENT_BYTES_PER_TOKEN // small.rollout.samples_per_prompt
    large = small.model_copy(update={"trainer": small.trainer.model_copy(update={"batch_size": 4 * answers})})
    needed = 4 * answers * small.rollout.samples_per_prompt * lengths * cluster.SENT_BYTES_PER_TOKEN
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(cluster.psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40))
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: usage._replace(free=2**40))
    assert store_bytes(small) == cluster.LEAST_STORE_BYTES
    assert store_bytes(large) == needed > 3 * cluster.LEAST_STORE_BYTES
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: usage._replace(free=300_000_000))
    assert store_bytes(large) == 300_000_000
    assert spilled_bytes(large) == needed - 300_000_000
    assert spilled_bytes(small) == cluster.LEAST_STORE_BYTES
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: usage._replace(free=64 * 1024**2))  # a container's
    assert store_bytes(large) == cluster.LEAST_STORE_BYTES
    packed = pack_demonstrations([Demonstration((5, 6, 7), (False, True, True))])
    per_token = [getattr(packed, field.name) for field in fields(packed)]
    of_packed = sum(tensor.element_size() for tensor in per_token if len(tensor) == packed.num_tokens)
    assert of_packed >= 29
    others = torch.float32.itemsize * (len(fields(TrainBatch)) - 1)
    assert 2 * of_packed + others <= cluster.SENT_BYTES_PER_TOKEN


def test_pickled_messages_keep_all_fields() -> None:
    prompt = Prompt(3, (5, 6), "countdown", "{}", difficulty=4)
    request = SamplingRequest(prompt, 1, 2**62, max_tokens=9, environment_seed=8)
    ids, logprobs, is_sampled = np.array([7, 8], np.int32), np.array([-0.5, -1], np.float32), np.array([True, False])
    rollout = Rollout(prompt, 1, ids, logprobs, "stop", 2, is_sampled, turn_rewards=((1, 0.5),))
    for sent in (prompt, request, rollout):
        arrived = pickle.loads(pickle.dumps(sent))
        assert type(arrived) is type(sent)
        for field in fields(sent):
            np.testing.assert_array_equal(getattr(arrived, field.name), getattr(sent, field.name))


def in_ray(scenario: str, root: Path, *overrides: str) -> Any:
    out, log = root / "found.json", root / "driver.log"
    arguments = [scenario, str(root), str(out), *overrides]
    assert run_module("tests.runtime.driver", arguments, output=log, timeout_s=WAIT_S) == 0, log.read_text()
    return json.loads(out.read_text())


TAUGHT = ("algo.teacher.with_reward=true", "algo.teacher.top_k=16")


def taught(root: Path) -> str:
    return f"algo.teacher.path={other_model(root, ScratchModel(hidden_size=48, num_layers=2))}"


def here(root: Path, *overrides: str) -> list[Metrics]:
    run = prepare(root, "runtime=local", *overrides)
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        return train(run, group, STEPS)


@pytest.mark.lengthy  # of GRPO: run/test_resume.py
def test_ray_metrics_equal_those_of_a_local_worker(root: Path) -> None:
    """Train with a critic; sums of two ranks are tested in tests/workers."""
    assert in_ray("metrics", root, "algo=ppo") == here(root, "algo=ppo")


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> Any:
    """Results with scoring processes, which stream responses out of the actors."""
    return in_ray("private", root, *TAUGHT, taught(root), "runtime.num_workers=2", "reward.num_processes=1")


def test_two_ranks_reproduce_one(two_ranks: Any, root: Path) -> None:
    local = here(root, *TAUGHT, taught(root))
    assert len(local) == STEPS
    assert local[0]["actor/teacher_kl"] > 0.1
    for number, (expected, found) in enumerate(zip(local, two_ranks["metrics"], strict=True), start=1):
        for name, value in expected.items():
            if not name.startswith("global_seqlen/"):
                # rollout_probs_diff is rounding alone here, some 1e-6 in any case
                atol = 1e-5 if name.startswith("training/rollout_probs_diff") else 1e-6
                assert found[name] == pytest.approx(value, rel=1e-5, abs=atol), f"step {number}: {name}"


def test_private_cluster_is_closed_to_others(two_ranks: Any) -> None:
    listeners = [tuple(one) for one in two_ranks["listeners"]]
    assert {"gcs_server", "raylet", "ray::RankProcess"} <= {name for name, _ in listeners}
    assert {address for _, address in listeners} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listeners
    assert two_ranks["stranger"] == "UNAUTHENTICATED"
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700


def test_rendezvous_is_at_the_node_address(root: Path) -> None:
    """The node's name may resolve to loopback, where another machine finds only itself."""
    rendezvous, of_node = in_ray("rendezvous", root, "warm_start.enabled=false", "runtime.ray_address=auto")
    assert urlparse(rendezvous).hostname == of_node


@pytest.mark.lengthy
def test_killed_and_stopped_workers_are_lost_workers(root: Path) -> None:
    killed, stopped = in_ray("faults", root)
    assert "died" in killed
    assert "runtime.deadlines" in stopped


@pytest.mark.lengthy
def test_killed_rank_in_a_stream_is_the_cause(root: Path) -> None:
    assert "died" in in_ray("stream", root)


@pytest.mark.lengthy
def test_stop_during_the_start_is_handled(root: Path) -> None:
    """Ray installs a handler for SIGTERM that ends its driver."""
    while_ray_starts, while_models_load = in_ray("stop", root)
    assert while_ray_starts.startswith("stopped while Ray was starting")
    assert while_ray_starts.endswith("asked to stop: True")
    assert while_models_load == "started, asked to stop: True"


@pytest.mark.parametrize("tensor", [
    torch.randn(3, 4), torch.randn(3, 4).bfloat16(), torch.randn(4, 6).t()[1:], torch.tensor([True, False]),
    torch.tensor(-7), torch.zeros(0, 3, dtype=torch.float64), torch.nn.Linear(2, 2).weight.sum(0),
], ids=lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')}-{list(tensor.shape)}")  # fmt: skip
def test_tensor_round_trip(tensor: torch.Tensor) -> None:
    found = as_tensor(pickle.loads(pickle.dumps(as_array(tensor))))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert not found.requires_grad
    found.zero_()
