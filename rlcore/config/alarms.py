"""What is done when the numbers of a run go wrong."""

from typing import Literal

from pydantic import Field

from rlcore.config.base import Section

StateAction = Literal["off", "tell", "roll_back", "stop"]
StepAction = Literal["off", "tell", "skip", "roll_back", "stop"]


class AlarmConfig(Section):
    """One action for each alarm. off: not looked at. tell: an event in journal, MLflow and Prefect. skip: the step's
    update is left out, too. roll_back: back to the checkpoint with the best validation, with a lower learning rate.
    stop: the step is saved and the run fails. What the weights themselves have become (entropy, KL) no left-out update
    can mend, so these two have no skip."""

    non_finite: Literal["skip", "roll_back", "stop"] = "stop"
    """A loss or gradient is not finite. The batch is saved in any case; the update is never applied."""
    grad_norm: StepAction = "tell"
    """The norm of the policy's gradient, before clipping, is above `grad_norm_above`. skip leaves out only the
    mini-batches where it is."""
    grad_norm_above: float = Field(default=1_000.0, gt=0)
    """Norm of the whole gradient."""
    entropy: StateAction = "tell"
    """The policy's entropy is below `entropy_below`: it gives one answer whatever the seed."""
    entropy_below: float = Field(default=0.001, ge=0)
    """Mean over answer tokens, nats."""
    equal_scores: StepAction = "tell"
    """Within each group all answers have the same score: there is nothing to compare. Not looked at where each prompt
    has one answer."""
    kl: StateAction = "off"
    """The KL divergence from the reference is above `kl_above`. Needs algo.kl.where."""
    kl_above: float = Field(default=10.0, gt=0)
    """Mean over answer tokens, nats."""
    length: StepAction = "off"
    """The share of answers that end at rollout.max_response_tokens is at least `length_share`."""
    length_share: float = Field(default=0.95, gt=0, le=1)
    """Share of the step's answers."""
    roll_back_lr_factor: float = Field(default=0.5, gt=0, lt=1)
    """Each roll-back multiplies the learning rate of the policy and the critic by this."""
    max_roll_backs: int = Field(default=3, ge=0)
    """After so many the run fails."""
