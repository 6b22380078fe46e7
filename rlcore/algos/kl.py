"""Distance from the reference policy: per-token estimators and the controller of its coefficient."""

import math
from typing import assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.losses import MAX_LOG_RATIO
from rlcore.config.algo import KlConfig, KlEstimator
from rlcore.errors import NonFiniteError

# k3 grows with the ratio itself; one token far off the reference must not outweigh a batch
MAX_K3 = 10.0
# The controller moves by at most this share over one horizon (Ziegler et al. 2019)
MAX_RELATIVE_ERROR = 0.2


def kl_estimate(
    policy_logprobs: Float[Tensor, "T"], ref_logprobs: Float[Tensor, "T"], *, estimator: KlEstimator
) -> Float[Tensor, "T"]:
    """Estimate KL(pi || pi_ref) at each sampled token, differentiable in the policy.

    With `d = clamp(log pi - log pi_ref, -20, 20)`:

        k1               d
        k2               d^2 / 2
        k3, low_var_kl   min(exp(-d) - 1 + d, 10)

    Schulman 2020, "Approximating KL Divergence". k1 and k3 are unbiased in value. In the reward only k1 has the
    divergence's gradient: near the reference that of k2 and k3 vanishes. In the loss k2 has the divergence's gradient,
    k3 that of KL(pi_ref || pi), k1 none in expectation (Liu et al. 2025, arXiv:2510.01555). The caller masks. The bound
    on d also keeps the gradient of NaN or infinity at 0.
    """
    difference = (policy_logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3" | "low_var_kl":
            # expm1 keeps the digits of a small d; k3 >= 0, so only the upper bound can act
            return (torch.expm1(-difference) + difference).clamp(-MAX_K3, MAX_K3)
        case _:
            assert_never(estimator)


def next_kl_coef(coef: float, observed_kl: float, num_sequences: int, *, settings: KlConfig) -> float:
    """Return the KL coefficient after a step with `observed_kl` nats a token over `num_sequences` responses.

        fixed      coef
        adaptive   coef (1 + clip(observed_kl / target - 1, -0.2, 0.2) num_sequences / horizon), not below 0

    Ziegler et al. 2019, arXiv:1909.08593. The checkpoint contains it. Raises NonFiniteError if the KL is not finite.
    """
    if not settings.adaptive:
        return coef
    if not math.isfinite(observed_kl):
        raise NonFiniteError(f"algo.kl: the observed KL is {observed_kl}; the coefficient cannot follow it")
    error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, observed_kl / settings.target - 1))
    return max(0.0, coef * (1 + error * num_sequences / settings.horizon))
