"""Settings of the algorithm: advantages, losses, KL, optimizer, critic."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlcore.config.base import Bound, Section, with_home

ADVANTAGE_FUNCTIONS: Mapping[str, str] = {name: f"rlcore.algos.advantages:{name}" for name in ("pass_at_k", "gdpo")}
"""Advantages that are a function with options, as those of one's own are."""
GROUP_ADVANTAGES: frozenset[str] = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", *ADVANTAGE_FUNCTIONS}
)
"""Advantages that compare the answers to one prompt with each other and so need two or more of them."""
UNGROUPED_ADVANTAGES = ("gae", "reinforce_pp", "remax")
"""Advantages that compare an answer with something else: where all answers to a prompt score the same, not 0."""
ADVANTAGES = (*UNGROUPED_ADVANTAGES, *sorted(GROUP_ADVANTAGES))
"""Advantages with a short name."""
POLICY_LOSSES: Mapping[str, str] = {
    name: f"rlcore.algos.losses:{name}"
    for name in ("ppo_clip", "gspo", "cispo", "sapo", "gmpo", "gpg", "dppo", "kl_cov")
}
"""Losses with a short name, and the function of each."""
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class EntropyControlConfig(Section):
    """A controller that moves the weight of the entropy bonus so that the policy's entropy stays near a target."""

    target: float | None = Field(default=None, gt=0)
    """Entropy that it aims at, in nats a token; None: the weight stays `algo.entropy_coef`."""
    step: float = Field(default=0.005, gt=0)
    """What the weight rises by after a step with an entropy below the target, and falls by, to 0 at least, after one
    above it."""


class KlConfig(Section):
    """Distance from the frozen reference policy."""

    where: Literal["off", "loss", "reward"] = "off"
    """Where the KL term acts. Off: no reference model is loaded."""
    estimator: Literal["auto", "k1", "k2", "k3", "low_var_kl"] = "auto"
    """Per-token estimator; low_var_kl is k3. auto: k1 in the reward, low_var_kl in the loss."""
    coef: float = Field(default=0.001, ge=0)
    """Coefficient (at the start, if adaptive)."""
    adaptive: bool = False
    """Whether a controller moves the coefficient towards `target`."""
    target: float = Field(default=0.1, gt=0)
    """KL that the adaptive controller aims at, per token."""
    horizon: int = Field(default=10_000, ge=1)
    """Sequences over which the adaptive controller acts."""
    offload: bool = False
    """Keep the reference's weights in host memory between its passes."""

    @property
    def estimator_in_use(self) -> KlEstimator:
        """The estimator, with `auto` resolved: the one whose gradient is the divergence's at that place."""
        if self.estimator != "auto":
            return self.estimator
        return "k1" if self.where == "reward" else "low_var_kl"


class ImportanceConfig(Section):
    """Correction for the difference between the sampler's and the trainer's probabilities."""

    mode: Literal["off", "truncate", "mask"] = "off"
    """truncate: weight min(ratio, cap). mask: weight 0 where the ratio leaves [1/cap, cap]."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or one of the whole answer: the product of its tokens' ratios."""
    cap: float = Field(default=2.0, gt=1)
    """Bound of the ratio exp(old - behavior)."""


class RejectionConfig(Section):
    """Tokens and answers that are left out of the update where the trainer's probabilities are too far from the
    sampler's."""

    level: Literal["off", "token", "sequence-sum", "sequence-mean", "sequence-max"] = "off"
    """What is measured and left out: a token, or an answer by sum, mean or maximum over its tokens."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Divergence of a token: KL(behavior || old), estimated as in `algo.kl.estimator`."""
    cap: float = Field(default=2.0, gt=0)
    """k1: largest factor between the probabilities, either way (over 1). k2, k3: largest divergence."""


class ClipCovConfig(Section):
    """Tokens without a policy loss for the covariance of their log-probability with the advantages, by which the
    policy's entropy falls (Clip-Cov)."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of a mini-batch's answer tokens that are drawn at most; 0: none. The paper has 0.0002."""
    low: Annotated[float, Bound("be under", "algo.clip_cov.high", "Lower it", only_with="algo.clip_cov.share")] = Field(
        default=1.0
    )
    """Covariance above which a token may be drawn; its mean over all tokens is far smaller."""
    high: float = Field(default=5.0)
    """Covariance below which it may be drawn."""


