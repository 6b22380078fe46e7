"""The head: log-probabilities and entropies from hidden states, without the logits of all tokens in memory.

Tokens are processed in chunks. The backward pass computes the logits again and overwrites them with their gradient."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

EntropyMode = Literal["none", "value", "grad"]
R = TypeVar("R")

# Elements of the largest temporary in addition to the logits: 4 MiB of float32 on a CPU, within its cache; 128 MiB on
# a GPU, where launches must not dominate.
_CPU_BLOCK_ELEMENTS = 1 << 20
_GPU_BLOCK_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities and entropies in nats for n target tokens. An entropy or `is_top` that was not requested is 0.
    `is_top`: 1 where no token is likelier than the target. `candidates`: the log-probabilities of k other tokens per
    target, or None."""

    logprobs: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"]
    is_top: Float[Tensor, "n"]
    candidates: Float[Tensor, "n k"] | None = None


def token_logprobs_and_entropy(
    hidden: Float[Tensor, "M H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, "M"],
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: EntropyMode,
    with_top: bool = False,
    compiled: bool = False,
    candidates: Int[Tensor, "M k"] | None = None,
) -> TokenLogprobs:
    """Compute log-probabilities and entropies of softmax(hidden weight^T / temperature), in float32.

        logprob = z_target - logsumexp(z)        entropy = logsumexp(z) - sum_v softmax(z)_v z_v

    At most `chunk_tokens` rows of logits exist at a time. The gradient of `weight` is summed in float32 over chunks.
    With `entropy="value"`, the entropy has no gradient. `compiled` fuses the operations after the matrix products
    (CUDA). `candidates`: k other tokens per row whose log-probabilities are returned too."""
    if temperature <= 0:
        raise ValueError(f"temperature: must be above 0 for log-probabilities, got {temperature}")
    apply = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _ChunkedHead.apply)
    settings = _Settings(temperature, chunk_tokens, entropy, with_top, compiled)
    columns = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], dim=1)
    logprobs, entropies, is_top = apply(hidden, weight, columns, settings)
    if entropy != "grad":
        entropies = entropies.detach()
    return TokenLogprobs(logprobs[:, 0], entropies, is_top, None if candidates is None else logprobs[:, 1:])


@torch.no_grad()
def likeliest_tokens(
    hidden: Float[Tensor, "M H"], weight: Float[Tensor, "V H"], *, k: int, temperature: float, chunk_tokens: int
) -> tuple[Int[Tensor, "M k"], Float[Tensor, "M k"]]:
    """Return the `k` likeliest tokens of each row in descending order, and their float32 log-probabilities."""
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, dtype=torch.float32, device=hidden.device)
    for rows in _slices(len(hidden), chunk_tokens):
        logits = _logits(hidden[rows], weight, temperature)
        log_norms, _ = _statistics(logits, with_entropy=False)
        values, ids[rows] = logits.topk(k, dim=1)
        logprobs[rows] = values - log_norms[:, None]
    return ids, logprobs


@dataclass(frozen=True, slots=True)
class _Settings:
    temperature: float
    chunk_tokens: int
    mode: EntropyMode
    with_top: bool
    compiled: bool


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics = _compiled(_block_statistics) if settings.compiled else _statistics
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        log_norms = logprobs.new_empty(len(hidden))
        entropies, is_top = torch.zeros_like(log_norms), torch.zeros_like(log_norms)
        for rows in _slices(len(hidden), settings.chunk_tokens):
            logits = _logits(hidden[rows], weight, settings.temperature)
            logprobs[rows] = logits.gather(1, targets[rows])
            if settings.with_top:
                is_top[rows] = (logprobs[rows, 0] >= logits.amax(dim=1)).float()
            log_norms[rows], entropies[rows] = statistics(logits, settings.mode != "none")
            del logits  # before the next chunk allocates
        logprobs -= log_norms[:, None]
        ctx.save_for_backward(hidden, weight, targets, log_norms, entropies)
        ctx.settings = settings
        ctx.mark_non_differentiable(is_top)
        return logprobs, entropies, is_top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, log_norms, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        gradient = _compiled(_fused_gradient) if settings.compiled else _gradient
        grad_logprobs, grad_entropies, _ = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        for rows in _slices(len(hidden), settings.chunk_tokens):
            grad_logits = gradient(
                _logits(hidden[rows], weight, settings.temperature),
                targets[rows],
                log_norms[rows],
                entropies[rows],
                grad_logprobs[rows] / settings.temperature,
                grad_entropies[rows] / settings.temperature if settings.mode == "grad" else None,
                weight.dtype,
            )
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])
            del grad_logits
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def float32_logits(hidden: Float[Tensor, "n H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "n V"]:
    """Compute hidden weight^T in float32. On CUDA, the float32 sums are returned without rounding to bfloat16."""
    if hidden.dtype != torch.float32 and hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden, weight.t()).float()


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = float32_logits(hidden, weight)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += torch.mm(left, right)


def _statistics(logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the entropy of each row. Without `with_entropy`, the entropy is 0."""
    blocks = [_block_statistics(logits[rows], with_entropy) for rows in _blocks(logits)]
    log_norms, entropies = zip(*blocks, strict=True)
    return torch.cat(log_norms), torch.cat(entropies)


def _block_statistics(logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    top = logits.amax(dim=1)
    weights = (logits - top[:, None]).exp_()
    norm = weights.sum(dim=1)
    log_norms = top + norm.log()
    return log_norms, log_norms - weights.mul_(logits).sum(dim=1) / norm if with_entropy else torch.zeros_like(norm)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    log_norms: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Overwrite the logits z, which are already divided by the temperature, with the gradient of the loss and return it
    in `dtype`.

    d logprob / d z_j = 1[j = target] - p_j        d entropy / d z_j = -p_j (log p_j + entropy)
    """
    pull = grad_logprobs.sum(dim=1, keepdim=True)
    # A shorter type fills the same memory from the front: row r overwrites only rows up to r.
    packed = logits.view(-1).view(dtype)[: logits.numel()].view(logits.shape)
    for rows in _blocks(logits):
        log_probs = logits[rows].sub_(log_norms[rows, None])
        block = log_probs.exp()
        if grad_entropies is None:
            block.mul_(-pull[rows])
        else:
            log_probs.add_(entropies[rows, None]).mul_(grad_entropies[rows, None]).add_(pull[rows])
            block.mul_(log_probs).neg_()
        # Still in float32: in half precision 1 - p of a likely token would vanish.
        packed[rows] = block.scatter_add_(1, targets[rows], grad_logprobs[rows])
    return packed


@cache
def _compiled(function: Callable[..., R]) -> Callable[..., R]:
    return torch.compile(function, dynamic=True)


def _fused_gradient(
    logits: Tensor,
    targets: Tensor,
    log_norms: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the result of `_gradient` in one expression for the compiler. `logits` is not changed."""
    log_probs = logits - log_norms[:, None]
    pull = grad_logprobs.sum(dim=1, keepdim=True)
    if targets.shape[1] == 1:  # a comparison is fused, a scatter is not
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets
        at_targets = torch.where(is_target, grad_logprobs, 0.0)
    else:
        at_targets = torch.zeros_like(logits).scatter_add(1, targets, grad_logprobs)
    if grad_entropies is not None:
        pull = pull + grad_entropies[:, None] * (log_probs + entropies[:, None])
    return (at_targets - pull * log_probs.exp()).to(dtype)


def _slices(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield consecutive row ranges of the logits, short enough that the temporary tensors of a range need little
    memory."""
    elements = _CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    return _slices(len(logits), max(1, elements // logits.shape[1]))
