"""The learning rate of a step, and the controllers of the KL coefficient and the entropy bonus."""

import math
from typing import assert_never

from rlcore.config.algo import AlgoConfig, KlConfig, OptimConfig
from rlcore.errors import NonFiniteError

# The controller moves by at most this share over one horizon (Ziegler et al. 2019)
MAX_RELATIVE_ERROR = 0.2


def num_warmup_steps(*, optim: OptimConfig, total_steps: int) -> int:
    """Return the number of warm-up steps. This is `warmup_steps`, or the share `warmup_ratio` of all steps if
    `warmup_steps` is 0."""
    # 0.29 of 100 steps is 28.999999999999996 as a product
    return optim.warmup_steps or int(optim.warmup_ratio * total_steps + 1e-9)


def lr_at(step: int, *, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of the training step that follows `step` finished steps (0, 1, ...).

        step < W   lr (step + 1) / W
        constant   lr
        linear     lr (m + (1 - m) (1 - x))
        cosine     lr (m + (1 - m) (1 + cos(pi x)) / 2)       m = min_lr_ratio

    W is the number of warm-up steps, S is `total_steps`, and `x = (step - W) / (S - W)` is clamped to [0, 1]. The first
    warm-up step has the rate lr / W. The linear and cosine schedules reach lr m only at `step` = S, when the run has
    ended. No step of the run therefore has the rate 0. The cosine schedule is from Loshchilov and Hutter 2017,
    arXiv:1608.03983, without restarts.
    """
    warmup = num_warmup_steps(optim=optim, total_steps=total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / (total_steps - warmup) if step < total_steps else 1.0
    match optim.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = (1.0 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(optim.schedule)
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def next_entropy_bonus(added: float, observed_entropy: float, *, settings: AlgoConfig) -> float:
    """Return the addend to `algo.entropy_coef` after a step with the mean entropy `observed_entropy` in nats per token.

    The weight so far is `c = entropy_coef + added`. `algo.entropy_control` sets `step` and `target`. The new weight is:

        c + step            where the entropy is below the target
        max(0, c - step)    where the entropy is above the target

    This is the controller of Skywork-OR1 (He et al. 2025, arXiv:2505.22312). Skywork-OR1 also sets the weight to 0
    while the entropy is above the target. This controller does not.
    """
    control = settings.entropy_control
    if control.target is None or observed_entropy == control.target:
        return added
    if observed_entropy < control.target:
        return added + control.step
    return max(-settings.entropy_coef, added - control.step)


def next_kl_coef(coef: float, observed_kl: float, num_sequences: int, *, settings: KlConfig) -> float:
    """Return the KL coefficient after a step of `num_sequences` responses with a mean KL of `observed_kl` nats per
    token.

        fixed      coef
        adaptive   coef (1 + clip(observed_kl / target - 1, -0.2, 0.2) num_sequences / horizon), not below 0

    Source: Ziegler et al. 2019, arXiv:1909.08593. A checkpoint contains the coefficient. Raises NonFiniteError if the
    coefficient is adaptive and the KL is not finite.
    """
    if not settings.adaptive:
        return coef
    if not math.isfinite(observed_kl):
        raise NonFiniteError(f"algo.kl: the observed KL is {observed_kl}; the coefficient cannot follow it")
    error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, observed_kl / settings.target - 1))
    return max(0.0, coef * (1 + error * num_sequences / settings.horizon))
