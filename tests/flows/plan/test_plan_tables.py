"""The printed plan: lines and sizes."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.plan.plan import DiskBudget, RunPlan, memory_note, show_memory, show_plan
from flows.stages.stage import StageStatus
from rlcore.storage.disk import RoomReport, size, unit_for
from rlcore.workers.memory_plan import CONTEXT_BYTES, Device, MemoryPlan

PHASES = {
    "generation": {"engine: weights": 2_000_000_000, "engine: cache": 500_000_000},
    "policy update": {"policy: gradients": 1_234_000_000, "engine: weights": 0},
    "weight sync": {"engine: weights": 40_000_000},
}
UNKNOWN = MemoryPlan(Device("a GPU", 2, None), PHASES, 1_000_000_000)


def card(usable_bytes: int, floor_bytes: int = 1_000_000_000) -> MemoryPlan:
    return MemoryPlan(Device("a card", 2, usable_bytes + CONTEXT_BYTES), PHASES, floor_bytes)


PLAN = RunPlan(
    run_id="debug-1",
    run_dir=Path("/root/runs/debug-1"),
    settings_fingerprint="aaaa",
    code_fingerprint="bbbb",
    stages=(
        StageStatus("dataset", "cccc", Path("/d"), True, "16 train"),
        StageStatus("filter", None, None, False, "after its tokenizer is built"),
        StageStatus("train", "dddd", Path("/c"), True, "step 0-20"),
        StageStatus("train", "dddd", Path("/c"), False, "step 20-40"),
        StageStatus("train", "dddd", Path("/c"), False, "step 40-50"),
    ),
    committed_step=20,
    total_steps=50,
    disk=DiskBudget(
        checkpoint_bytes=3_000_000_000,
        num_checkpoints=2,
        reserve_bytes=1_000_000_000,
        needed_bytes=4_000_000_000,
        free_bytes=5_500_000_000,
        file_systems=(
            RoomReport(Path("/root"), 6_000_000_000, 1_000_000_000, 5_500_000_000),
            RoomReport(Path("/shm"), 2_000_000, 0, 2_000_000),
        ),
    ),
    memory=None,
    warm_start_memory=None,
    published_model=None,
    versions={"python": "3.11.7", "flow.numpy": "2.4.6"},
)


def test_rows_are_not_cut_without_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = "starts from " + "/a/long/path" * 12 + "/[bold]model"
    show_plan(replace(PLAN, stages=(replace(PLAN.stages[0], detail=long), *PLAN.stages[1:])), as_json=False)
    assert f"{long}\n" in capsys.readouterr().out


def test_plan_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(replace(PLAN, warning="warning: few rows"), as_json=False)
    out, err = capsys.readouterr()
    head, titles, *rest = out.splitlines()
    assert err == ""
    assert head == "run debug-1 in /root/runs/debug-1, settings aaaa, code bbbb"
    assert (titles[:6], rest[0][:8]) == ("stage ", "dataset ")
    assert titles.split() == ["stage", "fingerprint", "state", "what"]
    assert rest[0].split() == ["dataset", "cccc", "done", "16", "train"]
    assert " ".join(rest[1].split()) == "filter not known yet to do after its tokenizer is built"
    assert rest[2].split(maxsplit=4) == ["train", "dddd", "to", "do", "1 of 3 done; to do: step 20-40, step 40-50"]
    assert rest[3:] == [
        "training: committed step 20 of 50",
        "disk: a checkpoint 3.0 GB, at most 2 at a time, 1.0 GB in reserve: 4.0 GB still needed, 5.5 GB free",
        "  /root: 6.0 GB to write on this file system, 5.5 GB free; MISSING 1.5 GB",
        "  /shm: 2.0 MB to write on this file system, 2.0 MB free",
        "versions: python 3.11.7, flow.numpy 2.4.6",
        "warning: few rows",
        "memory: no plan: the model's config.json is not on this machine, or of an unknown kind",
    ]


def test_long_list_of_chunks_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    def row(*stages: StageStatus) -> str:
        show_plan(replace(PLAN, stages=stages), as_json=False)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train "))
        return line.rstrip()

    one_by_one = [StageStatus("train", "dddd", None, False, f"step {step}-{step + 1}") for step in range(20)]
    assert row(*one_by_one[:5]).endswith("0 of 5 done; to do: step 0-1, step 1-2, step 2-3, step 3-4, step 4-5")
    shown = "step 0-1, step 1-2, step 2-3, step 3-4, step 4-5, step 5-"
    assert len(shown) == 57
    assert row(*one_by_one[:6]).endswith(f"to do: {shown}...")
    assert row(*(replace(one, cached=True) for one in one_by_one)).endswith("done   20 of 20 done")


def test_unknown_parts_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    disk = replace(PLAN.disk, checkpoint_bytes=None)
    show_plan(replace(PLAN, disk=disk, published_model="org/model", memory=UNKNOWN), as_json=False)
    out = capsys.readouterr().out
    assert "\ndisk: a checkpoint unknown before the first, at most 2 at a time, " in out
    assert "\nmodel: org/model is not on this machine; sizes are planned from its published config.json\n" in out
    assert "Install" not in out
    assert "memory:" not in out


def test_memory_table_has_phases_parts_and_sums(capsys: pytest.CaptureFixture[str]) -> None:
    show_memory(card(77_400_000_000))
    title, columns, rows = capsys.readouterr().out.partition("\npart ")
    assert " ".join(title.split()) == "Memory of a card, 77.4 GB of it for tensors, GB by phase"
    columns, *lines, note = rows.splitlines()
    assert " ".join(columns.split()) == "generation policy update weight sync"
    assert [line.rstrip() for line in lines] == [
        "engine: weights         2.000          0.000        0.040",
        "engine: cache           0.500",
        "policy: gradients                      1.234",
        "sum                     2.500          1.234        0.040",
    ]
    assert note == "memory: fits, generation needs 2.5 GB"
    show_memory(UNKNOWN)
    title, _, rows = capsys.readouterr().out.partition("\npart ")
    assert " ".join(title.split()) == "Memory of a GPU, GB by phase"
    assert len(rows.splitlines()) == 5


def test_memory_note() -> None:
    assert memory_note(card(2_500_000_000)) == "memory: fits, generation needs 2.5 GB"
    assert memory_note(card(2_499_999_999)) == (
        "memory: generation needs 2.5 GB as planned; passes that run out of memory are split (runtime.fit_memory=auto "
        "plans it)"
    )
    assert memory_note(card(2_000_000_000, floor_bytes=2_100_000_000)) == (
        "memory: CANNOT FIT: 2.1 GB even with one longest response per micro-batch"
    )
    assert memory_note(UNKNOWN) == ""


def test_warm_start_memory_is_shown_for_known_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(replace(PLAN, memory=UNKNOWN, warm_start_memory=card(3_000_000_000)), as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == "warm start: memory: fits, generation needs 2.5 GB"
    show_plan(replace(PLAN, memory=UNKNOWN, warm_start_memory=UNKNOWN), as_json=False)
    out = capsys.readouterr().out
    assert "warm start:" not in out
    assert "\npolicy: gradients  " in out


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(PLAN, as_json=True)
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert shown["stages"][1] == asdict(PLAN.stages[1])
    assert shown["disk"]["file_systems"][1]["path"] == "/shm"
    assert shown["versions"] == PLAN.versions
    assert out.startswith('{\n  "run_id": "debug-1",\n  "run_dir": "/root/runs/debug-1",\n')


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(0, "0.0 GB"), (99_999_999, "100.0 MB"), (1e8, "0.1 GB"), (1e5, "0.1 MB"), (99_900, "99.9 kB"), (1, "0.0 kB")],
)
def test_size_has_largest_fitting_unit(num_bytes: float, message: str) -> None:
    assert size(num_bytes) == message
    assert unit_for(num_bytes)[1] == message[-2:]
