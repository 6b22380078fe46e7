"""The profile `millrace` in the user's Prefect settings. With it, Prefect's own commands find the stack in any shell.

A profile has the address and the login of one stack. The profile of another running stack and the user's choice of
another profile are kept.
"""

import os

from flows.server.api import is_reachable

PROFILE = "millrace"
UNCHOSEN = (None, "ephemeral", PROFILE)
"""The active profiles of users who have chosen no other one. Prefect's default is `ephemeral`."""
PRIORITY_VARIABLES = ("PREFECT_API_URL", "PREFECT_PROFILE")
"""The environment variables that Prefect prefers to the active profile."""


def keep_profile(url: str, login: str) -> tuple[bool, str]:
    """Write the profile of a stack and activate it, unless the user has activated another profile.

    Nothing is changed if the profile belongs to another running stack, or if the file cannot be written.

    Returns:
        Whether Prefect's commands find this stack in a shell like this one, and a line about the profile.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        get_current_settings,
        load_profiles,
        save_profiles,
    )

    path = get_current_settings().profiles_path
    assert path is not None  # Prefect has a default
    try:
        profiles = load_profiles(include_defaults=False)
        known = profiles.profiles_by_name.get(PROFILE)
        other = url if known is None else str(known.settings.get(PREFECT_API_URL, url))
        if other != url and is_reachable(other):
            return False, f"{PROFILE} in {path} stays the one of the running stack at {other}"
        profiles.update_profile(PROFILE, {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: login})
        chosen = profiles.active_name
        if chosen in UNCHOSEN:
            profiles.set_active(PROFILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.chmod(0o600)  # it has the login
        save_profiles(profiles)
    except (OSError, ValueError) as error:
        return False, f"is not written to {path}: {error}"
    if chosen not in UNCHOSEN:
        return False, f"{PROFILE} in {path}; {chosen} stays active until `prefect profile use {PROFILE}`"
    is_used = not any(name in os.environ for name in PRIORITY_VARIABLES)
    return is_used, f"{PROFILE} in {path}, which Prefect's commands use in every new shell"


def remove_profile(url: str) -> str:
    """Remove the profile of a stack. Return a line about it, or '' if the stack had none."""
    from prefect.settings import PREFECT_API_URL, load_profiles, save_profiles

    try:
        profiles = load_profiles(include_defaults=False)
        known = profiles.profiles_by_name.get(PROFILE)
        if known is None or known.settings.get(PREFECT_API_URL) != url:
            return ""
        profiles.remove_profile(PROFILE)
        if profiles.active_name == PROFILE:
            profiles.set_active(None)
        save_profiles(profiles)
    except (OSError, ValueError) as error:
        return f"the Prefect profile {PROFILE} is not removed: {error}"
    return f"the Prefect profile {PROFILE} is removed"
