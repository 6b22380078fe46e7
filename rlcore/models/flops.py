"""Floating point operations of an update, from the shape of the model and the lengths of the sequences.

6 N T + 6 A sum(s^2): N weights that tokens are multiplied by, T tokens, A attention width over all layers, s a
sequence's length. A multiplication and an addition for each weight in the forward pass, twice that in the backward
one; attention sees half of the square, since it looks back only. What is computed a second time (gradient
checkpointing) is not counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlcore.models.library import PreTrainedConfig

PER_WEIGHT = 6
PER_PAIR = 6

# Dense bfloat16 operations a second by the vendors' data sheets, in units of 1e12. The first name that is in the
# device's name counts, so a name stands before the names that are a part of it.
PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2_250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Weights by what they do. `attention_width`: heads x head size x layers. `vocabulary`: weights of one V x H."""

    layers: int
    vocabulary: int
    attention_width: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "DecoderShape":
        """The shape of a decoder with gated feed-forward layers (Llama, Qwen, Mistral and their like)."""
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        attention = hidden * head_dim * (2 * heads + 2 * key_heads)
        feed_forward = 3 * hidden * int(config.intermediate_size)
        layers = int(config.num_hidden_layers)
        return cls(layers * (attention + feed_forward), int(config.vocab_size) * hidden, heads * head_dim * layers)

    def update_flops(self, lengths: Iterable[int], *, vocabularies: int) -> float:
        """Of one pass forward and backward over sequences of these lengths.

        Args:
            lengths: tokens of each sequence.
            vocabularies: how often V x H counts: 1 for a policy (its head; looking up an embedding multiplies
                nothing), 0 for a value model, 2 for what veRL counts.
        """
        sizes = list(lengths)
        weights = self.layers + vocabularies * self.vocabulary
        return float(PER_WEIGHT * weights * sum(sizes) + PER_PAIR * self.attention_width * sum(s * s for s in sizes))


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a device by its name; None where the name is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("CPU")
    (989000000000000.0, None)
    """
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)
