"""The exceptions of Millrace. They are pickled between processes, so a constructor takes exactly the values in
`args`."""

import sys
from pathlib import Path

EXIT_RESUMABLE = 75
"""The exit code of a command that stopped on request and saved its state. The same command resumes the run."""
MODULE_REMEDY = "A module is found in the working directory, next to the experiment's file, on PYTHONPATH, or installed"
"""The remedy in an error message about a module that the settings name and that cannot be imported."""


def missing_object_remedy(name: str) -> str:
    """Return the remedy for a missing `module:object`. If another loaded module hides the user's file of the same name,
    the remedy is to rename the file."""
    top = name.partition(":")[0].partition(".")[0]
    if (module := sys.modules.get(top)) is not None:
        loaded = Path(getattr(module, "__file__", None) or "a module that is built into Python")
        files = [Path(place, file) for place in sys.path for file in (f"{top}.py", f"{top}/__init__.py")]
        for own in (file for file in files if file.is_file() and file.resolve() != loaded.resolve()):
            return f"Another module {top} was loaded in place of {own}: {loaded}. Rename yours"
    return MODULE_REMEDY


class MillraceError(Exception):
    """The base class of all errors that Millrace raises."""

    failure_kind = "error"
    """The kind of failure that a run records for this error (`rlcore.run.watchdog`)."""


class ConfigError(MillraceError, ValueError):
    """The settings are wrong. The message lists every problem."""


class TrialError(ConfigError):
    """A trial call of a judge or of user code failed before the start of the run."""


class DataError(MillraceError, ValueError):
    """A dataset file, column or row violates the schema."""

    failure_kind = "data"


class NotFoundError(DataError, ConfigError):
    """The command or a setting names something that does not exist, such as a run or a file. No work was started."""


class UnscoredError(DataError):
    """The scorer or the environment failed on every response of a step, or on every problem of a validation."""


class UnwritableError(DataError, OSError):
    """A folder cannot be written for a reason other than a full disk."""


class ModelError(MillraceError, ValueError):
    """A model directory is missing, incomplete or of an unsupported kind."""


class CheckpointError(MillraceError):
    """A checkpoint cannot be read, verified or used with these settings."""


class DiskSpaceError(MillraceError, OSError):
    """The disk is too full. The message names the folder and the number of missing bytes."""

    failure_kind = "disk"
    needed_bytes = 0
    """The number of bytes that the failed write needed, or 0 if unknown."""


class RunInUseError(MillraceError):
    """Another live process holds the lock of the run."""


class EngineError(MillraceError, RuntimeError):
    """A rollout engine lacks a feature that the settings need, or it returned an invalid result."""


class UserCodeError(MillraceError, RuntimeError):
    """A custom loss or advantage raised an error in training, or it returned an unusable result."""


class WorkerLostError(MillraceError, RuntimeError):
    """A trainer process, a Ray actor or a node has disappeared. The steps since the last checkpoint can be retried."""

    failure_kind = "lost worker"


class HangError(WorkerLostError):
    """A phase exceeded its deadline. A file contains the stacks of all processes."""

    failure_kind = "hang"


class HostMemoryError(WorkerLostError):
    """The host ran out of memory."""

    failure_kind = "host out of memory"


class DeviceMemoryError(WorkerLostError):
    """A GPU ran out of memory, and smaller micro-batches cannot help."""

    failure_kind = "GPU out of memory"


class RankMemoryError(DeviceMemoryError):
    """Memory ran out in a pass that several ranks compute together. A retry doubles the number of micro-batches."""

    failure_kind = "rank out of memory"


class NonFiniteError(MillraceError, ArithmeticError):
    """A loss or gradient is not finite. The message names the file with the batch."""

    failure_kind = "numbers"


class AlarmError(MillraceError, ArithmeticError):
    """An alarm stopped the run. The saved state of the run remains."""

    failure_kind = "numbers"


class TrackingError(MillraceError):
    """The metrics store refused a request permanently. This error is never raised inside a training step."""


class StopRequestedError(MillraceError):
    """A signal or cancellation stopped the run after its state was saved (exit code 75)."""


RESUMABLE = (StopRequestedError, DiskSpaceError)
"""The errors that end a command with exit code 75."""


def is_stop(error: BaseException | None) -> bool:
    """Return whether an error is a StopRequestedError or another request to stop, such as KeyboardInterrupt or a
    cancellation by Prefect."""
    return isinstance(error, StopRequestedError) or (error is not None and not isinstance(error, Exception))
