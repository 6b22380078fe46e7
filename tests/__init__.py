"""The tests, and what their processes share."""

SHARED_STAGES = "MILLRACE_TESTS_STAGES"
"""Environment variable: the folder in which `tests.small_run` makes the stages that many tests begin with."""
