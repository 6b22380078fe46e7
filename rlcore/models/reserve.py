"""Memory that torch keeps of a GPU for what comes next."""

import torch


def give_back_reserve() -> None:
    """Give it back to the device; without a GPU in use nothing happens.

    The device ends its work first. Where segments grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) torch waits
    for the stream alone on which a block was taken; gradients, taken on FSDP's, are read by the optimizer on another.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
