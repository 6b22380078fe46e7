"""Ray's private folder, and removal of killed clusters' sessions."""

import os
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rlcore.errors import ConfigError
from rlcore.runtime import cluster


def test_dead_sessions_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as raylet:
        monkeypatch.setattr(cluster, "ray_folder", lambda: Path(short))
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
        cluster.remove_dead_sessions()
        assert sorted(Path(short).iterdir()) == [alive, young, gone]


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of this user's folder, in a temporary folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield cluster.private_folder()


def test_folder_and_token_are_private(private: Path) -> None:
    private.mkdir()
    private.chmod(0o777)
    environment = cluster.loopback_environment()
    secret = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert [stat.S_IMODE(path.lstat().st_mode) for path in (private, secret)] == [0o700, 0o600]
    assert len(secret.read_text()) == 64
    assert cluster.loopback_environment() == environment
    assert secret.read_text() == Path(cluster.token_file()).read_text(), "one for all clusters of a user"
    assert sorted(private.iterdir()) == [secret]


@pytest.mark.parametrize("prepare", [lambda path: path.symlink_to(path.parent), Path.touch], ids=["link", "file"])
def test_prepared_folder_is_refused(private: Path, prepare: Callable[[Path], None]) -> None:
    prepare(private)
    before = private.lstat()
    with pytest.raises(ConfigError, match=rf"{private}: must be a folder of this user .* Set TMPDIR"):
        cluster.loopback_environment()
    assert private.lstat() == before, "it is left as it is"


def test_links_in_the_folder_are_refused(private: Path) -> None:
    private.mkdir()
    for path, target in ((cluster.token_file(), "/etc/hostname"), (cluster.ray_folder(), "/tmp")):  # others know them
        path.symlink_to(target)
        assert str(path) in str(cluster.folder_problem())
        path.unlink()


def test_folder_of_another_user_is_refused(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private.mkdir()
    stranger = os.geteuid() + 1
    monkeypatch.setattr(cluster, "private_folder", lambda: private)
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(ConfigError, match=rf"of this user \(uid {stranger}\).* got drwx.* of uid {stranger - 1}"):
        cluster.loopback_environment()


def test_too_long_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 50 * "a")
    assert "may not exceed 107 bytes" in str(cluster.folder_problem())


def test_auto_address_is_the_running_head(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert (cluster.address_of("auto"), cluster.unreachable("auto")) == ("auto", None)
    assert cluster.address_of("localhost:6379") == "127.0.0.1:6379"
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        cluster.ray_folder().mkdir(parents=True)
        (cluster.ray_folder() / "ray_current_cluster").write_text(address)
        assert cluster.address_of("auto") == cluster.own_head() == address
        monkeypatch.setenv("RAY_ADDRESS", "head.example:6379")
        assert cluster.address_of("auto") == "head.example:6379"
        monkeypatch.delenv("RAY_ADDRESS")
    assert cluster.address_of("auto") == "auto", "nothing listens there any more"
    for closed in (address, f"ray://{address}"):
        assert f"got {closed}, where nothing answers" in str(cluster.unreachable(closed))


def test_earlier_import_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch, private: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    for name in cluster.loopback_environment():
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"ray must not be imported before .*RAY_AUTH_MODE=token"):
        cluster.restrict_ray(None)
    cluster.restrict_ray("ray-head:6379")  # another cluster has a separate configuration
    assert "RAY_AUTH_MODE" not in os.environ
