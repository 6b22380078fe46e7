"""Settings of the algorithm: the advantages, the losses, the KL term, the optimizer and the critic."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rlcore.config.base import LOCAL_PATH, Bound, EffectiveWhen, MayChange, Rule, Run, Section, is_function_name, rule
from rlcore.config.problems import Problem, did_you_mean

ADVANTAGE_FUNCTIONS: Mapping[str, str] = {name: f"rlcore.algos.advantages:{name}" for name in ("pass_at_k", "gdpo")}
"""The `module:function` of each built-in advantage that takes options."""
GROUP_ADVANTAGES: frozenset[str] = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", *ADVANTAGE_FUNCTIONS}
)
"""The advantages that compare the responses to one prompt. They need two or more responses to each prompt."""
UNGROUPED_ADVANTAGES = ("gae", "reinforce_pp", "remax")
"""The built-in advantages that can differ from 0 even if all responses to a prompt have the same score."""
ADVANTAGES = (*UNGROUPED_ADVANTAGES, *sorted(GROUP_ADVANTAGES))
POLICY_LOSSES: Mapping[str, str] = {
    name: f"rlcore.algos.losses:{name}"
    for name in ("ppo_clip", "gspo", "cispo", "sapo", "gmpo", "gpg", "dppo", "kl_cov")
}
_UNCLIPPED = "sapo gmpo gpg dppo kl_cov"
_WITH_BOTH_CLIPS = EffectiveWhen(".policy_loss", unless=_UNCLIPPED)
_TWO_SIDES = EffectiveWhen("trainer.old_logprobs", unless="behavior")
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class EntropyControlConfig(Section):
    """A controller that changes the weight of the entropy bonus to keep the policy's entropy near a target."""

    target: float | None = Field(default=None, gt=0)
    """The target entropy in nats per token. If null, the weight of the entropy bonus stays at `algo.entropy_coef`."""
    step: Annotated[float, EffectiveWhen(".target")] = Field(default=0.005, gt=0)
    """The change of the entropy bonus's weight per step. The weight increases if the entropy is below the target.
    Otherwise, the weight decreases, but not below 0."""


class KlConfig(Section):
    """The KL divergence between the policy and a frozen reference policy."""

    where: Literal["off", "loss", "reward"] = "off"
    """The place of the KL term. `loss`: in the policy loss. `reward`: in the reward of each token. `off`: there is no
    KL term, and no reference model is loaded."""
    estimator: Annotated[
        Literal["auto", "k1", "k2", "k3", "low_var_kl"],
        EffectiveWhen(".where", unless="loss", of="k1", remedy="Set algo.kl.estimator=low_var_kl or k2",
                      why="algo.kl.where=loss: its gradient there is 0 on average"),
        EffectiveWhen(".where", unless="reward", of="k2 k3 low_var_kl", remedy="Set algo.kl.estimator=k1",
                      why="algo.kl.where=reward near the reference: its policy gradient vanishes, as d^2 / 2 does"),
    ] = "auto"  # fmt: skip
    """The estimator of each token's KL divergence. `low_var_kl` is another name of `k3`. `auto` means `k1` if the KL
    term is in the reward, and `low_var_kl` if it is in the loss."""
    coef: float = Field(default=0.001, ge=0)
    """The coefficient of the KL term. If `adaptive` is true, the controller starts from this coefficient."""
    adaptive: bool = False
    """Let a controller change the coefficient so that the KL divergence approaches `target`."""
    target: Annotated[float, EffectiveWhen(".adaptive")] = Field(default=0.1, gt=0)
    """The KL divergence in nats per token that the adaptive controller aims at."""
    horizon: Annotated[int, EffectiveWhen(".adaptive")] = Field(default=10_000, ge=1)
    """The number of sequences over which the controller corrects the coefficient. With a larger number, the coefficient
    changes more slowly."""
    offload: Annotated[
        bool,
        MayChange,
        EffectiveWhen("model.lora", "null", why="model.lora: the reference is the policy without its adapters"),
    ] = False
    """Keep the weights of the reference model in host memory between its forward passes."""
    effective = EffectiveWhen(".where")

    @property
    def estimator_in_use(self) -> KlEstimator:
        """The estimator of the KL term. If the setting is `auto`, this is `k1` for a KL term in the reward, and
        otherwise `low_var_kl`."""
        if self.estimator != "auto":
            return self.estimator
        return "k1" if self.where == "reward" else "low_var_kl"


