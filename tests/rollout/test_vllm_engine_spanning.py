"""The real vLLM over several ranks, run by `vllm_spanning` in separate processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.real_vllm import real_vllm, run_vllm
from tests.rollout.vllm_spanning import NUM_RANKS, WRONG, write_models

pytestmark = real_vllm(timeout_s=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spanning")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Any]]:
    _run("ranks", folder)
    return {
        part: [json.loads((folder / f"{part}-{rank}.json").read_text(encoding="utf-8")) for rank in range(NUM_RANKS)]
        for part in ("tied", "untied", "canary")
    }


def _run(what: str, folder: Path) -> None:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # before its import
    run_vllm("tests.rollout.vllm_spanning", what, str(folder), timeout_s=500, **quiet)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_ranks_get_responses_to_their_requests(ranks: dict[str, list[Any]], kind: str) -> None:
    first, second = ranks[kind]
    assert (len(first["shares"]), len(second["shares"])) == (12, 20)
    assert first["in_order"]
    assert second["in_order"]
    assert first["versions"] == second["versions"] == [7]
    assert max(first["difference"], second["difference"]) < 1e-4, "one key-value head per rank, or a shared one"
    everyones = first["shares"] + second["shares"]
    assert first["first rank alone"] == everyones
    assert second["second rank alone"] == everyones
    assert second["first rank alone"] == first["second rank alone"] == first["no rank"] == second["no rank"] == []


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_ranks_of_an_engine_cut_at_the_same_tokens(ranks: dict[str, list[Any]], kind: str) -> None:
    cuts = [rank["cut"] for rank in ranks[kind]]
    whole = [length for cut in cuts for length in cut["whole"]]
    bound = sorted(max(whole[i : i + 4]) for i in range(0, 32, 4))[3]
    assert [cut["bound"] for cut in cuts] == [bound, bound]
    assert sum(any(cut["is_cut"]) for cut in cuts) >= 1
    for cut in cuts:
        assert all(cut["prefixes"])
        assert cut["logprobs_off"] < 1e-5
        for length, full in zip(cut["lengths"], cut["whole"], strict=True):
            assert length >= min(full, bound)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_ranks_compare_their_shards(ranks: dict[str, list[Any]], kind: str) -> None:
    for rank in ranks[kind]:
        assert rank["shared_memory"] == [], "a killed worker would leave it behind"
        assert rank["differing_when_right"] == []
        wrong = {name.removeprefix("the head, tied to ") for name in rank["differing_when_wrong"]}
        assert wrong == set(rank["sent"])


def test_wrong_tensor_on_one_rank_stops_all(ranks: dict[str, list[Any]]) -> None:
    for rank in ranks["canary"]:
        assert rank["right"] < 1e-4
        assert "rollout.canary_bound" in rank["wrong"]
        assert f"Tensors that differ (1): {WRONG}." in rank["wrong"]
        assert rank["right again"] < 1e-4


@pytest.mark.lengthy  # Ray's workers: runtime/test_ray.py; the engine over ranks: above
def test_ray_workers_train_with_shared_engine(folder: Path) -> None:
    _run("training", folder)
    steps = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_mean"] < 1e-4
        assert metrics["training/canary_logprob_diff"] < 1e-4
        assert metrics["actor/grad_norm"] >= 0
