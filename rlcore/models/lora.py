"""Low-rank adapters (LoRA, Hu et al. 2021) by peft: y = W x + (alpha / rank) B A x, with A and B trained alone."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from rlcore.config.model import LoraConfig
from rlcore.errors import ModelError
from rlcore.models.policy import CausalPolicy

_ADAPTER = "default"
_BASE = ".base_layer."


def add_adapters(policy: CausalPolicy, lora: LoraConfig, *, seed: int) -> CausalPolicy:
    """Put adapters into `policy` and freeze all other weights; changes and returns it. Call before `shard`.

    B starts at 0, so the policy is the same function as before; `seed` alone decides A. Raises ModelError where peft
    is missing or a name in `lora.target_modules` is no linear layer of the model.
    """
    try:
        import peft
    except ImportError:
        raise ModelError(
            "model.lora: needs the peft package, which is not installed here. "
            "Install millrace[lora] or leave model.lora empty."
        ) from None
    linear = {
        name.rpartition(".")[2]
        for name, module in policy.model.named_modules()
        if isinstance(module, nn.Linear) and module is not policy.head  # which computes by chunks from its weight alone
    }
    if unknown := [name for name in lora.target_modules if name not in linear]:
        raise ModelError(
            f"model.lora.target_modules: must name linear layers of the decoder, got {', '.join(unknown)}. "
            f"It has {', '.join(sorted(linear))}."
        )
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes a float too
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        device = policy.device
        # Drawn on the CPU, so that the adapters are the same on every kind of device.
        peft.inject_adapter_in_model(settings, policy.model.cpu(), adapter_name=_ADAPTER)
    policy.to(device)
    return policy


def merged_parameters(model: nn.Module, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names they have without adapters, each adapter added to its matrix in float32.

    `gather` makes a (sharded) parameter whole. The adapters themselves are not touched.
    """
    for name, parameter in model.named_parameters():
        owner, is_adapted, rest = name.partition(_BASE)
        if is_adapted and rest == "weight":
            layer = model.get_submodule(owner)
            low, high = (getattr(layer, which)[_ADAPTER].weight for which in ("lora_A", "lora_B"))
            scaling = float(getattr(layer, "scaling")[_ADAPTER])  # noqa: B009 (nn.Module types every attribute as a module)
            whole = gather(parameter)
            delta = gather(high).float() @ gather(low).float()
            yield f"{owner}.weight", whole + (scaling * delta).to(whole.dtype)
        elif is_adapted:
            yield f"{owner}.{rest}", gather(parameter)
        elif ".lora_A." not in name and ".lora_B." not in name:
            yield name, gather(parameter)