_CORRECTED = EffectiveWhen(".mode")
_REJECTED = EffectiveWhen(".level")
_BY_COVARIANCE = EffectiveWhen(".share")


class ImportanceConfig(Section):
    """Importance weights that correct the difference between the sampler's and the trainer's probabilities."""

    mode: Annotated[Literal["off", "truncate", "mask"], _TWO_SIDES] = "off"
    """The factor by which a token's loss is multiplied. `truncate`: min(ratio, cap). `mask`: the ratio, or 0 if the
    ratio is outside [1/cap, cap]."""
    level: Annotated[Literal["token", "sequence"], _CORRECTED] = "token"
    """The unit of the ratio. `token`: each token has its own ratio. `sequence`: each response has one ratio, the
    product of its tokens' ratios."""
    cap: Annotated[float, _CORRECTED] = Field(default=2.0, gt=1)
    """The upper bound of the ratio `exp(old - behavior)`, which is the trainer's probability divided by the sampler's
    probability."""


class RejectionConfig(Section):
    """The tokens or responses that an update skips because their trainer and sampler probabilities differ too much."""

    level: Annotated[Literal["off", "token", "sequence-sum", "sequence-mean", "sequence-max"], _TWO_SIDES] = "off"
    """The unit that is skipped: a token, or a response. A token is skipped if its divergence exceeds the limit `cap`. A
    response is skipped if the sum, mean or maximum of its tokens' divergences exceeds the limit."""
    estimator: Annotated[Literal["k1", "k2", "k3"], _REJECTED] = "k1"
    """The estimator of a token's divergence KL(sampler || trainer). The names have the same meaning as in
    `algo.kl.estimator`."""
    cap: Annotated[float, _REJECTED] = Field(default=2.0, gt=0)
    """The largest accepted divergence, in nats, if the estimator is k2 or k3. With k1, `cap` is a ratio of two
    probabilities. This ratio must be above 1, and the largest accepted divergence is its logarithm, log(cap)."""
    checks = (
        rule(".cap", ".estimator", "must be over 1 with k1",
             lambda own, _: own.level == "off" or own.estimator != "k1" or own.cap > 1,
             "Use 2, or algo.rejection.estimator=k2 or k3"),
    )  # fmt: skip


class TeacherConfig(Section):
    """A frozen teacher that the policy learns from at each token of its own responses (on-policy distillation)."""

    path: Annotated[str, LOCAL_PATH]
    """The directory or hub id of the teacher. Its tokenizer must give the same token ids as the policy's tokenizer."""
    by_source: dict[str, str] = Field(default_factory=dict)
    """Other teachers for the prompts of some data sources, as in `{gsm8k: FOLDER}`."""
    top_k: int = Field(default=0, ge=0)
    """The number of the teacher's likeliest tokens from which KL(teacher || policy) is computed. This KL divergence is
    added to the loss. If 0, each sampled token gets the advantage `log p_teacher - log p_old` instead."""
    coef: float = Field(default=1.0, gt=0)
    """The weight of the teacher's advantage if `top_k` is 0. Otherwise, `coef` is the weight of the KL divergence in
    the loss."""
    with_reward: bool = False
    """Learn from the rewards as well as from the teacher. If false, rewards do not affect the update."""
    base: Literal["native", "nf4"] = "native"
    """The format of the teacher's weights. `native`: the compute type (`model.dtype`). `nf4`: 4 bits, as in
    `model.lora.base`."""
    offload: Annotated[bool, MayChange] = False
    """Keep the teacher's weights in host memory between its forward passes."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories or hub ids of all teachers. `path` is the first one."""
        return (self.path, *self.by_source.values())

    def index_of(self, data_source: str) -> int:
        """Return the position in `paths` of the teacher that is used for a data source."""
        return list(self.by_source).index(data_source) + 1 if data_source in self.by_source else 0


