"""Settings of the algorithm: advantages, losses, KL, optimizer, critic."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlcore.config.base import MayChange, Run, Section, expand_home, is_function_name
from rlcore.config.problems import Problem, did_you_mean
from rlcore.config.rules import Bound, EffectiveWhen, Rule, rule

ADVANTAGE_FUNCTIONS: Mapping[str, str] = {name: f"rlcore.algos.advantages:{name}" for name in ("pass_at_k", "gdpo")}
"""Advantages that are a function with options, like custom ones."""
GROUP_ADVANTAGES: frozenset[str] = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", *ADVANTAGE_FUNCTIONS}
)
"""Advantages that compare the responses to one prompt, and need two or more of them."""
UNGROUPED_ADVANTAGES = ("gae", "reinforce_pp", "remax")
"""Advantages that are not 0 in a group of equal scores."""
ADVANTAGES = (*UNGROUPED_ADVANTAGES, *sorted(GROUP_ADVANTAGES))
"""Advantages with a short name."""
POLICY_LOSSES: Mapping[str, str] = {
    name: f"rlcore.algos.losses:{name}"
    for name in ("ppo_clip", "gspo", "cispo", "sapo", "gmpo", "gpg", "dppo", "kl_cov")
}
"""Losses with a short name, and the function of each."""
_UNCLIPPED = "sapo gmpo gpg dppo kl_cov"
_WITH_BOTH_CLIPS = EffectiveWhen(".policy_loss", unless=_UNCLIPPED)
_TWO_SIDES = EffectiveWhen("trainer.old_logprobs", unless="behavior")
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class EntropyControlConfig(Section):
    """A controller of the entropy bonus that keeps the policy's entropy near a target."""

    target: float | None = Field(default=None, gt=0)
    """Target entropy in nats a token; None: the weight stays `algo.entropy_coef`."""
    step: Annotated[float, EffectiveWhen(".target")] = Field(default=0.005, gt=0)
    """Change of the weight after a step: up if the entropy is below the target, down (to 0 at least) if above."""


class KlConfig(Section):
    """Distance from the frozen reference policy."""

    where: Literal["off", "loss", "reward"] = "off"
    """Place of the KL term. Off: no reference model is loaded."""
    estimator: Annotated[
        Literal["auto", "k1", "k2", "k3", "low_var_kl"],
        EffectiveWhen(".where", unless="loss", of="k1", remedy="Set algo.kl.estimator=low_var_kl or k2",
                      why="algo.kl.where=loss: its gradient there is 0 on average"),
        EffectiveWhen(".where", unless="reward", of="k2 k3 low_var_kl", remedy="Set algo.kl.estimator=k1",
                      why="algo.kl.where=reward near the reference: its policy gradient vanishes, as d^2 / 2 does"),
    ] = "auto"  # fmt: skip
    """Per-token estimator; low_var_kl is k3. auto: k1 in the reward, low_var_kl in the loss."""
    coef: float = Field(default=0.001, ge=0)
    """Coefficient (at the start, if adaptive)."""
    adaptive: bool = False
    """Let a controller move the coefficient towards `target`."""
    target: Annotated[float, EffectiveWhen(".adaptive")] = Field(default=0.1, gt=0)
    """Target KL of the adaptive controller, per token."""
    horizon: Annotated[int, EffectiveWhen(".adaptive")] = Field(default=10_000, ge=1)
    """Sequences over which the adaptive controller acts."""
    offload: Annotated[
        bool,
        MayChange,
        EffectiveWhen("model.lora", "null", why="model.lora: the reference is the policy without its adapters"),
    ] = False
    """Keep the reference's weights in host memory between its forward passes."""
    effective = EffectiveWhen(".where")

    @property
    def estimator_in_use(self) -> KlEstimator:
        """The estimator, with `auto` resolved to the one that has the divergence's gradient."""
        if self.estimator != "auto":
            return self.estimator
        return "k1" if self.where == "reward" else "low_var_kl"


_CORRECTED = EffectiveWhen(".mode")
_REJECTED = EffectiveWhen(".level")
_BY_COVARIANCE = EffectiveWhen(".share")


class ImportanceConfig(Section):
    """Correction for the difference between the sampler's and the trainer's probabilities."""

    mode: Annotated[Literal["off", "truncate", "mask"], _TWO_SIDES] = "off"
    """truncate: weight min(ratio, cap). mask: weight 0 where the ratio leaves [1/cap, cap]."""
    level: Annotated[Literal["token", "sequence"], _CORRECTED] = "token"
    """Ratio of each token, or of the whole response: the product of its tokens' ratios."""
    cap: Annotated[float, _CORRECTED] = Field(default=2.0, gt=1)
    """Bound of the ratio exp(old - behavior)."""


