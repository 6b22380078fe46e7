"""Peak memory of a rank without a sleeping engine's."""

import pytest
import torch

from rlcore.workers.measure import Bytes, MemoryMeter, gpu_peak


def test_unmapped_bytes_of_sleeping_engine_are_subtracted() -> None:
    peaks = iter([Bytes(5, 9), Bytes(11, 12), Bytes(8, 20), Bytes(1, 1), Bytes(30, 30)])
    meter = MemoryMeter(lambda: next(peaks), lambda: 6)
    meter.set_engine_asleep(False)  # it was awake
    assert meter.peak() == Bytes(5, 9)
    meter.set_engine_asleep(True)
    meter.set_engine_asleep(True)  # before each pass
    assert meter.peak() == Bytes(11, 14)
    meter.set_engine_asleep(False)
    assert meter.peak() == Bytes(30, 30)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="there is a GPU in use")
def test_gpu_peak_without_gpu_is_zero() -> None:
    assert gpu_peak() == Bytes(0, 0)
