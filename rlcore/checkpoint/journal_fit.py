"""Whether a run's journal still holds what it held when a checkpoint was written. Knows nothing of its lines."""

from pathlib import Path

from rlcore.checkpoint.state import TrainerState
from rlcore.storage.documents import sha256_of_start


def journal_problem(state: TrainerState, journal: Path) -> str:
    """What is wrong with the journal from the checkpoint's point of view; '' where it fits."""
    wanted = state.journal_bytes
    if not wanted:
        return ""
    try:
        size = journal.stat().st_size
        if size < wanted:
            return f"{journal}: was cut: it has {size} of the {wanted} bytes that it had at step {state.step}"
        if state.journal_sha256 not in ("", sha256_of_start(journal, wanted)):
            return f"{journal}: was changed: its first {wanted} bytes are not those that it had at step {state.step}"
    except FileNotFoundError:
        return f"{journal}: is lost: it had {wanted} bytes at step {state.step}"
    except OSError as reason:
        return f"{journal}: cannot be read ({reason})"
    return ""
