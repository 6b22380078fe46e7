"""The learning rate of a step, and the controllers of the KL coefficient and the entropy bonus."""

import math
from typing import assert_never

from rlcore.config.algo import AlgoConfig, KlConfig, OptimConfig
from rlcore.errors import NonFiniteError

# The controller moves by at most this share over one horizon (Ziegler et al. 2019)
MAX_RELATIVE_ERROR = 0.2


def lr_at(step: int, *, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of the training step that follows `step` finished steps (0, 1, ...).

        step < W   lr (step + 1) / W
        constant   lr
        linear     lr (m + (1 - m) (1 - x))
        cosine     lr (m + (1 - m) (1 + cos(pi x)) / 2)       m = min_lr_ratio

    W is the number of warm-up steps, `warmup_steps` or else `warmup_ratio` of `total_steps` S. `x = (step - W) / (S -
    W)` is clamped to [0, 1]. Source of cosine: Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts."""
    # 0.29 of 100 steps is 28.999999999999996 as a product
    warmup = optim.warmup_steps or int(optim.warmup_ratio * total_steps + 1e-9)
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

        c + step            where the entropy is below the target        c = entropy_coef + added
        max(0, c - step)    where the entropy is above the target

    Source: the controller of Skywork-OR1 (He et al. 2025, arXiv:2505.22312), which also sets c to 0 above the target.
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

    Source: Ziegler et al. 2019, arXiv:1909.08593. Raises NonFiniteError if the KL of an adaptive coefficient is not
    finite."""
    if not settings.adaptive:
        return coef
    if not math.isfinite(observed_kl):
        raise NonFiniteError(f"algo.kl: the observed KL is {observed_kl}; the coefficient cannot follow it")
    error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, observed_kl / settings.target - 1))
    return max(0.0, coef * (1 + error * num_sequences / settings.horizon))