class DynamicSamplingConfig(Section):
    """Drop groups whose answers all score the same and sample others in their place (DAPO)."""

    enabled: bool = False
    """Whether groups of equal score are replaced."""
    max_refills: int = Field(default=2, ge=0)
    """Sampling rounds at most after a step's first; then the step goes on with what it has."""


class OverlongConfig(Section):
    """Soft punishment of answers near the length limit (DAPO)."""

    enabled: bool = False
    """Whether the reward falls near the limit."""
    buffer_tokens: Annotated[
        int, Bound("be at most", "rollout.max_response_tokens", "Lower it", only_with="algo.overlong.enabled")
    ] = Field(default=128, ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty: float = Field(default=1.0, ge=0)
    """Reward taken away at the limit."""


class AlgoConfig(Section):
    """The algorithm. `docs/algorithms.md` maps every choice to its equation and function."""

    advantage: str = "grpo"
    """gae, grpo, dr_grpo, rloo, opo, remax, reinforce_pp, reinforce_pp_baseline, pass_at_k, gdpo, or
    `module:function`."""
    advantage_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments of an advantage that is a function, such as `k` of pass_at_k."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token (gae, reinforce_pp)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the generalized advantage estimate."""
    policy_loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, sapo, gmpo, gpg, dppo, kl_cov, or `module:function` of your own."""
    policy_loss_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments of the policy loss, such as `tau_pos` of sapo: any names that the function declares."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound of the loss for negative advantages; None: no dual clip."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus (at the start, with a target); 0 computes the entropy without gradient."""
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    """Target of the entropy."""
    value_clip: float = Field(default=0.5, gt=0)
    """Range of the clipped value loss around the old value."""
    kl: KlConfig = KlConfig()
    """Distance from the reference policy."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction between sampler and trainer."""
    rejection: RejectionConfig = RejectionConfig()
    """What is left out for being too far from the sampler."""
    off_policy_mask: float | None = Field(default=None, gt=0)
    """Answers with a negative advantage whose mean log-probability has fallen by more than this since they were sampled
    have no policy loss; in nats a token. None: all have."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a mini-batch's answer tokens that have a policy loss: those where the policy's entropy is highest."""
    clip_cov: ClipCovConfig = ClipCovConfig()
    """Tokens without a policy loss, so that the entropy falls more slowly."""
    mask_truncated: bool = False
    """Leave answers that were cut at the length limit out of the update; their scores still count in their group."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups of equal score."""
    overlong: OverlongConfig = OverlongConfig()
    """Soft punishment near the length limit."""

    @property
    def advantage_function(self) -> str | None:
        """`module:function` of an advantage that is a function with options; None for the others."""
        name = ADVANTAGE_FUNCTIONS.get(self.advantage, self.advantage)
        return name if ":" in name else None


OFFLOAD_PIECE_BYTES = 268_435_456
"""Bytes of moments that an offloaded optimizer moves to the device together, enough to fill the bus; a larger tensor
goes alone. It is here because the memory plan uses it before torch is imported."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: linear and cosine fall to `min_lr_ratio` x lr after the last step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Lowest rate as a share of lr."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Warm-up as a share of all steps, used where `warmup_steps` is 0."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Term that keeps the update finite."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    offload: bool = False
    """Keep the moments in host memory and bring them to the GPU piece by piece for each step; equal numbers."""


class CriticConfig(Section):
    """The value model of PPO: same trunk as the policy, separate weights, own optimizer."""

    path: str | None = None
    """Initial weights; None: the policy's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its optimizer."""
    warmup_steps: Annotated[int, Bound("be under", "trainer.total_steps", "Lower it, or train for longer")] = Field(
        default=0, ge=0
    )
    """First steps in which the critic alone is trained."""

    _expanded = field_validator("path")(with_home)
