"""The stack's profile in a user's Prefect settings, read back by Prefect in another process."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_PROFILES_PATH, temporary_settings

from flows.server.api import LocalServer
from flows.stack.control import keep_profile, remove_profile

OURS, GONE = "http://127.0.0.1:1/api", "http://127.0.0.1:2/api"
LOGIN = "millrace:s3cret"


@pytest.fixture
def profiles(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "home" / "profiles.toml"
    with temporary_settings({PREFECT_PROFILES_PATH: path}):
        yield path


def seen_by_prefect(profiles: Path) -> list[str]:
    script = "from prefect.settings import get_current_settings as now; print(now().api.url, now().api.auth_string)"
    environment = {"PREFECT_PROFILES_PATH": str(profiles)}
    found = subprocess.check_output([sys.executable, "-c", script], env=environment, cwd=profiles.parent, text=True)
    return found.replace("**********", "secret").split()


def address_in(profiles: Path) -> str:
    """Return the address of the active profile."""
    found = tomllib.loads(profiles.read_text())
    return found["profiles"][found["active"]]["PREFECT_API_URL"]


def test_the_profile_is_used_in_a_new_shell_until_it_is_removed(profiles: Path) -> None:
    is_used, line = keep_profile(OURS, LOGIN)
    assert is_used
    assert line == f"millrace in {profiles}, which Prefect's commands use in every new shell"
    assert profiles.stat().st_mode & 0o777 == 0o600
    assert seen_by_prefect(profiles) == [OURS, "secret"]
    assert remove_profile(GONE) == "", "the profile of another stack"
    assert "is removed" in remove_profile(OURS)
    assert remove_profile(OURS) == ""
    assert seen_by_prefect(profiles) == ["None", "None"]
    assert LOGIN not in profiles.read_text()


def test_the_profile_of_an_ended_stack_is_replaced_and_of_a_running_one_kept(
    profiles: Path, prefect_server: LocalServer
) -> None:
    keep_profile(GONE, "millrace:old")
    keep_profile(prefect_server.url, LOGIN)
    assert address_in(profiles) == prefect_server.url
    before = profiles.read_bytes()
    is_used, line = keep_profile(OURS, "millrace:new")
    assert not is_used
    assert line == f"millrace in {profiles} stays the one of the running stack at {prefect_server.url}"
    assert profiles.read_bytes() == before


def test_what_the_user_has_chosen_stays(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.parent.mkdir()
    profiles.write_text('active = "team"\n\n[profiles.team]\nPREFECT_API_URL = "http://team/api"\n')
    profiles.chmod(0o644)
    is_used, line = keep_profile(OURS, LOGIN)
    assert not is_used
    assert line.endswith("; team stays active until `prefect profile use millrace`")
    assert profiles.stat().st_mode & 0o777 == 0o600
    assert address_in(profiles) == "http://team/api"
    remove_profile(OURS)
    assert address_in(profiles) == "http://team/api"
    profiles.unlink()
    monkeypatch.setenv("PREFECT_API_URL", "http://team/api")
    assert not keep_profile(OURS, LOGIN)[0]


def test_an_unusable_file_is_reported(profiles: Path) -> None:
    profiles.parent.mkdir()
    profiles.write_text("active = ")
    assert keep_profile(OURS, LOGIN)[1].startswith(f"is not written to {profiles}: ")
    assert remove_profile(OURS).startswith("the Prefect profile millrace is not removed: ")
    profiles.unlink()
    profiles.mkdir()
    assert keep_profile(OURS, LOGIN)[1].startswith(f"is not written to {profiles}: ")
