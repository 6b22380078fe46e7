"""The policy and the value model: a transformers decoder over packed tokens with a language model or scalar head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlcore.models.attention import causal_band
from rlcore.models.head import EntropyMode, TokenLogprobs, float32_logits, token_logprobs_and_entropy
from rlcore.models.layout import Array
from rlcore.models.library import DynamicCache, PreTrainedModel
from rlcore.models.memory import to_device
from rlcore.models.trunk import PackedTrunk


class CausalPolicy(PackedTrunk):
    """A causal language model over packed sequences.

    `model` is the transformers model; its parameter names are those of the saved directory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: Literal["auto", "flash_attn", "varlen", "sdpa"],
        compute_dtype: torch.dtype,
        head_chunk_tokens: int,
    ) -> None:
        super().__init__(attention=attention, compute_dtype=compute_dtype)
        self.model = model
        self.head_chunk_tokens = head_chunk_tokens
        self._compiled_head = False

    @property
    def decoder(self) -> PreTrainedModel:
        """The decoder stack without the head."""
        return cast(PreTrainedModel, getattr(self.model, self.model.base_model_prefix))

    def compile_layers(self) -> None:
        """Compile each decoder layer, and what follows the head's matrix products."""
        super().compile_layers()
        self._compiled_head = True

    @property
    def head(self) -> nn.Linear:
        """The projection to the vocabulary, its weight perhaps tied to the embedding."""
        return cast(nn.Linear, self.model.get_output_embeddings())  # type: ignore[no-untyped-call]

    def forward(
        self,
        token_ids: Int[Tensor, "T"],
        position_ids: Int[Tensor, "T"],
        cu_seqlens: Int[Array, "N_plus_1"],
        target_ids: Int[Tensor, "T"],
        loss_mask: Bool[Array, "T"],
        *,
        temperature: float,
        entropy: EntropyMode,
    ) -> TokenLogprobs:
        """Log-probability of each target and entropy, Float32[T], 0 where `loss_mask` is False.

        The head runs at the masked positions alone and by chunks. Temperature 0 (greedy) counts as 1, as in the
        engines. With `cu_seqlens` and `loss_mask` as arrays of the host nothing here waits for the device.
        """
        positions = to_device(torch.as_tensor(loss_mask).nonzero()[:, 0], token_ids.device)
        layout = self.layout(cu_seqlens)
        hidden = self.hidden_states(token_ids, position_ids, layout).index_select(0, layout.place[positions])
        weight = self.head.weight
        found = token_logprobs_and_entropy(
            hidden.to(self.compute_dtype),
            weight.to(self.compute_dtype),
            target_ids[positions],
            temperature=temperature or 1.0,
            chunk_tokens=self.head_chunk_tokens,
            entropy=entropy,
            compiled=self._compiled_head,
        )
        empty = torch.zeros(len(token_ids), dtype=torch.float32, device=token_ids.device)
        return TokenLogprobs(
            empty.index_copy(0, positions, found.logprobs), empty.index_copy(0, positions, found.entropy)
        )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while: in training mode transformers' checkpointing throws the cache away."""
        if not self.training:
            yield
            return
        self.eval()
        try:
            yield
        finally:
            self.train()

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache for `decode`. Every layer keeps all tokens, a sliding window is a mask."""
        return DynamicCache()

    def decode(
        self,
        token_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B S"],
        position_ids: Int[Tensor, "B L"],
        cache: DynamicCache,
    ) -> Float[Tensor, "B V"]:
        """Float32 logits after the last of L new tokens; S = tokens in `cache` + L, rows padded on the left.

        `attention_mask` is 1 (or True) where a token is real. Appends the new tokens' keys and values to `cache`.
        """
        mask = decode_mask(attention_mask.bool(), token_ids.shape[1])
        with self.precision(), self._evaluating():
            output = self.decoder(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            return float32_logits(output.last_hidden_state[:, -1], self.head.weight)


def decode_mask(real: Bool[Tensor, "B S"], num_new: int) -> Bool[Tensor, "B 1 L S"]:
    """Which of S tokens each of the last `num_new` may see."""
    num_seen = real.shape[1]
    # A padding token sees itself: a row that sees nothing is NaN in some kernels, and spreads through the values.
    columns = torch.arange(num_seen, device=real.device)
    own = columns[num_seen - num_new :, None] == columns
    return (causal_band(num_new, num_seen, None, real.device) & real[:, None, None, :]) | own


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
