"""What is said before a run starts where its engine cannot."""

import sys

import pytest
import torch

from rlcore.errors import EngineError
from rlcore.rollout.vllm import require_vllm
from rlcore.rollout.vllm.start import unsupported_dtype


def test_a_missing_vllm_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say that there is none
    with pytest.raises(EngineError, match=r"rollout\.engine: vllm is not installed.*-e '\.\[vllm\]'.*install-vllm"):
        require_vllm()


def test_a_type_without_kernels_on_a_gpu_is_named_with_the_gpu() -> None:
    message = unsupported_dtype("Tesla T4", (7, 5), torch.bfloat16)
    assert message is not None
    for part in ("rollout.dtype", "Tesla T4", "7.5", "8.0", "rollout.dtype=float32", "rollout=hf"):
        assert part in message
    assert unsupported_dtype("Tesla T4", (7, 5), torch.float32) is None
    assert unsupported_dtype("NVIDIA A100", (8, 0), torch.bfloat16) is None