class RejectionConfig(Section):
    """Tokens and responses that the update skips because trainer and sampler differ too much."""

    level: Annotated[Literal["off", "token", "sequence-sum", "sequence-mean", "sequence-max"], _TWO_SIDES] = "off"
    """Unit that is measured and skipped: a token, or a response by sum, mean or maximum over its tokens."""
    estimator: Annotated[Literal["k1", "k2", "k3"], _REJECTED] = "k1"
    """Divergence of a token: KL(behavior || old), estimated as in `algo.kl.estimator`."""
    cap: Annotated[float, _REJECTED] = Field(default=2.0, gt=0)
    """k1: largest factor between the probabilities, either way (over 1). k2, k3: largest divergence."""
    checks = (
        rule(".cap", ".estimator", "must be over 1 with k1",
             lambda own, _: own.level == "off" or own.estimator != "k1" or own.cap > 1,
             "Use 2, or algo.rejection.estimator=k2 or k3"),
    )  # fmt: skip


class ClipCovConfig(Section):
    """Tokens without a policy loss because their covariance of log-probability and advantage lowers the entropy
    (Clip-Cov)."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """Largest share of a mini-batch's response tokens that are drawn; 0: none. The paper has 0.0002."""
    low: Annotated[
        float, _BY_COVARIANCE, Bound("be under", "algo.clip_cov.high", "Lower it", only_with="algo.clip_cov.share")
    ] = 1.0
    """Covariance above which a token may be drawn; the mean over all tokens is far smaller."""
    high: Annotated[float, _BY_COVARIANCE] = 5.0
    """Covariance below which it may be drawn."""


class DynamicSamplingConfig(Section):
    """Replacement of groups whose responses all have the same score (DAPO)."""

    enabled: bool = False
    """Replace groups of equal score."""
    max_refills: Annotated[int, EffectiveWhen(".enabled")] = Field(default=2, ge=0)
    """Most sampling rounds after a step's first. Then the step continues with the groups it has."""
    checks = (
        rule(".enabled", "rollout.samples_per_prompt", "needs rollout.samples_per_prompt of 2 or more",
             lambda own, run: not own.enabled or run.rollout.samples_per_prompt >= 2,
             "Sample more responses to each prompt, or switch it off"),
        rule(".enabled", "algo.advantage",
             "must be false with gae, reinforce_pp and remax, whose advantages in a group of equal scores are not 0",
             lambda own, run: not own.enabled or run.algo.advantage not in UNGROUPED_ADVANTAGES,
             "Leave it out, or choose algo=grpo"),
    )  # fmt: skip


