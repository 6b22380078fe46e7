"""The one exception tree. A message has the key or file, the rule, the value got, and what to do.

Every class is picklable (Ray and Prefect carry exceptions between processes), so the constructor takes
exactly what `args` holds.
"""

import sys
from pathlib import Path

EXIT_RESUMABLE = 75
"""Exit code of a command or trainer that was told to stop: it has saved, and the same command goes on."""
MODULE_REMEDY = (
    "A module is found in the folder that the command is started in, beside the experiment's file, on PYTHONPATH, or "
    "installed"
)
"""Remedy where a module that the settings name is not found."""


def missing_object_remedy(name: str) -> str:
    """Remedy where the object at `module:object` is not found: another module of that name may be in its place."""
    top = name.partition(":")[0].partition(".")[0]
    if (module := sys.modules.get(top)) is not None:
        loaded = Path(getattr(module, "__file__", None) or "a module that is built into Python")
        files = [Path(place, file) for place in sys.path for file in (f"{top}.py", f"{top}/__init__.py")]
        for own in (file for file in files if file.is_file() and file.resolve() != loaded.resolve()):
            return f"Another module {top} was loaded in place of {own}: {loaded}. Rename yours"
    return MODULE_REMEDY


class MillraceError(Exception):
    """Base of every error that Millrace raises on purpose."""

    failure_kind = "error"
    """Kind of the fault of a run that it ends (`rlcore.run.failures`)."""


class ConfigError(MillraceError, ValueError):
    """The settings are wrong. The message lists every problem at once."""


class TrialError(ConfigError):
    """Code that the settings name, or a judge, failed when it was tried before a start."""


class DataError(MillraceError, ValueError):
    """A dataset file, column or row breaks the schema; names file, column or row and the remedy."""

    failure_kind = "data"


class UnscoredError(DataError):
    """No answer of a step, or no problem of a validation, has a score: the scorer or the environment failed on all."""


class UnwritableError(DataError, OSError):
    """A folder cannot be written, for another reason than a full disk."""


class ModelError(MillraceError, ValueError):
    """A model directory is missing, incomplete or of a kind that cannot be trained here."""


class CheckpointError(MillraceError):
    """A checkpoint cannot be read, verified or used with these settings."""


class DiskSpaceError(MillraceError, OSError):
    """Too little room, or a write failed for lack of room. Says how many bytes are missing and where."""

    failure_kind = "disk"
    needed_bytes = 0
    """Bytes that were to be written; 0 where that is not known."""


class RunInUseError(MillraceError):
    """Another live process holds the run's lock; the message names it."""


class EngineError(MillraceError, RuntimeError):
    """A rollout engine cannot do what the settings need, or returned an invalid result."""


class UserCodeError(MillraceError, RuntimeError):
    """A loss or an advantage of one's own raised in training, or returned what cannot be trained with."""


class WorkerLostError(MillraceError, RuntimeError):
    """A trainer process, a Ray actor or a node is gone. The chunk can be retried from its checkpoint."""

    failure_kind = "lost worker"


class HangError(WorkerLostError):
    """A phase took longer than its deadline. The stacks of all processes have been written to a file."""

    failure_kind = "hang"


class HostMemoryError(WorkerLostError):
    """The host ran out of memory."""

    failure_kind = "host out of memory"


class DeviceMemoryError(WorkerLostError):
    """Memory of a GPU ran out, and smaller micro-batches cannot help."""

    failure_kind = "GPU out of memory"


class RankMemoryError(DeviceMemoryError):
    """Memory ran out in a pass that several ranks make together. A retry takes twice as many micro-batches."""

    failure_kind = "rank out of memory"


class NonFiniteError(MillraceError, ArithmeticError):
    """A loss or gradient is not finite. The batch that caused it has been saved; the message names the file."""

    failure_kind = "numbers"


class AlarmError(MillraceError, ArithmeticError):
    """An alarm has stopped the run, or it was rolled back too often. What is saved stays."""

    failure_kind = "numbers"


class TrackingError(MillraceError):
    """The metrics store refused something for good. Never raised inside a training step."""


class StopRequestedError(MillraceError):
    """A signal or cancellation stopped the run; it has saved and can go on (exit code 75)."""


RESUMABLE = (StopRequestedError, DiskSpaceError)
"""Errors that end a command with code 75: the same command resumes from what is saved."""


def is_stop(error: BaseException | None) -> bool:
    """Whether the error is a request to end the run (also one that Python or Prefect raises), as against a fault."""
    return isinstance(error, StopRequestedError) or (error is not None and not isinstance(error, Exception))
