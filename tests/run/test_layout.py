"""Folders and files of a run, and obstacles."""

import os
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rlcore.run.layout import RunLayout

FOLDERS = (
    "checkpoints", "answers", "validation", "suites", "failures", "profile", "logs", "model", "model-best", "report",
)  # fmt: skip


def test_require_kinds_accepts_a_run(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, tmp_path / "run")
    layout.require_kinds()
    for name in FOLDERS:
        (layout.run_dir / name).mkdir(parents=True)
    for name in ("settings.json", "metrics.jsonl", "run.lock", "code.diff"):
        (layout.run_dir / name).touch()
    os.mkfifo(layout.run_dir / "pipe.of-mine")
    layout.require_kinds()


def test_require_kinds_names_all_obstacles(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, tmp_path / "run")
    layout.run_dir.mkdir()
    for name in FOLDERS[:-1]:
        (layout.run_dir / name).touch()
    (layout.run_dir / "report").symlink_to("nowhere")
    (layout.run_dir / "metrics.jsonl").mkdir()
    os.mkfifo(layout.run_dir / "run.lock")
    with pytest.raises(DataError) as caught:
        layout.require_kinds()
    wrong = [f"{layout.run_dir}/{name}: must be a folder" for name in FOLDERS]
    wrong += [f"{layout.run_dir}/{name}: must be an ordinary file" for name in ("metrics.jsonl", "run.lock")]
    assert str(caught.value) == f"{'; '.join(wrong)}. Move these away, then start again."
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: must be a folder\. Move these away"):
        RunLayout(tmp_path, tmp_path / "file").require_kinds()
