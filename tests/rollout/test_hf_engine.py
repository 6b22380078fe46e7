"""The transformers engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from rlcore.batching.pack import pack
from rlcore.config import ModelConfig, RunConfig, SamplingConfig, ScratchModel
from rlcore.errors import DeviceMemoryError, EngineError
from rlcore.models.load import build_scratch_model, load_policy
from rlcore.models.policy import CausalPolicy
from rlcore.models.tokenizer import end_of_text_ids
from rlcore.rollout.engine import SamplingRequest, make_requests
from rlcore.rollout.hf import HfEngine, build_engine, sample
from rlcore.types import Prompt, Rollout, Score

CPU = torch.device("cpu")
SCRATCH = ScratchModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_integer=20)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_scratch_model(SCRATCH, seed=1, directory=tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model_directory: Path) -> CausalPolicy:
    return load_policy(model_directory, model=ModelConfig(), device=CPU)


@pytest.fixture
def engine(model_directory: Path, policy: CausalPolicy) -> HfEngine:
    own = load_policy(model_directory, model=ModelConfig(), device=CPU)
    engine = HfEngine(own, eos_token_ids=end_of_text_ids(model_directory), max_num_seqs=64)
    engine.update_weights(policy.model.named_parameters(), version=0)
    return engine


def some_requests(num_prompts: int = 6, num_samples: int = 4) -> list[SamplingRequest]:
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(index, tuple(rng.integers(3, 30, size=rng.integers(2, 7)).tolist()), "countdown", "{}")
        for index in range(num_prompts)
    ]
    return make_requests(prompts, num_samples, run_seed=1, stream=1, step=5)


def test_logprobs_match_packed_policy(engine: HfEngine, policy: CausalPolicy) -> None:
    rollouts = engine.generate(some_requests(), SamplingConfig(temperature=0.7), 8)
    batch = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    inputs = (batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.target_ids, batch.loss_mask)
    found = policy(*inputs, temperature=0.7, entropy="none")
    torch.testing.assert_close(found.logprobs.detach(), batch.behavior_logprobs, atol=1e-5, rtol=0)


def ids_of(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [tuple(rollout.response_ids.tolist()) for rollout in rollouts]


def test_response_is_independent_of_other_requests(engine: HfEngine) -> None:
    requests = some_requests()
    together = engine.generate(requests, SamplingConfig(), 8)
    order = np.random.default_rng(0).permutation(len(requests))[:9]
    apart = engine.generate([requests[i] for i in order], SamplingConfig(), 8)
    assert ids_of(apart) == [ids_of(together)[i] for i in order]
    assert len(set(ids_of(together))) > len(requests) // 2


def refuses_more_than(bound: int, engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate out-of-memory at the third token of larger batches, and return the sizes of started batches."""
    decode, sizes = engine._policy.decode, []

    def decoded(token_ids: Tensor, mask: Tensor, *others: object) -> Tensor:
        if token_ids.shape[1] > 1:
            sizes.append(len(token_ids))
        elif len(token_ids) > bound:
            torch.empty(1 << 60, dtype=torch.uint8)
        return decode(token_ids, mask, *others)

    monkeypatch.setattr(engine._policy, "decode", decoded)
    return sizes


def test_out_of_memory_halves_batch_size(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests, sampling = some_requests(5, 5), SamplingConfig()
    expected = engine.generate(requests, sampling, 8)
    begun = refuses_more_than(7, engine, monkeypatch)
    found = engine.generate(requests, sampling, 8)
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)
    assert "ran out of memory with 25 concurrent responses, and continues with 13" in caplog.text
    assert "with 13 concurrent responses, and continues with 7" in caplog.text
    assert len(begun) == 2 + 4, "each failure costs one batch, and the size is remembered"
    begun.clear()
    engine.generate(requests, sampling, 8)
    assert len(begun) == 4


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ([1, 3, 3, 3], [4, 4]),  # three of four continue: no rebuild
        ([1, 1, 3, 3], [2, 2]),
        ([1, 2, 3, 4], [4, 2, 1]),
        ([1, 1, 1, 1], []),
        ([2, 2, 2, 2], [4]),
    ],
)
def test_finished_rows_leave_batch(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch, limits: list[int], rows: list[int]
) -> None:
    engine._eos_token_ids = frozenset()
    decode, decoded = engine._policy.decode, list[int]()

    def watched(token_ids: Tensor, *others: Tensor) -> Tensor:
        decoded.extend([len(token_ids)] * (token_ids.shape[1] == 1))
        return decode(token_ids, *others)

    monkeypatch.setattr(engine._policy, "decode", watched)
    requests = [replace(one, max_tokens=limit) for one, limit in zip(some_requests(1, 4), limits, strict=True)]
    found = engine.generate(requests, SamplingConfig(), 8)
    assert [len(rollout.response_ids) for rollout in found] == limits
    assert decoded == rows


