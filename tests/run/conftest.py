"""Fixtures of the tests of runs."""

from tests.storage.small_disk import small_disk

__all__ = ["small_disk"]
