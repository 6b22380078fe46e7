"""What killed clusters have left in Ray's folder goes with the next one; what is alive or young stays."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from rlcore.runtime import folder


def test_only_dead_sessions_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as raylet:
        monkeypatch.setattr(folder, "ray_folder", lambda: Path(short))
        dead, alive, young = (Path(short) / f"session_2026_{name}" for name in ("1", "2", "3"))
        for session in (dead, alive, young):
            (session / "sockets").mkdir(parents=True)
            (session / "sockets" / "plasma_store").touch()
        (Path(short) / "session_latest").symlink_to(dead)
        gone = Path(short) / "session_2026_4"  # another run removes it at this moment: listed, and no more there
        gone.symlink_to(Path(short) / "nowhere")
        raylet.bind(str(alive / "sockets" / "raylet"))
        raylet.listen()
        for session in (dead, alive):
            os.utime(session, (0, 0))
        folder.remove_dead_sessions()
        assert sorted(Path(short).iterdir()) == [alive, young, gone]
