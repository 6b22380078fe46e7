"""The tests, and settings that all their processes share."""

SHARED_STAGES = "MILLRACE_TESTS_STAGES"
"""Environment variable: the folder in which `tests.helpers.small_run` makes the stages that many tests begin with."""
