"""Everything that the next step depends on and that is no tensor, with the journal that belongs to it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rlcore.errors import CheckpointError
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of

FORMAT_VERSION = 2
STATE = "state.json"
"""Its name in a checkpoint's folder."""

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class LoopState:
    """State of the loop itself from one step to the next. Where the data stand follows from `num_prompts_drawn`, so it
    is not said twice."""

    step: Count
    """Steps taken."""
    policy_version: Count
    """Hand-overs of weights so far."""
    num_prompts_drawn: Count
    """Prompts taken from the endless stream, with those that dynamic sampling dropped: epoch and place in it."""
    num_tokens: Count
    """Prompt and answer tokens trained on."""
    kl_coef: float
    """The adaptive coefficient as it is now."""
    best_metric: float = float("-inf")
    """Best held-out score so far; -inf before the first. No step changes it, but what is measured after one."""
    best_step: Count = 0
    """Step of the best score."""
    entropy_added: float = 0.0
    """What the target of the entropy has added to the weight of its bonus so far."""
    pass_counts: str = ""
    """Right and scored answers of each training row as float32, where rows are drawn by them, in base64
    (`rlcore.batching.loader`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState(LoopState):
    """`state.json` of a checkpoint: the loop's state, with the journal and the settings that belong to it."""

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    format_version: int = FORMAT_VERSION
    """A newer one is refused."""
    journal_bytes: Count = 0
    """Length of metrics.jsonl with this step's line as its last."""
    journal_sha256: str = ""
    """Of so many bytes of it."""
    settings_fingerprint: str
    """Fingerprint of the settings that the numbers depend on."""

    def to_json(self) -> str:
        """The state as JSON text; floats come back bit for bit."""
        return _STATE.dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def read(path: Path) -> "TrainerState":
        """Read `state.json`.

        Raises:
            CheckpointError: missing, damaged, or of a newer format.
        """
        remedy = f"Delete {path.parent}; the checkpoint before it will be taken."
        try:
            document = parse_json(read_ordinary(path))
            version = document["format_version"]
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing. {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as reason:
            raise CheckpointError(f"{path}: is damaged ({reason!r}). {remedy}") from reason
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}. Go on with the version of Millrace "
                "that wrote it."
            )
        try:
            return _STATE.validate_python(document)
        except ValidationError as reason:
            first = reason.errors()[0]
            raise CheckpointError(
                f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}. {remedy}"
            ) from reason


_STATE = TypeAdapter(TrainerState)


def journal_problem(state: TrainerState, journal: Path) -> str:
    """What is wrong with the journal from the checkpoint's point of view; '' where it fits."""
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
