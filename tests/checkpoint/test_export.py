"""Exported weights are a plain transformers directory."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.checkpoint import export
from rlcore.checkpoint.catalog import is_exported
from rlcore.checkpoint.export import export_transformers
from rlcore.config.model import ScratchModel
from rlcore.errors import CheckpointError
from rlcore.models.parallel import full_state
from rlcore.models.scratch import build_scratch_model
from rlcore.models.tokenizer import build_scratch_tokenizer
from rlcore.storage.manifest import verify_directory
from tests.models.tiny import policy_of

SCRATCH = ScratchModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_integer=20)


@pytest.fixture
def initial_policy(tmp_path: Path) -> Path:
    folder = build_scratch_tokenizer(SCRATCH, tmp_path / "start")
    size = len(AutoTokenizer.from_pretrained(folder))
    return build_scratch_model(SCRATCH, vocab_size=size, eos_token_id=1, pad_token_id=0, seed=1, directory=folder)


def trained(initial_policy: Path, shift: float) -> dict[str, torch.Tensor]:
    policy = policy_of(initial_policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(shift)
    return {name: tensor.clone() for name, tensor in full_state(policy)}


@pytest.mark.parametrize("max_file_size", ["5GB", "4KB"])
def test_transformers_loads_the_export(initial_policy, tmp_path, monkeypatch, max_file_size):
    monkeypatch.setattr(export, "MAX_FILE_SIZE", max_file_size)
    weights = trained(initial_policy, 0.25)
    target = export_transformers(weights, initial_policy, tmp_path / "model", facts={"step": 20})
    assert verify_directory(target).values["step"] == 20
    assert (target / "model.safetensors").exists() == (max_file_size == "5GB")
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert model.generation_config.eos_token_id == 1
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer("3 + 4")["input_ids"] == AutoTokenizer.from_pretrained(initial_policy)("3 + 4")["input_ids"]


def test_generation_config_with_warnings_is_copied(initial_policy, tmp_path):
    written = {"eos_token_id": 1, "pad_token_id": -1, "temperature": 0.9, "top_p": 0.6}  # Vicuna's, without do_sample
    (initial_policy / "generation_config.json").write_text(json.dumps(written))
    target = export_transformers(trained(initial_policy, 0.0), initial_policy, tmp_path / "model")
    generation = AutoModelForCausalLM.from_pretrained(target).generation_config
    assert {name: getattr(generation, name) for name in written} == written


def test_later_export_replaces_an_earlier_one(initial_policy, tmp_path):
    for step, shift in ((1, 0.1), (2, 0.2)):
        weights = trained(initial_policy, shift)
        export_transformers(weights, initial_policy, tmp_path / "model", facts={"step": step})
    assert verify_directory(tmp_path / "model").values["step"] == 2
    assert [is_exported(tmp_path / "model", step) for step in (1, 2)] == [False, True]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])


def test_other_folder_is_not_overwritten(initial_policy, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="in the way"):
        export_transformers(trained(initial_policy, 0.0), initial_policy, tmp_path / "model")
    assert (tmp_path / "model" / "thesis.tex").exists()
