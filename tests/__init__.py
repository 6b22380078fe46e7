"""The tests, and settings that all their processes share."""

from rlcore import tune_garbage_collection

tune_garbage_collection()  # many of our processes live for an import and a few seconds of work

SHARED_STAGES = "MILLRACE_TESTS_STAGES"
"""Environment variable: the folder in which `tests.helpers.small_run` makes the stages that many tests begin with."""
