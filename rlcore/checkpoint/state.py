"""Everything that the next step depends on and that is no tensor, with the journal that belongs to it. No torch."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlcore.errors import CheckpointError
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of

FORMAT_VERSION = 1
STATE = "state.json"
"""Its name in a checkpoint's folder."""
FORMER_KEYS = frozenset({"mlflow_run_id", "attempt", "token_budget", "rng", "torch_rng"})
"""What older checkpoints say too, and nothing ever read."""


class TrainerState(BaseModel):
    """`state.json` of a checkpoint. Where the data stand follows from `num_prompts_drawn`, so it is not said twice."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings", allow_inf_nan=True
    )

    format_version: int = FORMAT_VERSION
    """A newer one is refused."""
    step: int = Field(ge=0)
    """Steps taken."""
    policy_version: int = Field(ge=0)
    """Hand-overs of weights so far."""
    num_prompts_drawn: int = Field(ge=0)
    """Prompts taken from the endless stream, with those that dynamic sampling dropped: epoch and place in it."""
    num_tokens: int = Field(ge=0)
    """Prompt and answer tokens trained on."""
    kl_coef: float
    """The adaptive coefficient as it is now."""
    best_metric: float = float("-inf")
    """Best held-out score so far; -inf before the first."""
    best_step: int = Field(default=0, ge=0)
    """Step of the best score."""
    lr_factor: float = Field(default=1.0, gt=0, le=1)
    """What roll-backs have left of the learning rate."""
    num_roll_backs: int = Field(default=0, ge=0)
    """Roll-backs so far on the way to this checkpoint."""
    entropy_added: float = 0.0
    """What the target of the entropy has added to the weight of its bonus so far."""
    pass_counts: str = ""
    """Right and scored answers of each training row as float32, where rows are drawn by them, in base64."""
    journal_bytes: int = Field(default=0, ge=0)
    """Length of metrics.jsonl with this step's line as its last."""
    journal_sha256: str = ""
    """Of so many bytes of it; empty in checkpoints that are older than this entry."""
    settings_fingerprint: str
    """Fingerprint of the settings that the numbers depend on."""

    def to_json(self) -> str:
        """As it is written; floats come back bit for bit."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
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
            return cls.model_validate({key: value for key, value in document.items() if key not in FORMER_KEYS})
        except ValidationError as reason:
            first = reason.errors()[0]
            raise CheckpointError(
                f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}. {remedy}"
            ) from reason


def journal_problem(state: TrainerState, journal: Path) -> str:
    """What is wrong with the journal from the checkpoint's point of view; '' where it fits."""
    wanted = state.journal_bytes
    if not wanted:
        return ""
    try:
        size = journal.stat().st_size
        if size < wanted:
            return f"{journal}: was cut: it has {size} of the {wanted} bytes that it had at step {state.step}"
        if state.journal_sha256 not in ("", sha256_of(journal, wanted)):
            return f"{journal}: was changed: its first {wanted} bytes are not those that it had at step {state.step}"
    except FileNotFoundError:
        return f"{journal}: is lost: it had {wanted} bytes at step {state.step}"
    except OSError as reason:
        return f"{journal}: cannot be read ({reason})"
    return ""
