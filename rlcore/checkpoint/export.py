"""The export of trained weights as a transformers directory."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import save_torch_state_dict
from pydantic import JsonValue
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from rlcore.checkpoint.catalog import CheckpointInfo, find_checkpoint
from rlcore.checkpoint.shards import BaseRecord, load_shards
from rlcore.config import LoraConfig, RunConfig
from rlcore.errors import CheckpointError
from rlcore.models.load import load_policy
from rlcore.models.lora import add_adapters, write_peft
from rlcore.models.parallel import adapter_state, full_state
from rlcore.models.tokenizer import load_tokenizer
from rlcore.storage.manifest import MANIFEST, verify_directory
from rlcore.storage.publish import published_directory

MAX_FILE_SIZE = "5GB"  # hubs and file systems handle such files well
POLICY = "policy"
ADAPTER = "adapter"


def export_checkpoint(info: CheckpointInfo, config: RunConfig, initial_policy: str | Path, target: Path) -> Path:
    """Write a checkpoint's weights as a transformers directory, in one CPU process. Raises CheckpointError."""
    verify_directory(info.path, error=CheckpointError)
    model, lora = config.model, config.model.lora
    if lora is not None:
        model = model.model_copy(update={"dtype": BaseRecord.read(info.path / POLICY).dtype})
    policy = load_policy(initial_policy, model=model, device=torch.device("cpu"))
    if lora is not None:
        policy = add_adapters(policy, lora, seed=config.seed)  # any seed: they are overwritten below
    load_shards(info.path / POLICY, model=policy, optimizer=None)
    state, adapters = dict(full_state(policy)), dict(adapter_state(policy))
    return export_transformers(state, initial_policy, target, facts={"step": info.step}, lora=lora, adapters=adapters)


def export_transformers(
    policy_state: Mapping[str, Tensor],
    model_dir_for_config: str | Path,
    target: Path,
    *,
    facts: Mapping[str, JsonValue] = MappingProxyType({}),
    lora: LoraConfig | None = None,
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write weights under transformers' names, with the configuration and tokenizer of the initial policy. An earlier
    export is replaced by one rename. `facts`: entries for the manifest. With `lora`, `policy_state` has the merged
    weights, and `adapters` go to the subfolder `adapter` in PEFT's format. Raises DiskSpaceError, CheckpointError if
    `target` cannot be written or is not an export, and ModelError if the tokenizer cannot be read."""
    source = str(model_dir_for_config)
    earlier = (target / MANIFEST).is_file()
    with published_directory(target, {"kind": "model", **facts}, replace=earlier, error=CheckpointError) as folder:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in policy_state.items()}
        save_torch_state_dict(plain, str(folder), max_shard_size=MAX_FILE_SIZE, metadata={"format": "pt"})
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        config.dtype = next(iter(plain.values())).dtype
        config.save_pretrained(folder)
        with suppress(OSError):  # some models have no generation config
            # `save_pretrained` refuses what loading only warns of, such as a temperature without sampling.
            generation = GenerationConfig.from_pretrained(source)
            generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
        load_tokenizer(source).save_pretrained(folder)
        if lora is not None:
            write_peft(adapters, lora, source, folder / ADAPTER)
    return target


if __name__ == "__main__":  # for a command whose environment has no torch
    folder, name, settings, start, place = sys.argv[1:]
    run = RunConfig.model_validate_json(settings)
    export_checkpoint(find_checkpoint(Path(folder), name), run, start, Path(place))