class OverlongConfig(Section):
    """Soft penalty on responses near the length limit (DAPO)."""

    enabled: bool = False
    """Lower the reward near the limit."""
    buffer_tokens: Annotated[
        int,
        EffectiveWhen(".enabled"),
        Bound("be at most", "rollout.max_response_tokens", "Lower it", only_with="algo.overlong.enabled"),
    ] = Field(default=128, ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty: Annotated[float, EffectiveWhen(".enabled")] = Field(default=1.0, ge=0)
    """Penalty at the limit."""


def _is_known(field: str, known: tuple[str, ...]) -> Rule:
    """Check that a loss or an advantage has a known name or the form `module:function`."""

    def check(algo: "AlgoConfig", _: Run) -> Problem | None:
        given = getattr(algo, field)
        if given in known or is_function_name(given):
            return None
        remedy = f"{did_you_mean(given, known)}There are {', '.join(known)}"
        return Problem(f".{field}", "must be a known name, or a custom `module:function`", given, remedy)

    return Rule((f".{field}",), check)


class AlgoConfig(Section):
    """The algorithm. `docs/algorithms.md` maps every choice to its equation and function."""

    advantage: str = "grpo"
    """gae, grpo, dr_grpo, rloo, opo, remax, reinforce_pp, reinforce_pp_baseline, pass_at_k, gdpo, or a custom
    `module:function`."""
    advantage_options: Annotated[
        dict[str, bool | int | float | str],
        EffectiveWhen(".advantage", unless=" ".join({*ADVANTAGES} - {*ADVANTAGE_FUNCTIONS})),
    ] = Field(default_factory=dict)
    """Keyword arguments of an advantage that is a function, such as `k` of pass_at_k."""
    gamma: Annotated[float, EffectiveWhen(".advantage", "gae reinforce_pp")] = Field(default=1.0, ge=0, le=1)
    """Discount per token (gae, reinforce_pp)."""
    lam: Annotated[float, EffectiveWhen(".advantage", "gae")] = Field(default=1.0, ge=0, le=1)
    """Lambda of the generalized advantage estimate."""
    policy_loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, sapo, gmpo, gpg, dppo, kl_cov, or a custom `module:function`."""
    policy_loss_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments that the function of the policy loss declares, such as `tau_pos` of sapo."""
    clip_low: Annotated[float, _WITH_BOTH_CLIPS] = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, _WITH_BOTH_CLIPS] = Field(default=0.2, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float | None, EffectiveWhen(".policy_loss", unless=f"cispo {_UNCLIPPED}")] = Field(
        default=3.0, gt=1
    )
    """Bound of the loss for negative advantages; None: no dual clip."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of per-token losses to one number."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus (at the start, with a target); 0 computes the entropy without gradient."""
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    """Target of the entropy."""
    value_clip: Annotated[float, EffectiveWhen("critic", remedy="Choose algo=ppo, which has a critic")] = Field(
        default=0.5, gt=0
    )
    """Range of the clipped value loss around the old value."""
    kl: KlConfig = KlConfig()
    """Distance from the reference policy."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction between sampler and trainer."""
    rejection: RejectionConfig = RejectionConfig()
    """Tokens and responses that are too far from the sampler."""
    off_policy_mask: float | None = Field(default=None, gt=0)
    """Largest fall of a response's mean log-probability since it was sampled, in nats a token. Above it a response with
    a negative advantage has no policy loss. None: no limit."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a mini-batch's response tokens that have a policy loss: those where the policy's entropy is highest."""
    clip_cov: ClipCovConfig = ClipCovConfig()
    """Tokens without a policy loss, so that the entropy falls more slowly."""
    mask_truncated: bool = False
    """Skip responses that were cut at the length limit in the update; their scores still count in their group."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups of equal score."""
    overlong: OverlongConfig = OverlongConfig()
    """Soft penalty near the length limit."""
    checks = (
        _is_known("policy_loss", tuple(POLICY_LOSSES)),
        _is_known("advantage", ADVANTAGES),
        rule(".top_entropy", "trainer.old_logprobs",
             "must be 1 with trainer.old_logprobs=behavior: the entropy is found in the pass of old log-probabilities",
             lambda own, run: own.top_entropy == 1 or run.trainer.old_logprobs != "behavior",
             "Set trainer.old_logprobs=auto, or algo.top_entropy=1"),
        rule(".policy_loss",
             "trainer.mini_batch_size trainer.batch_size trainer.epochs_per_batch trainer.old_logprobs",
             "must not be kl_cov where a batch gets one update: there the policy is the old one, and the penalty is "
             "nothing",
             lambda own, run: own.policy_loss != "kl_cov" or run.trainer.epochs_per_batch > 1
             or run.trainer.mini_batch_size < run.trainer.batch_size or run.trainer.old_logprobs == "behavior",
             "Lower trainer.mini_batch_size, or choose algo.policy_loss=ppo_clip"),
        rule(".advantage", "reward.weights", "needs two parts or more in reward.weights for gdpo",
             lambda own, run: own.advantage != "gdpo" or len(run.reward.weights) > 1,
             "Name them, such as {correct: 1.0, format: 0.2}, or choose algo=grpo"),
        rule(".advantage", ".overlong.enabled .kl.where",
             "must not be gdpo with what is taken off the total, an overlong penalty or a KL in the reward",
             lambda own, _: own.advantage != "gdpo" or not (own.overlong.enabled or own.kl.where == "reward"),
             "Leave the penalty out, and set algo.kl.where=loss"),
        rule(".advantage", "data.environment",
             "must not be remax with an environment: its greedy response would get other random numbers",
             lambda own, run: own.advantage != "remax" or not run.data.environment, "Choose algo=rloo or algo=grpo"),
    )  # fmt: skip

    @property
    def advantage_function(self) -> str | None:
        """`module:function` of an advantage that is a function with options, None for the others."""
        name = ADVANTAGE_FUNCTIONS.get(self.advantage, self.advantage)
        return name if ":" in name else None


OFFLOAD_PIECE_BYTES = 268_435_456
"""Bytes of moments that an offloaded optimizer moves to the device together. Defined here because the memory plan uses
it before torch is imported."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: linear and cosine fall to `min_lr_ratio` x lr after the last step."""
    min_lr_ratio: Annotated[float, EffectiveWhen(".schedule", unless="constant")] = Field(default=0.0, ge=0, le=1)
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
    offload: Annotated[bool, MayChange] = False
    """Keep the moments in host memory and move them to the GPU piece by piece for each step; equal numbers."""
    checks = (
        rule(".warmup_ratio", ".warmup_steps", "must be 0 where warmup_steps is given",
             lambda own, _: not (own.warmup_steps and own.warmup_ratio), "Set one of the two"),
    )  # fmt: skip


class CriticConfig(Section):
    """The value model of PPO: the policy's architecture, separate weights and optimizer."""

    path: str | None = None
    """Initial weights; None: the policy's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its optimizer."""
    warmup_steps: Annotated[int, Bound("be under", "trainer.total_steps", "Lower it, or train for longer")] = Field(
        default=0, ge=0
    )
    """First steps, in which the critic alone is trained."""
    checks = (
        rule("critic", "algo.advantage", "has no use except with algo.advantage=gae",
             lambda _, run: run.algo.advantage == "gae",
             "Leave out the critic's settings (critic=none), or choose algo=ppo"),
    )  # fmt: skip

    _expanded = field_validator("path")(expand_home)
