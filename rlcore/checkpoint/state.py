"""The loop's state: what the next step depends on besides tensors. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rlcore.errors import CheckpointError
from rlcore.storage.documents import first_problem, parse_json, read_ordinary, sha256_of

FORMAT_VERSION = 2
STATE = "state.json"
"""Name of the state's file in a checkpoint."""

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class LoopState:
    """State of the training loop from one step to the next. `num_prompts_drawn` determines the position in the data."""

    step: Count
    policy_version: Count
    """Number of weight syncs."""
    num_prompts_drawn: Count
    """Prompts taken from the endless stream, including those that dynamic sampling dropped."""
    num_tokens: Count
    """Prompt and response tokens trained on."""
    kl_coef: float
    """Adaptive coefficient."""
    best_metric: float = float("-inf")
    """Best held-out score; -inf before the first."""
    best_step: Count = 0
    entropy_added: float = 0.0
    """Addition to the weight of the entropy bonus by its target."""
    pass_counts: str = ""
    """Right and scored responses of each training row, base64 of float32 (`rlcore.batching.loader`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState(LoopState):
    """`state.json` of a checkpoint: the loop's state with its journal and settings."""

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    format_version: int = FORMAT_VERSION
    journal_bytes: Count = 0
    """Length of metrics.jsonl up to this step's line."""
    journal_sha256: str = ""
    """Digest of those bytes."""
    settings_fingerprint: str

    def to_json(self) -> str:
        """Return the state as JSON text with exact floats."""
        return _STATE.dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def read(path: Path) -> "TrainerState":
        """Read `state.json`.

        Raises:
            CheckpointError: missing, damaged, or of a newer format.
        """
        remedy = f"Delete {path.parent}; the checkpoint before it will be used."
        try:
            document = parse_json(read_ordinary(path))
            version = document["format_version"]
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing. {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as reason:
            raise CheckpointError(f"{path}: is damaged ({reason!r}). {remedy}") from reason
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}. Resume with the version of "
                "Millrace that wrote it."
            )
        try:
            return _STATE.validate_python(document)
        except ValidationError as reason:
            value = reason.errors()[0]["input"]
            raise CheckpointError(f"{path}: {first_problem(reason)}, got {value!r}. {remedy}") from reason


_STATE = TypeAdapter(TrainerState)


def journal_problem(state: TrainerState, journal: Path) -> str:
    """Return why the journal does not fit a checkpoint; '' where it fits."""
    wanted = state.journal_bytes
    if not wanted:
        return ""
    try:
        size = journal.stat().st_size
        if size < wanted:
            return f"{journal}: was cut: it has {size} of the {wanted} bytes that it had at step {state.step}"
        if state.journal_sha256 != sha256_of(journal, wanted):
            return f"{journal}: was changed: its first {wanted} bytes are not those that it had at step {state.step}"
    except FileNotFoundError:
        return f"{journal}: is lost: it had {wanted} bytes at step {state.step}"
    except OSError as reason:
        return f"{journal}: cannot be read ({reason})"
    return ""
