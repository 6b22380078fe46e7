"""A tiny transformers Qwen2 with an optimizer, and states to compare bit by bit."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rlcore.checkpoint.shards import rank_shards
from rlcore.models.memory import OffloadedAdamW
from tests.models.tiny import CONFIGS, VOCAB


class SmallModel(nn.Module):
    """Qwen2 with tied embeddings of an odd number of rows, which are split unevenly, a persistent buffer, and a head of
    one row, which only one rank holds."""

    def __init__(self, seed: int, *, hidden_size: int = 32, tied: bool = True) -> None:
        super().__init__()
        config = CONFIGS["qwen2-tied"]()
        config.update({"hidden_size": hidden_size, "tie_word_embeddings": tied})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = AutoModelForCausalLM.from_config(config)
            self.value_head = nn.Linear(hidden_size, 1, bias=False)
        self.register_buffer("num_seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        output = self.model(input_ids=token_ids, output_hidden_states=True)
        self.num_seen += 1
        return output.logits.logsumexp(-1).mean() + self.value_head(output.hidden_states[-1]).square().mean()


def build(
    seed: int, mesh: DeviceMesh | None = None, *, offload: bool = False, **shape: object
) -> tuple[SmallModel, torch.optim.AdamW]:
    model = SmallModel(seed, **shape)
    if mesh is not None:
        for layer in model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    kind = OffloadedAdamW if offload else torch.optim.AdamW
    return model, kind(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Take training steps on the same tokens in every process and call."""
    token_ids = torch.arange(24).reshape(2, 12) % VOCAB
    for _ in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        model(token_ids).backward()
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the whole state that a checkpoint must restore, from torch's state dicts."""
    found = {f"model.{name}": whole(value).clone() for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"lr.{number}": torch.tensor(group["lr"]), f"decay.{number}": torch.tensor(group["weight_decay"])}
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{names[parameter]}.{key}"] = whole(value).clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two states are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert digest(found[name]) == digest(value), name


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def save_shards(directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Write this rank's shards into `directory`."""
    rank_shards(model, optimizer).write(directory)
