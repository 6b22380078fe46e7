"""The value model of PPO: the policy's trunk with its own weights and a scalar head."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlcore.models.layout import Array
from rlcore.models.library import PreTrainedModel
from rlcore.models.trunk import PackedTrunk


class ValueModel(PackedTrunk):
    """A decoder and a linear head that starts at 0, so that every first value is exactly 0."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: Literal["auto", "flash_attn", "varlen", "sdpa"],
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__(attention=attention, compute_dtype=compute_dtype)
        self.model = model
        self.value_head = nn.Linear(model.config.hidden_size, 1, device=self.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def decoder(self) -> PreTrainedModel:
        """The decoder stack."""
        return self.model

    def forward(
        self,
        token_ids: Int[Tensor, "T"],
        position_ids: Int[Tensor, "T"],
        cu_seqlens: Int[Array, "N_plus_1"],
    ) -> Float[Tensor, "T"]:
        """Value of the state after each token, Float32[T]. The head computes in its weights' type, float32."""
        layout = self.layout(cu_seqlens)
        hidden = self.hidden_states(token_ids, position_ids, layout)
        values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
        return values.float()[layout.place]
