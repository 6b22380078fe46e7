"""Float32 logits from a vLLM model that computes in a shorter type."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.models.head import float32_logits


def give_float32_logits(model: nn.Module) -> None:
    """Let the head's product come out in float32, as the trainer's does (`rlcore.models.head`).

    vLLM rounds logits to the model's type. In bfloat16 one of 20 is then off by up to 0.06, and with it the
    log-probability of every token that a trained model is sure of. A head that is not a plain matrix stays as it is.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if head is not None and type(method).__name__ == "UnquantizedEmbeddingMethod":
        head.quant_method = _float32_method(type(method))()


def _float32_method(base: Any) -> Any:
    class Float32Method(base):  # type: ignore[misc]
        def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            weight: Any = layer.weight
            logits = float32_logits(x, weight) if x.is_cuda else F.linear(x.float(), weight.float())
            return logits if bias is None else logits + bias.float()

    return Float32Method
