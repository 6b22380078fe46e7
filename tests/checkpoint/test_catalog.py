"""Listing, finding, pruning and exporting of checkpoints."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.checkpoint.catalog import find_checkpoint, list_checkpoints
from rlcore.checkpoint.export import export_checkpoint
from rlcore.checkpoint.shards import load_shards
from rlcore.config import LoraConfig, ModelConfig, RunConfig
from rlcore.config.model import ScratchModel
from rlcore.errors import CheckpointError
from rlcore.models.lora import add_adapters
from rlcore.models.parallel import full_state
from rlcore.models.scratch import build_scratch_model
from rlcore.models.tokenizer import build_scratch_tokenizer
from tests.checkpoint.small import save_shards
from tests.helpers.checkpoints import save, state_at, store_at
from tests.helpers.published import edit_manifest, flip
from tests.models.tiny import policy_of, write_model


def test_list_includes_broken_checkpoints(tmp_path):
    store = store_at(tmp_path)
    for step, score in ((1, 0.5), (2, None), (3, 0.25), (4, 0.0)):
        save(store, step, score)
    flip(store.path_of(2) / "policy" / "rank.safetensors", 0)
    (store.path_of(3) / "manifest.json").unlink()
    (store.path_of(4) / "state.json").unlink()
    folder = tmp_path / "checkpoints"
    quick = list_checkpoints(folder)
    assert [(row.step, row.verdict) for row in quick] == [
        (1, "not verified"), (2, "not verified"), (3, "broken"), (4, "broken"),
    ]  # fmt: skip
    full = list_checkpoints(folder, verify_hashes=True)
    assert [row.verdict for row in full] == ["verified", "broken", "broken", "broken"]
    assert (full[0].score, full[0].size_bytes > 1000, full[0].reason) == (0.5, True, "")
    assert "rank.safetensors: hash" in full[1].reason
    assert "never finished" in full[2].reason
    assert (full[2].size_bytes, dict(full[2].metrics), full[2].created, full[2].score) == (0, {}, "", None)
    assert [row.size_bytes for row in full[:2]] == [info.size_bytes for info in store.list()[:2]]
    assert [row.settings_fingerprint for row in full] == [store.list()[0].settings_fingerprint] * 2 + [
        "",
        full[0].settings_fingerprint,
    ]
    assert list_checkpoints(tmp_path / "absent") == ()


@pytest.mark.parametrize(("name", "step"), [("2", 2), ("step-000003", 3), ("last", 3), ("best", 1), ("000002", 2)])
def test_find_checkpoint_by_name(tmp_path, name, step):
    store = store_at(tmp_path)
    for number, score in ((1, 0.5), (2, 0.25), (3, None)):
        save(store, number, score)
    assert find_checkpoint(tmp_path / "checkpoints", name).step == step


@pytest.mark.parametrize("name", ["7", "best", "first"])
def test_unknown_name_error_lists_checkpoints(tmp_path, name):
    save(store_at(tmp_path), 1)
    with pytest.raises(CheckpointError, match=f"no checkpoint '{name}'; there are: step-000001"):
        find_checkpoint(tmp_path / "checkpoints", name)
    with pytest.raises(CheckpointError, match="there are: none"):
        find_checkpoint(tmp_path / "absent", "last")


def test_unreadable_checkpoint_error_has_the_reason(tmp_path):
    edit_manifest(save(store_at(tmp_path), 1), format_version=99)
    for name in ("1", "step-000001"):
        with pytest.raises(CheckpointError, match="format_version must be 1, got 99"):
            find_checkpoint(tmp_path / "checkpoints", name)


@pytest.mark.parametrize(
    "lora",
    [None, *(LoraConfig(rank=2, target_modules=("q_proj", "down_proj"), base=base) for base in ("native", "nf4"))],
    ids=["full", "lora", "lora-nf4"],
)
def test_export_is_a_transformers_directory(tmp_path: Path, lora: LoraConfig | None):
    scratch = ScratchModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_integer=20)
    start = build_scratch_tokenizer(scratch, tmp_path / "start")
    size = len(AutoTokenizer.from_pretrained(start))
    build_scratch_model(scratch, vocab_size=size, eos_token_id=1, pad_token_id=0, seed=1, directory=start)
    policy = policy_of(start)
    if lora is not None:
        policy = add_adapters(policy_of(start, lora=lora, dtype="bfloat16"), lora, seed=9)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.25)
    store = store_at(tmp_path)
    with store.writing(state_at(1), {}) as folder:
        save_shards(folder / "policy", model=policy, optimizer=None)
    config = RunConfig(model=ModelConfig(scratch=scratch, lora=lora))
    export_checkpoint(store.list()[0], config, start, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found, expected = dict(model.named_parameters()), dict(full_state(policy))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (tmp_path / "out" / "adapter").is_dir() == (lora is not None)
    if lora is not None:  # over the base as it was trained, in its type
        base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
        import peft  # it imports bitsandbytes, which takes seconds

        peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter", autocast_adapter_dtype=True)
        adapters = {name: value for name, value in base.named_parameters() if "lora_" in name}
        own = {f"{name.removesuffix('weight')}default.weight": value for name, value in policy.model.named_parameters()}
        assert len(adapters) == 4
        assert all(torch.equal(value, own[name]) for name, value in adapters.items())

    flip(next((store.path_of(1) / "policy").glob("*.safetensors")), 500)
    with pytest.raises(CheckpointError, match="hash"):
        export_checkpoint(store.list()[0], config, start, tmp_path / "again")
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
    with pytest.raises(CheckpointError, match=r"over a base with digest .*The model at model\.path has changed"):
        load_shards(saved, model=adapted(1), optimizer=None)
    with pytest.raises(
        CheckpointError, match=r"base with dtype float32, and here it has bfloat16\. Set model\.dtype=float32"
    ):
        load_shards(saved, model=adapted(0, "bfloat16"), optimizer=None)
    in_4_bits = LoraConfig(rank=2, base="nf4")
    with pytest.raises(
        CheckpointError, match=r"base with base native, and here it has nf4\. Set model\.lora\.base=native"
    ):
        load_shards(saved, model=adapted(0, lora=in_4_bits), optimizer=None)
    (saved / "base.json").unlink()
    with pytest.raises(CheckpointError, match=r"base\.json: must name the base"):
        load_shards(saved, model=adapted(0), optimizer=None)
