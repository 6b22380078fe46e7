"""What the host reads of a micro-batch stays there: read from the device it would wait for all that runs on that."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _to_kwargs
from torch.nn.modules.module import register_module_forward_pre_hook

from rlcore.models.policy import CausalPolicy, PackedTrunk, ValueModel
from rlcore.runtime.local import LocalGroup
from tests.helpers.small_run import prepare, train

META = torch.device("meta")
"""A device from which nothing can be read."""


def test_bounds_and_mask_stay_on_the_host_under_fsdp(tmp_path: Path) -> None:
    run = prepare(tmp_path, "algo=ppo", "algo.kl.where=reward", "trainer.old_logprobs=recompute")
    calls: list[tuple[PackedTrunk, tuple[Any, ...]]] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, PackedTrunk):
            calls.append((module, arguments))

    group = LocalGroup(run.config, str(run.model_directory))
    hook = register_module_forward_pre_hook(note)
    try:
        train(run, group, 1)
    finally:
        hook.remove()
        group.close()
    assert {type(module) for module, _ in calls} == {CausalPolicy, ValueModel}
    assert len({id(module) for module, _ in calls}) == 3, "policy, reference and critic"
    for module, arguments in calls:
        # What FSDP's root does before its forward.
        ((token_ids, _, bounds, *more),), _ = _to_kwargs(arguments, {}, META, False)
        assert token_ids.device == META, "the tensors went"
        assert len(module.layout(bounds).computed_index) == len(token_ids)
        if len(more) > 1:
            assert torch.as_tensor(more[1]).nonzero().numel() > 0