class ClipCovConfig(Section):
    """Clip-Cov. Tokens with a high covariance of log-probability and advantage are excluded from the policy loss."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """The largest share of a mini-batch's response tokens that may be excluded. The excluded tokens are chosen at
    random from the tokens with a covariance between `low` and `high`. Cui et al. (2025) use 0.0002. With 0, no token is
    excluded."""
    low: Annotated[
        float, _BY_COVARIANCE, Bound("be under", "algo.clip_cov.high", "Lower it", only_with="algo.clip_cov.share")
    ] = 1.0
    """The smallest covariance of a token that may be excluded. It should be far above the mean covariance of all
    tokens."""
    high: Annotated[float, _BY_COVARIANCE] = 5.0
    """The largest covariance of a token that may be excluded."""


class DynamicSamplingConfig(Section):
    """The replacement of groups whose responses all have the same score (DAPO)."""

    enabled: bool = False
    """Replace each group whose responses all have the same score."""
    max_refills: Annotated[int, EffectiveWhen(".enabled")] = Field(default=2, ge=0)
    """The largest number of further sampling rounds in a step. If groups are still missing after the last round, the
    step also uses groups whose responses all have the same score."""
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
    """A soft penalty on responses near the length limit (DAPO)."""

    enabled: bool = False
    """Lower the reward of responses near the length limit."""
    buffer_tokens: Annotated[
        int | None,
        EffectiveWhen(".enabled"),
        Bound(
            "be at most",
            "rollout.max_response_tokens",
            "Lower it, or leave it out, for a quarter of the limit",
            only_with="algo.overlong.enabled",
        ),
    ] = Field(default=None, ge=1)
    """The penalty grows over this number of tokens before the length limit. If null, this number is a quarter of
    `rollout.max_response_tokens`, rounded down, but at least 1."""
    penalty: Annotated[float, EffectiveWhen(".enabled")] = Field(default=1.0, ge=0)
    """The penalty on a response that reaches the length limit."""


def _is_known(field: str, known: tuple[str, ...]) -> Rule:

    def check(algo: "AlgoConfig", _: Run) -> Problem | None:
        given = getattr(algo, field)
        if given in known or is_function_name(given):
            return None
        remedy = f"{did_you_mean(given, known)}There are {', '.join(known)}"
        return Problem(f".{field}", "must be a known name, or a custom `module:function`", given, remedy)

    return Rule((f".{field}",), check)


class AlgoConfig(Section):
    """The algorithm. For each choice, `docs/algorithms.md` gives the equation and the Python function."""

    advantage: str = "grpo"
    """The advantage estimator: gae, grpo, dr_grpo, rloo, opo, remax, reinforce_pp, reinforce_pp_baseline, pass_at_k,
    gdpo, or a custom `module:function`."""
    advantage_options: Annotated[
        dict[str, bool | int | float | str],
        EffectiveWhen(".advantage", unless=" ".join({*ADVANTAGES} - {*ADVANTAGE_FUNCTIONS})),
    ] = Field(default_factory=dict)
    """Keyword arguments of pass_at_k (`k` and `threshold`) or of a custom advantage function."""
    gamma: Annotated[float, EffectiveWhen(".advantage", "gae reinforce_pp")] = Field(default=1.0, ge=0, le=1)
    """The discount factor per token. Only gae and reinforce_pp use it."""
    lam: Annotated[float, EffectiveWhen(".advantage", "gae")] = Field(default=1.0, ge=0, le=1)
    """The lambda of the generalized advantage estimate (gae)."""
    policy_loss: str = "ppo_clip"
    """The policy loss: ppo_clip, gspo, cispo, sapo, gmpo, gpg, dppo, kl_cov, or a custom `module:function`."""
    policy_loss_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments of the policy loss, such as `tau_pos` of sapo. The function of the loss declares them."""
    clip_low: Annotated[float, _WITH_BOTH_CLIPS] = Field(default=0.2, gt=0, lt=1)
    """The lower clip range. The probability ratio is clipped below at `1 - clip_low`."""
    clip_high: Annotated[float, _WITH_BOTH_CLIPS] = Field(default=0.2, gt=0)
    """The upper clip range. The probability ratio is clipped above at `1 + clip_high`."""
    dual_clip: Annotated[float | None, EffectiveWhen(".policy_loss", unless=f"cispo {_UNCLIPPED}")] = Field(
        default=3.0, gt=1
    )
    """The upper bound of the loss for a negative advantage, as a multiple of the absolute advantage. Null: no bound."""
    aggregation: Aggregation = "token-mean"
    """The way in which the per-token losses are aggregated into one number."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """The weight of the entropy bonus, or its initial weight if `algo.entropy_control.target` is set. With 0 and no
    such target, the entropy is measured, but does not affect the loss."""
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    value_clip: Annotated[float, EffectiveWhen("critic", remedy="Choose algo=ppo, which has a critic")] = Field(
        default=0.5, gt=0
    )
    """The limit of the clipped value loss: a new value is clipped if it differs from the old value by more than this
    number."""
    kl: KlConfig = KlConfig()
    teacher: TeacherConfig | None = None
    importance: ImportanceConfig = ImportanceConfig()
    rejection: RejectionConfig = RejectionConfig()
    off_policy_mask: float | None = Field(default=None, gt=0)
    """The largest accepted decrease of a response's mean log-probability since the response was sampled, in nats per
    token. A response with a larger decrease and a negative advantage has no policy loss. Null: no limit."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """The share of a mini-batch's response tokens that have a policy loss. The tokens with the highest entropy are
    chosen."""
    clip_cov: ClipCovConfig = ClipCovConfig()
    mask_truncated: bool = False
    """Exclude responses that reach the length limit from the update. Their rewards still count for the advantages of
    their group."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig = OverlongConfig()
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
        rule(".teacher.offload", ".teacher.base", "must be false with a teacher in 4 bits",
             lambda own, _: own.teacher is None or not (own.teacher.offload and own.teacher.base == "nf4"),
             "Set algo.teacher.base=native, or algo.teacher.offload=false"),
        rule(".advantage", "data.environment",
             "must not be remax with an environment: its greedy response would get other random numbers",
             lambda own, run: own.advantage != "remax" or not run.data.environment, "Choose algo=rloo or algo=grpo"),
    )  # fmt: skip

    @property
    def advantage_function(self) -> str | None:
        """The `module:function` of the advantage if it is custom or takes options, otherwise None."""
        name = ADVANTAGE_FUNCTIONS.get(self.advantage, self.advantage)
        return name if ":" in name else None


