"""The chunked head against a naive twin, and its memory."""

import pytest
import torch
from torch import Tensor

from rlcore.models import head
from rlcore.models.head import EntropyMode, likeliest_tokens, token_logprobs_and_entropy
from tests.helpers.head_memory import chunked_over_full
from tests.models.tiny import token_logprob_and_entropy


def make_inputs(num_tokens: int = 11, hidden_size: int = 5, vocab: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(vocab, (num_tokens,), generator=generator)


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_compiled", lambda function: function)  # a compiled run is in test_cuda.py


@pytest.mark.parametrize(
    ("chunk_tokens", "block_elements", "compiled"),
    [(1, 1 << 20, False), (4, 1, False), (4, 40, False), (100, 1 << 20, False), (4, 1 << 20, True)],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("mode", ["none", "value", "grad"])
def test_values_and_gradients_equal_the_naive_twins(
    mode: EntropyMode,
    temperature: float,
    chunk_tokens: int,
    block_elements: int,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values are compared in Python floats, gradients with those of all logits in float64."""
    monkeypatch.setattr(head, "_CPU_BLOCK_ELEMENTS", block_elements)
    hidden, weight, targets = make_inputs()
    options = {"temperature": temperature, "chunk_tokens": chunk_tokens, "entropy": mode, "compiled": compiled}
    out = token_logprobs_and_entropy(hidden, weight, targets, **options)
    assert out.entropy.requires_grad == (mode == "grad")
    for row, target in enumerate(targets.tolist()):
        logprob, entropy = token_logprob_and_entropy(hidden[row].tolist(), weight.tolist(), target, temperature)
        assert out.logprobs[row].item() == pytest.approx(logprob, abs=1e-5)
        assert out.entropy[row].item() == pytest.approx(0 if mode == "none" else entropy, abs=1e-5)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_probs = (wide[0] @ wide[1].t() / temperature).log_softmax(1)
    entropies = -(log_probs.exp() * log_probs).sum(1) if mode == "grad" else torch.zeros(11)
    scale = torch.randn(2, 11, generator=torch.Generator().manual_seed(1))
    (scale[0] * log_probs.gather(1, targets[:, None])[:, 0] + scale[1] * entropies).sum().backward()
    (scale[0] * out.logprobs + scale[1] * out.entropy).sum().backward()
    for found, wanted in zip((hidden, weight), wide, strict=True):
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["none", "grad"])
def test_candidates_equal_further_targets(mode: EntropyMode, compiled: bool) -> None:
    """Values and gradients are those of one call per column. A candidate may be the target too."""
    hidden, weight, targets = make_inputs()
    candidates = torch.stack([targets, (targets + 3) % 13, (targets + 7) % 13], dim=1)
    options = {"temperature": 0.6, "chunk_tokens": 4, "entropy": mode, "compiled": compiled}
    scale = torch.randn(11, 4, generator=torch.Generator().manual_seed(2))

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [hidden, weight]))

    out = token_logprobs_and_entropy(hidden, weight, targets, candidates=candidates, **options)
    assert out.candidates is not None
    total = (scale[:, 0] * out.logprobs).sum() + (scale[:, 1:] * out.candidates).sum() + out.entropy.sum()
    columns = [token_logprobs_and_entropy(hidden, weight, each, **options) for each in (targets, *candidates.T)]
    torch.testing.assert_close(out.candidates, torch.stack([one.logprobs for one in columns[1:]], dim=1))
    expected = (
        sum((scale[:, place] * one.logprobs).sum() for place, one in enumerate(columns)) + columns[0].entropy.sum()
    )
    for found, wanted in zip(gradients(total), gradients(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_likeliest_tokens_equal_naive_twin(chunk_tokens: int) -> None:
    hidden, weight, _ = make_inputs()
    ids, logprobs = likeliest_tokens(hidden, weight, k=3, temperature=0.6, chunk_tokens=chunk_tokens)
    for row in range(len(hidden)):
        every = [
            token_logprob_and_entropy(hidden[row].tolist(), weight.tolist(), token, 0.6)[0]
            for token in range(len(weight))
        ]
        wanted = sorted(range(len(weight)), key=lambda token: -every[token])[:3]
        assert ids[row].tolist() == wanted
        assert logprobs[row].tolist() == pytest.approx([every[token] for token in wanted], abs=1e-5)
    assert likeliest_tokens(hidden[:0], weight, k=3, temperature=1.0, chunk_tokens=4)[0].shape == (0, 3)


def test_head_supports_frozen_inputs() -> None:
    hidden, weight, targets = make_inputs()
    options = {"temperature": 1.0, "chunk_tokens": 4, "entropy": "none"}
    token_logprobs_and_entropy(hidden, weight, targets, **options).logprobs.sum().backward()
    expected_hidden, expected_weight = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    token_logprobs_and_entropy(hidden, weight.detach(), targets, **options).logprobs.sum().backward()
    assert torch.equal(hidden.grad, expected_hidden)
    assert weight.grad is None
    hidden.grad = None
    token_logprobs_and_entropy(hidden.detach(), weight, targets, **options).logprobs.sum().backward()
    assert torch.equal(weight.grad, expected_weight)
    assert hidden.grad is None


def test_head_handles_large_logits() -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    out = token_logprobs_and_entropy(
        hidden, weight, torch.tensor([0, 0]), temperature=1.0, chunk_tokens=2, entropy="grad"
    )
    assert out.logprobs.tolist() == [0.0, -600.0]
    assert out.entropy.tolist() == [0.0, 0.0]
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_head_accumulates_bfloat16_in_float32(compiled: bool) -> None:
    num_tokens = 2_000
    hidden = torch.ones(num_tokens, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(5, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    options = {"temperature": 1.0, "chunk_tokens": 2, "entropy": "value", "compiled": compiled}
    out = token_logprobs_and_entropy(hidden, weight, targets, **options)
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    out.logprobs.sum().backward()
    # 0.8 a token on the target's row. A bfloat16 sum stops at 512, where its step exceeds a chunk.
    assert weight.grad[:, 0].tolist() == pytest.approx([1600.0, *[-400.0] * 4], rel=0.01)


def test_head_temperature_zero_raises() -> None:
    with pytest.raises(ValueError, match="temperature: must be above 0"):
        token_logprobs_and_entropy(*make_inputs(), temperature=0.0, chunk_tokens=4, entropy="none")


def test_head_peak_memory_at_large_vocabulary() -> None:
    """Measure resident memory of real processes, at a sixteenth of the size of `tests/e2e/test_cuda.py`."""
    # Without the entropy's gradient, full logits need least memory, so this is the stricter comparison.
    assert chunked_over_full("value", tokens=512, chunk_tokens=128, hidden=16) <= 1 / 8
