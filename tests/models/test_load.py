"""Errors of loading, and local paths without network access."""

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, OlmoConfig, PreTrainedConfig
from transformers import Lfm2Config as LfmConfig

from rlcore.config.model import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.load import TESTED, load_policy, load_value_model
from rlcore.models.tokenizer import end_of_text_ids, load_tokenizer
from tests.models.tiny import CPU, inputs_of, make_batch, policy_of, write_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model("qwen2-tied", tmp_path / "model")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        pytest.fail(f"connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def refused(path: Path | str, *fragments: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_policy(path, model=ModelConfig(), device=CPU)
    message = str(caught.value)
    assert message.startswith("model.path: ")
    for fragment in (str(path), *fragments):
        assert fragment in message


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_load_policy_in_float32_training_mode(
    directory: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(directory)
    capfd.readouterr()
    with caplog.at_level(logging.INFO, logger="rlcore.models.load"):
        policy = load_policy(directory, model=ModelConfig(), device=CPU)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.training
    assert "attention sdpa" in caplog.text
    assert "Loading weights" not in capfd.readouterr().err


def test_models_loaded_twice_are_described_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), "model.extra": torch.zeros(2)}, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, logger="rlcore.models.load"):
        for _ in range(2):
            load_policy(directory, model=ModelConfig(), device=CPU)
        load_value_model(directory, model=ModelConfig(), device=CPU)
    ignored, policy, value = [record.message for record in caplog.records if record.name == "rlcore.models.load"]
    assert ignored.startswith(f"model.path: {directory}: 1 weights are ignored, first model.extra, because ")
    assert policy.startswith(f"CausalPolicy {directory}: attention sdpa (")
    assert value.startswith(f"ValueModel {directory}: attention sdpa (")


def test_load_policy_expands_home(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    batch = make_batch((4, 3))
    found, expected = (
        load_policy(path, model=ModelConfig(), device=CPU)(*inputs_of(batch), temperature=1.0, entropy="none").logprobs
        for path in ("~/model", directory)
    )
    assert torch.equal(found, expected)


def leave_out_a_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def bring_own_code(directory: Path) -> None:
    edit_config(directory, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (directory / "own.py").write_text("raise SystemExit('ran')")


def cut_off(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no JSON": (lambda at: (at / "config.json").write_text("{"), ("must be JSON", "Copy the directory again")),
    "unknown architecture": (lambda at: edit_config(at, model_type="no_such_kind"), ("no_such_kind",)),
    "code": (bring_own_code, ()),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), ("weights",)),
    "a weight": (leave_out_a_weight, ("1 missing keys", "model.layers.1.mlp.up_proj.weight")),
    "cut off": (cut_off, ("must be whole safetensors files", "Copy the directory again")),
    "another shape": (lambda at: edit_config(at, intermediate_size=64), ()),
    "scaled logits": (lambda at: edit_config(at, final_logit_softcapping=30.0), ("final_logit_softcapping=30.0",)),
}


@pytest.mark.parametrize(("path", "fragments"), [
    *((path, ("neither", "Check the spelling")) for path in ("./missing", "/missing/model", "a/b/c", "plain-name")),
    ("no-such-owner-of-models/and-no-such-model", ("hub", "Check the path")),
    (__file__, ("must be a model directory",)),
    (str(Path(__file__).parent), ("config.json",)),
])  # fmt: skip
def test_path_without_model_raises(path: str, fragments: tuple[str, ...]) -> None:
    refused(path, *fragments)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_model_raises(directory: Path, damage: str) -> None:
    do, fragments = DAMAGE[damage]
    do(directory)
    refused(directory, *fragments)


def test_config_dropout_is_disabled(directory: Path) -> None:
    edit_config(directory, attention_dropout=0.5)
    batch = make_batch((4, 3))
    policy = policy_of(directory)
    first, second = (policy(*inputs_of(batch), temperature=1.0, entropy="none").logprobs for _ in range(2))
    assert torch.equal(first, second)


def test_missing_tokenizer_raises(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .*tokenizer_config\.json"):
        load_tokenizer(directory)


def test_end_of_text_ids_come_from_generation_config_then_config(directory: Path) -> None:
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert end_of_text_ids(directory) == frozenset({3, 5})
    file.unlink()
    assert end_of_text_ids(directory) == frozenset({1})
    file.write_text('{"eos_token_id": [3, 5')
    with pytest.raises(ModelError, match=rf"model\.path: {file} must be JSON, got: .* Copy the directory again"):
        end_of_text_ids(directory)
    file.unlink()
    edit_config(directory, eos_token_id=None)
    with pytest.raises(ModelError, match="tokenizer"):
        end_of_text_ids(directory)


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 31, "bos_token_id": 1, "eos_token_id": 1}
ATTENTION = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}


def save(config: PreTrainedConfig, directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_untested_architecture_loads_if_packing_is_exact(tmp_path: Path) -> None:
    config = OlmoConfig(**TINY, **ATTENTION, initializer_range=0.3)
    assert config.model_type not in TESTED
    assert load_policy(save(config, tmp_path), model=ModelConfig(), device=CPU).training


@pytest.mark.parametrize(("config", "fragments"), [
    (LfmConfig(**TINY, **ATTENTION, layer_types=["conv", "full_attention"], initializer_range=0.3),
     ("packed sequences as on each alone",)),
    (Gemma2Config(**TINY, **ATTENTION, head_dim=8, final_logit_softcapping=None, attn_logit_softcapping=1.0),
     ("caps attention scores",)),
    (GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0),
     ("GPT2Model", "Llama or Qwen")),
], ids=["stateful", "capped", "no layers"])  # fmt: skip
def test_untrainable_architecture_raises(config: PreTrainedConfig, fragments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model\.path: ") as caught:
        load_policy(save(config, tmp_path), model=ModelConfig(), device=CPU)
    assert all(fragment in str(caught.value) for fragment in fragments)
