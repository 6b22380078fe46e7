"""What a torch wheel can run, from what GPU and wheel say of themselves."""

import pytest

from rlcore.workers.device import unsupported_gpu

CUDA_11 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "held"),
    [
        ((9, 0), CUDA_11),
        ((8, 9), CUDA_11),  # sm_86 code runs on 8.9
        ((12, 0), CUDA_13),
        ((10, 3), CUDA_13),
        ((13, 0), CUDA_13),  # compiled from compute_120 when first used
        ((9, 0), ["sm_90a"]),
        ((9, 0), []),  # a build that does not say
    ],
)
def test_a_wheel_with_code_for_the_gpu_is_taken(capability, held):
    assert unsupported_gpu("GPU", capability, held, "2.13.0") is None


@pytest.mark.parametrize(
    ("capability", "held"),
    [
        ((12, 0), CUDA_11),
        ((10, 0), CUDA_11),
        ((8, 0), ["sm_86"]),
        ((9, 0), ["sm_100", "compute_100"]),
        ((10, 3), ["sm_100a"]),
        ((1, 0), ["sm_100"]),
    ],
)
def test_another_is_refused(capability, held):
    assert unsupported_gpu("GPU", capability, held, "2.13.0")


def test_for_a_gpu_that_new_wheels_have_dropped_an_older_one_is_advised():
    message = unsupported_gpu("Tesla V100", (7, 0), CUDA_13, "2.13.0")
    assert message is not None
    assert "Install an older torch, or one built for an older CUDA" in message
    assert "names sm_70" in message
    assert "newer" not in message


def test_the_message_names_gpu_capability_wheel_and_what_to_install():
    message = unsupported_gpu("NVIDIA GeForce RTX 5090", (12, 0), CUDA_11, "2.5.1+cu118")
    assert message is not None
    for part in ("RTX 5090", "12.0", "sm_120", "2.5.1+cu118", ", ".join(CUDA_11), "torch 2.7", "CUDA 12.8"):
        assert part in message
