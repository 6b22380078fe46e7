"""Exported weights are a plain transformers directory."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.checkpoint import load
from rlcore.checkpoint.catalog import is_exported
from rlcore.checkpoint.load import export_checkpoint, export_transformers, load_shards
from rlcore.config import LoraConfig, ModelConfig, RunConfig
from rlcore.config.model import ScratchModel
from rlcore.errors import CheckpointError
from rlcore.models.load import build_scratch_model
from rlcore.models.lora import add_adapters
from rlcore.models.parallel import full_state
from rlcore.storage.manifest import verify_directory
from tests.checkpoint.small import save_shards
from tests.helpers.checkpoints import state_at, store_at
from tests.helpers.published import flip
from tests.models.tiny import policy_of, write_model

SCRATCH = ScratchModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_integer=20)


@pytest.fixture
def initial_policy(tmp_path: Path) -> Path:
    return build_scratch_model(SCRATCH, seed=1, directory=tmp_path / "start")


def trained(initial_policy: Path, shift: float) -> dict[str, torch.Tensor]:
    policy = policy_of(initial_policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(shift)
    return {name: tensor.clone() for name, tensor in full_state(policy)}


@pytest.mark.parametrize("max_file_size", ["5GB", "4KB"])
def test_transformers_loads_the_export(initial_policy, tmp_path, monkeypatch, max_file_size):
    monkeypatch.setattr(load, "MAX_FILE_SIZE", max_file_size)
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


@pytest.mark.parametrize(
    "lora",
    [None, *(LoraConfig(rank=2, target_modules=("q_proj", "down_proj"), base=base) for base in ("native", "nf4"))],
    ids=["full", "lora", "lora-nf4"],
)
def test_exported_checkpoint_is_a_transformers_directory(tmp_path: Path, initial_policy: Path, lora: LoraConfig | None):
    policy = policy_of(initial_policy)
    if lora is not None:
        policy = add_adapters(policy_of(initial_policy, lora=lora, dtype="bfloat16"), lora, seed=9)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.25)
    store = store_at(tmp_path)
    with store.writing(state_at(1), {}) as folder:
        save_shards(folder / "policy", model=policy, optimizer=None)
    config = RunConfig(model=ModelConfig(scratch=SCRATCH, lora=lora))
    export_checkpoint(store.list()[0], config, initial_policy, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found, expected = dict(model.named_parameters()), dict(full_state(policy))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (tmp_path / "out" / "adapter").is_dir() == (lora is not None)
    if lora is not None:  # over the base as it was trained, in its type
        base = AutoModelForCausalLM.from_pretrained(initial_policy, dtype=torch.bfloat16)
        import peft  # it imports bitsandbytes, which takes seconds

        peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter", autocast_adapter_dtype=True)
        adapters = {name: value for name, value in base.named_parameters() if "lora_" in name}
        own = {f"{name.removesuffix('weight')}default.weight": value for name, value in policy.model.named_parameters()}
        assert len(adapters) == 4
        assert all(torch.equal(value, own[name]) for name, value in adapters.items())

    flip(next((store.path_of(1) / "policy").glob("*.safetensors")), 500)
    with pytest.raises(CheckpointError, match="hash"):
        export_checkpoint(store.list()[0], config, initial_policy, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_adapters_refuse_another_base(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2)

    def adapted(seed: int, dtype: str = "float32", lora: LoraConfig = lora):
        directory = write_model("qwen2-tied", tmp_path / f"model-{seed}", seed=seed)
        return add_adapters(policy_of(directory, lora=lora, dtype=dtype), lora, seed=3)

    policy = adapted(0)
    saved = tmp_path / "saved"
    save_shards(saved, model=policy, optimizer=None)
    written = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    trained = 4 * sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert trained < written < trained + 20_000
    load_shards(saved, model=adapted(0), optimizer=None)
    for message, policy in (
        (r"over a base with digest .*The model at model\.path has changed", adapted(1)),
        (r"dtype float32, and here it has bfloat16\. Set model\.dtype=float32", adapted(0, "bfloat16")),
        (
            r"native, and here it has nf4\. Set model\.lora\.base=native",
            adapted(0, lora=LoraConfig(rank=2, base="nf4")),
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_shards(saved, model=policy, optimizer=None)
    (saved / "base.json").unlink()
    with pytest.raises(CheckpointError, match=r"base\.json: must name the base"):
        load_shards(saved, model=adapted(0), optimizer=None)