OFFLOAD_PIECE_BYTES = 268_435_456
"""The size, in bytes, of the pieces in which optimizer moments move to the GPU. The memory plan also uses this size."""


class OptimConfig(Section):
    """The AdamW optimizer and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The schedule of the learning rate after the warm-up. With `linear` and `cosine`, the rate falls to `min_lr_ratio`
    x `lr` after the last step."""
    min_lr_ratio: Annotated[float, EffectiveWhen(".schedule", unless="constant")] = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end of the schedule, as a share of `lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """The number of steps of linear warm-up."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The share of all steps that are warm-up steps. It is used if `warmup_steps` is 0."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """The decay rate of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """The decay rate of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """A small number that is added to the denominator of the update to keep the update finite."""
    weight_decay: float = Field(default=0.01, ge=0)
    """The decoupled weight decay of matrices. Norms and biases have no weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """The largest global norm of the gradient. A gradient with a larger norm is clipped."""
    offload: Annotated[bool, MayChange] = False
    """Keep the moments in host memory, and move them to the GPU in pieces in each step. The results do not change."""
    checks = (
        rule(".warmup_ratio", ".warmup_steps", "must be 0 where warmup_steps is given",
             lambda own, _: not (own.warmup_steps and own.warmup_ratio), "Set one of the two"),
    )  # fmt: skip


class CriticConfig(Section):
    """The value model of PPO. It has the policy's architecture, but separate weights and a separate optimizer."""

    path: Annotated[str | None, LOCAL_PATH] = None
    """The path of the initial weights. If null, the initial weights are those of the policy."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    warmup_steps: Annotated[
        int,
        Bound("be under", "trainer.total_steps", "Lower it, or train for longer", only_with="trainer.total_steps"),
    ] = Field(default=0, ge=0)
    """The number of steps at the start of the run in which only the critic is trained."""
    checks = (
        rule("critic", "algo.advantage", "has no use except with algo.advantage=gae",
             lambda _, run: run.algo.advantage == "gae",
             "Leave out the critic's settings (critic=none), or choose algo=ppo"),
    )  # fmt: skip
