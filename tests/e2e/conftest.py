"""Fixtures of tests of a whole stack."""

from tests.flows.conftest import nothing_left_running

__all__ = ["nothing_left_running"]
