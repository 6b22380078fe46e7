"""What a fault is called, by the error that it ends a process with; and its line in the run's folder."""

from pathlib import Path

import pytest
import torch

from rlcore.errors import DataError, DiskSpaceError, HangError, NonFiniteError, WorkerLostError
from rlcore.run.faults import FAULTS_FILE, as_ours, fault_of, note_fault, read_faults


def allocation_refused() -> Exception:
    """What torch says where the host has no memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    return caught.value


ERRORS = {
    "host out of memory": MemoryError("no room for a copy"),
    "GPU out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "GPU out of memory, by CUDA": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
    "lost worker": WorkerLostError("rank 1 has ended"),
    "hang": HangError("no end after 60 s"),
    "disk": DiskSpaceError("no room"),
    "data": DataError("a row breaks the schema"),
    "numbers": NonFiniteError("the loss is nan"),
    "error": KeyError("a bug"),
}


@pytest.mark.parametrize("kind", list(ERRORS))
def test_kind_and_phase(kind: str) -> None:
    found = fault_of(as_ours(ERRORS[kind], "gen"), "gen", 7)
    assert str(found) == f"{kind.partition(',')[0]} in gen after step 7"


def test_an_allocation_that_the_host_refuses() -> None:
    ours = as_ours(allocation_refused(), "update_actor")
    assert fault_of(ours, "update_actor", 0).kind == "host out of memory"
    assert "lower runtime.num_workers" in str(ours)


def test_faults_are_kept_in_order_and_a_damaged_line_costs_itself(tmp_path: Path) -> None:
    faults = [fault_of(as_ours(error, "gen"), "gen", step) for step, error in enumerate(ERRORS.values())]
    for fault in faults[:2]:
        note_fault(tmp_path, fault)
    with (tmp_path / FAULTS_FILE).open("ab") as file:
        file.write(b'{"kind": "\xff", "phase": "a bit has flipped"}\n{"kind": "ha')  # and a full disk
    for fault in faults[2:]:
        note_fault(tmp_path, fault)
    assert read_faults(tmp_path) == faults
    assert (tmp_path / FAULTS_FILE).read_bytes().count(b"\n") == len(faults) + 2
