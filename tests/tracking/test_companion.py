"""The process that delivers a run, as its trainer starts it."""

import sys
from pathlib import Path

import pytest

from rlcore.config import TrackingConfig
from rlcore.tracking.companion import Companion


def test_a_companion_that_cannot_be_started_is_told_and_forgiven(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "executable", str(run_dir / "no-python"))
    companion = Companion(run_dir, TrackingConfig())
    for _ in range(10):
        companion.ensure_running()
    assert not companion.finish(1.0)
    assert caplog.text.count("cannot be started") == 3


def test_the_delivery_takes_no_module_from_the_working_directory(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "argparse.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    companion = Companion(run_dir, TrackingConfig())
    companion.ensure_running()
    companion.finish(60.0)
    assert not (tmp_path / "imported").exists()
