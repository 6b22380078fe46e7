"""The value model against the plain trunk, one sequence after another."""

from pathlib import Path

import pytest
import torch

from rlcore.config.model import ModelConfig
from rlcore.models.load import load_value_model
from tests.models.tiny import CPU, assert_close_gradients, gradients, make_batch, plain_model, write_model

LENGTHS = (5, 3, 9, 1, 5)


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-gqa-untied"])
def test_values_and_gradients_equal_the_plain_trunk_with_a_linear_head(kind: str, tmp_path: Path) -> None:
    directory = write_model(kind, tmp_path)
    batch = make_batch(LENGTHS)
    reference = plain_model(directory).model
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(1, 32, generator=generator, requires_grad=True)
    expected = torch.cat(
        [reference(batch.token_ids[part][None]).last_hidden_state[0] @ head[0] + 0.25 for part in batch.slices()]
    )
    (expected * batch.weights).sum().backward()
    for checkpointing in (False, True):
        settings = ModelConfig(gradient_checkpointing=checkpointing)
        value_model = load_value_model(directory, model=settings, device=CPU)
        with torch.no_grad():
            value_model.value_head.weight.copy_(head)
            value_model.value_head.bias.fill_(0.25)
        values = value_model(*batch.inputs[:3])
        assert values.shape == (sum(LENGTHS),)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        (values * batch.weights).sum().backward()
        assert_close_gradients(gradients(value_model.model), gradients(reference))
        torch.testing.assert_close(value_model.value_head.weight.grad, head.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value_model.value_head.bias.grad, batch.weights.sum()[None])


def test_first_values_are_exactly_zero_but_the_head_learns(tmp_path: Path) -> None:
    value_model = load_value_model(write_model("qwen2-tied", tmp_path), model=ModelConfig(), device=CPU)
    batch = make_batch(LENGTHS)
    values = value_model(*batch.inputs[:3])
    assert (values == 0).all()
    (values - 1).square().sum().backward()
    assert (value_model.value_head.weight.grad != 0).all()


def test_half_precision_trunk_keeps_a_float32_head(tmp_path: Path) -> None:
    value_model = load_value_model(write_model("qwen2-tied", tmp_path), model=ModelConfig(dtype="bfloat16"), device=CPU)
    torch.nn.init.normal_(value_model.value_head.weight, generator=torch.Generator().manual_seed(0))
    batch = make_batch(LENGTHS)
    values = value_model(*batch.inputs[:3])
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
