"""Fixtures of tests of a whole stack and of runs of six steps."""

from tests.flows.conftest import nothing_left_running
from tests.helpers.sessions import undisturbed

__all__ = ["nothing_left_running", "undisturbed"]
