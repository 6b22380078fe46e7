"""Peak memory of a rank without a sleeping engine's. Python's own bytes are counted here."""

import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from rlcore.workers.measure import Bytes, MemoryMeter, gpu_peak

MB = 1_000_000


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peak() -> Bytes:
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    return Bytes(most, most)


def test_memory_peak_excludes_sleeping_engine(traced: None) -> None:
    pool = bytearray(20 * MB)  # always counted, as vLLM's is by torch
    meter = MemoryMeter(peak, lambda: len(pool))
    meter.set_engine_asleep(False)
    del [bytearray(2 * MB)][0]  # generation
    meter.set_engine_asleep(True)
    meter.set_engine_asleep(True)  # before each pass
    del [bytearray(15 * MB)][0]  # the update
    assert meter.peak().allocated == pytest.approx(22 * MB, rel=0.02)
    meter.set_engine_asleep(False)
    del [bytearray(5 * MB)][0]
    assert meter.peak().allocated == pytest.approx(25 * MB, rel=0.02)
    meter.set_engine_asleep(True)
    del [bytearray(30 * MB)][0]
    assert meter.peak() == meter.peak()
    assert meter.peak().allocated == pytest.approx(30 * MB, rel=0.02)
    assert meter.peak().reserved == meter.peak().allocated


def test_allocated_and_reserved_peaks_are_separate() -> None:
    """Unmapped bytes are subtracted from both only while the engine sleeps."""
    peaks = iter([Bytes(5, 9), Bytes(11, 12), Bytes(8, 20), Bytes(1, 1), Bytes(30, 30)])
    meter = MemoryMeter(lambda: next(peaks), lambda: 6)
    meter.set_engine_asleep(False)  # it was awake
    assert meter.peak() == Bytes(5, 9)
    meter.set_engine_asleep(True)
    assert meter.peak() == Bytes(11, 14)
    meter.set_engine_asleep(False)
    assert meter.peak() == Bytes(30, 30)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="there is a GPU in use")
def test_gpu_peak_without_gpu_is_zero() -> None:
    assert gpu_peak() == Bytes(0, 0)