def test_out_of_memory_with_single_response_is_an_error(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses_more_than(0, engine, monkeypatch)
    with pytest.raises(DeviceMemoryError, match=r"a single response .*allocate.*rollout.max_response_tokens"):
        engine.generate(some_requests(), SamplingConfig(), 8)


def test_response_ends_with_end_token_or_limit(engine: HfEngine, model_directory: Path) -> None:
    (end,) = end_of_text_ids(model_directory)
    engine.policy_version = 7
    rollouts = engine.generate(some_requests(12, 8), SamplingConfig(), 20)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert rollout.policy_version == 7
        assert end not in rollout.response_ids[:-1]
        assert (rollout.response_ids[-1] == end) == (rollout.finish_reason == "stop")
        assert len(rollout.response_ids) == len(rollout.behavior_logprobs)
        assert rollout.finish_reason == "stop" or len(rollout.response_ids) == 20


def test_greedy_takes_most_likely_tokens(engine: HfEngine, policy: CausalPolicy) -> None:
    request = some_requests(1, 1)[0]
    (rollout,) = engine.generate([request], SamplingConfig(temperature=0.0), 5)
    tokens = list(request.prompt.token_ids)
    for expected in rollout.response_ids:
        ids = torch.tensor([tokens])
        logits = policy.decode(ids, torch.ones_like(ids), torch.arange(len(tokens))[None], DynamicCache())
        assert int(logits.argmax()) == expected
        tokens.append(expected)


def test_incomplete_weight_sync_leaves_no_valid_weights(engine: HfEngine, policy: CausalPolicy) -> None:
    weights = dict(policy.model.named_parameters())
    missing = sorted(weights)[0]
    with pytest.raises(EngineError, match=missing):
        engine.update_weights([(k, v) for k, v in weights.items() if k != missing], version=1)
    with pytest.raises(EngineError, match="before its first weight sync"):
        engine.generate(some_requests(), SamplingConfig(), 4)
    with pytest.raises(EngineError, match="no parameter 'nonsense'"):
        engine.update_weights([("nonsense", torch.zeros(1))], version=1)


def test_sampling_follows_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    tokens, logprobs = sample(logits.expand(10_000, 4), uniforms, SamplingConfig(temperature=0.5))
    expected = torch.softmax(logits[0] / 0.5, dim=0)
    counted = torch.bincount(tokens, minlength=4) / 10_000
    torch.testing.assert_close(counted, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs.exp(), expected[tokens])


def test_top_p_keeps_smallest_set() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    uniforms = torch.linspace(0, 0.999, 500)
    for top_p, allowed in [(0.49, {0}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})]:
        tokens, _ = sample(logits.expand(500, 4), uniforms, SamplingConfig(top_p=top_p))
        assert set(tokens.tolist()) == allowed


def test_request_may_have_lower_limit(engine: HfEngine) -> None:
    requests = some_requests(num_prompts=2, num_samples=3)
    limits = [1, 4, 99, 0, 2, 7]
    limited = [replace(request, max_tokens=limit) for request, limit in zip(requests, limits, strict=True)]
    free = engine.generate(requests, SamplingConfig(), 8)
    for limit, whole, cut in zip(limits, free, engine.generate(limited, SamplingConfig(), 8), strict=True):
        assert ids_of([cut])[0] == ids_of([whole])[0][: limit or None], "truncated, and otherwise equal"
        assert cut.finish_reason == (
            "length" if len(cut.response_ids) < len(whole.response_ids) else whole.finish_reason
        )
        assert not cut.is_cut, "a limit is no tail cut"


def test_engine_dtype_differs_from_trainer(model_directory: Path, policy: CausalPolicy, engine: HfEngine) -> None:
    config = RunConfig().model_copy(update={"model": ModelConfig(dtype="bfloat16")})
    exact, rounded = (
        build_engine(config, str(model_directory), device=CPU, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    answers = []
    for own in (engine, exact, rounded):
        own.update_weights(policy.model.named_parameters(), version=0)
        found = own.generate(some_requests(), SamplingConfig(), 6)
        answers.append(np.concatenate([rollout.behavior_logprobs for rollout in found]))
    assert np.array_equal(answers[0], answers[1])
    assert answers[2].shape != answers[0].shape or not np.array_equal(answers[0], answers[2])
