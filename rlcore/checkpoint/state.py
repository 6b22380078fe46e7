"""The state of the training loop that the next step needs, except for tensors. This module imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rlcore.errors import CheckpointError
from rlcore.storage.documents import first_problem, parse_json, read_ordinary, sha256_of

FORMAT_VERSION = 2
STATE = "state.json"  # name in a checkpoint

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state of the training loop between two steps. `num_prompts_drawn` determines the position in the data."""

    step: Count
    policy_version: Count  # the number of weight syncs
    num_prompts_drawn: Count  # from the endless stream, with prompts that dynamic sampling dropped
    num_tokens: Count  # the number of prompt and response tokens that were trained on
    kl_coef: float  # the adaptive coefficient of the KL term
    best_metric: float = float("-inf")  # the best held-out score, or -inf before the first one
    best_step: Count = 0
    entropy_added: float = 0.0  # what the entropy target has added to the weight of the entropy bonus
    pass_counts: str = ""  # correct and scored responses of each training row, as base64 of float32 (`PassCounts`)
    carried: str = ""  # groups of responses that the next step continues, as JSON (`rlcore.rollout.engine`)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState(LoopState):
    """The content of a checkpoint's `state.json`: the loop's state, with data about its journal and settings."""

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    format_version: int = FORMAT_VERSION
    journal_bytes: Count = 0  # size of metrics.jsonl at the end of this step's line
    journal_sha256: str = ""  # of these bytes
    settings_fingerprint: str

    def to_json(self) -> str:
        """Return the state as JSON text with exact floats."""
        return _STATE.dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def read(path: Path) -> "TrainerState":
        """Read `state.json`. Raises CheckpointError if it is missing, damaged, or of another format version."""
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
    """Return the reason why the journal on disk does not match a checkpoint, or '' if it matches."""
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
