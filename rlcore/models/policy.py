"""The policy and the value model: a transformers decoder over packed tokens, with a language-model or a scalar head."""

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, cast

import torch
import torch.compiler.config as compiler_settings
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import DynamicCache, PreTrainedModel

from rlcore.config.model import ModelConfig
from rlcore.models.attention import Array, IntArray, PackedLayout, build_layout, causal_band
from rlcore.models.head import EntropyMode, TokenLogprobs, float32_logits, likeliest_tokens, token_logprobs_and_entropy
from rlcore.models.kernels import AttentionChoice, choose_attention
from rlcore.models.memory import to_device

_MAX_COMPILED_GRAPHS = 64
"""The maximum number of compiled graphs of decoder layers per process. About 10 are in use."""


class PackedTrunk(nn.Module):
    """A decoder over T packed tokens. Subclasses add a head. If the weights are float32 and `compute_dtype` is
    bfloat16, the decoder runs under autocast. If `sharded` is true, FSDP casts the weights instead."""

    def __init__(self, model: PreTrainedModel, settings: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.wanted_dtype = compute_dtype
        self.share_prompts = settings.share_prompts
        self.sharded = False
        self.base_digest = ""  # of the frozen weights under adapters
        self._attention_request = settings.attention
        self._offload_activations = settings.gradient_checkpointing and settings.offload_activations
        self._head_chunk_tokens = settings.head_chunk_tokens
        self._is_compiled = False

    @property
    def decoder(self) -> PreTrainedModel:
        """The decoder stack without a head."""
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, or an empty list for an unknown architecture, which loading rejects."""
        found = getattr(self.decoder, "layers", None)
        return found if isinstance(found, nn.ModuleList) else nn.ModuleList()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the matrix products."""
        stored = next(self.parameters()).dtype
        return self.wanted_dtype if stored == torch.float32 else stored

    @property
    def attention(self) -> AttentionChoice:
        """The attention backend for this device and compute type."""
        config = self.decoder.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return choose_attention(self._attention_request, self.device, self.compute_dtype, head_dim)

    def compile_layers(self) -> None:
        """Compile the forward pass of each decoder layer without FSDP's hooks, and the head's operations after the
        matrix products. Call this before `shard`, which adds the hooks."""
        self._is_compiled = True
        compiler_settings.recompile_limit = max(compiler_settings.recompile_limit, _MAX_COMPILED_GRAPHS)
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward)

    def layout(self, cu_seqlens: Int[Array, "N_plus_1"], shared: IntArray | None = None) -> PackedLayout:
        """Build the layout of a micro-batch. For `shared`, see `build_layout`."""
        return build_layout(cu_seqlens, backend=self.attention.name, device=self.device, shared=shared)

    def hidden_states(
        self, token_ids: Int[Tensor, "T"], position_ids: Int[Tensor, "T"], layout: PackedLayout
    ) -> Float[Tensor, "c H"]:
        """Return the decoder's output for the c computed tokens, in the order of the layout. The state of batch token t
        is at `layout.computed_index[t]`."""
        # Tensors for the backward pass. Checkpointed layers save only their inputs.
        on_host = save_on_cpu(pin_memory=self.device.type == "cuda") if self._offload_activations else nullcontext()
        with self._precision(), on_host:
            output = self.decoder(
                input_ids=token_ids[layout.token_order][None],
                position_ids=position_ids[layout.token_order][None],
                use_cache=False,
                packed_layout=layout,
            )
        return cast(Tensor, output.last_hidden_state)[0]

    def _precision(self) -> AbstractContextManager[object]:
        stored = next(self.parameters()).dtype
        if self.sharded or stored == self.compute_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)


def _at(positions: Tensor, values: Tensor, length: int) -> Tensor:
    """Return a tensor of `length` rows with the rows of `values` at `positions` and 0 at all other positions."""
    return values.new_zeros(length, *values.shape[1:]).index_copy(0, positions, values)


M = TypeVar("M", bound=nn.Module)


def round_weights(model: M, dtype: torch.dtype) -> M:
    """Round the parameters to `dtype` in place and return the model. Unlike `.to(dtype)`, this keeps rotary frequencies
    (buffers) in float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


class CausalPolicy(PackedTrunk):
    """A causal language model over packed sequences."""

    @property
    def head(self) -> nn.Linear:
        """The projection to the vocabulary. It may be tied to the embedding."""
        return cast(nn.Linear, self.model.get_output_embeddings())  # type: ignore[no-untyped-call]

    def forward(
        self,
        token_ids: Int[Tensor, "T"],
        position_ids: Int[Tensor, "T"],
        cu_seqlens: Int[Array, "N_plus_1"],
        target_ids: Int[Tensor, "T"],
        loss_mask: Bool[Array, "T"],
        shared: IntArray | None = None,
        *,
        temperature: float,
        entropy: EntropyMode,
        with_top: bool = False,
        candidates: Int[Tensor, "T k"] | None = None,
    ) -> TokenLogprobs:
        """Return the log-probability, entropy and top-1 flag of each target, Float32[T], with 0 outside `loss_mask`.

        For `shared`, see `build_layout`. Shared tokens must have no loss. For temperature 0 (greedy decoding),
        log-probabilities are computed at temperature 1, as in the engines. If `cu_seqlens` and `loss_mask` are on the
        host, the call does not wait for the device. `candidates`: k other tokens per target that get
        log-probabilities."""
        positions, hidden, weight = self._head_inputs(token_ids, position_ids, cu_seqlens, loss_mask, shared)
        found = token_logprobs_and_entropy(
            hidden,
            weight,
            target_ids[positions],
            temperature=temperature or 1.0,
            chunk_tokens=self._head_chunk_tokens,
            entropy=entropy,
            with_top=with_top,
            compiled=self._is_compiled,
            candidates=None if candidates is None else candidates[positions],
        )
        tokens = [found.logprobs, found.entropy, found.is_top]
        tokens += [] if found.candidates is None else [found.candidates]
        return TokenLogprobs(*(_at(positions, each, len(token_ids)) for each in tokens))

    def likeliest(
        self,
        token_ids: Int[Tensor, "T"],
        position_ids: Int[Tensor, "T"],
        cu_seqlens: Int[Array, "N_plus_1"],
        loss_mask: Bool[Array, "T"],
        shared: IntArray | None = None,
        *,
        k: int,
        temperature: float,
    ) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
        """Return the `k` likeliest next tokens after each token, and their log-probabilities. Both are 0 outside
        `loss_mask`. The model must not be sharded."""
        positions, hidden, weight = self._head_inputs(token_ids, position_ids, cu_seqlens, loss_mask, shared)
        ids, logprobs = likeliest_tokens(
            hidden, weight, k=k, temperature=temperature or 1.0, chunk_tokens=self._head_chunk_tokens
        )
        return _at(positions, ids, len(token_ids)), _at(positions, logprobs, len(token_ids))

    def _head_inputs(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Int[Array, "N_plus_1"],
        loss_mask: Bool[Array, "T"],
        shared: IntArray | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions with a loss, the decoder's output at these positions, and the weight of the head."""
        positions = to_device(torch.as_tensor(loss_mask).nonzero()[:, 0], token_ids.device)
        layout = self.layout(cu_seqlens, shared)
        hidden = self.hidden_states(token_ids, position_ids, layout).index_select(0, layout.computed_index[positions])
        return positions, hidden.to(self.compute_dtype), self.head.weight.to(self.compute_dtype)

    def decode(
        self,
        token_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B S"],
        position_ids: Int[Tensor, "B L"],
        cache: DynamicCache,
    ) -> Float[Tensor, "B V"]:
        """Return the float32 logits of the token that follows L new tokens. Rows are left-padded, and S = cached tokens
        + L. `attention_mask` is 1 for real tokens. The L new tokens are added to `cache`, and no old tokens are
        dropped. A sliding window is applied by masking. The model must be in evaluation mode, because gradient
        checkpointing discards the cache."""
        mask = decode_mask(attention_mask.bool(), token_ids.shape[1])
        with self._precision():
            output = self.decoder(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            return float32_logits(output.last_hidden_state[:, -1], self.head.weight)


def decode_mask(real: Bool[Tensor, "B S"], num_new: int) -> Bool[Tensor, "B 1 L S"]:
    """Return a mask over all S tokens for each of the last `num_new` tokens. The mask is True where the new token may
    attend to one of the S tokens. `real` is False for padding."""
    num_seen = real.shape[1]
    # A padding token attends to itself, since an empty row is NaN in some kernels.
    columns = torch.arange(num_seen, device=real.device)
    own = columns[num_seen - num_new :, None] == columns
    return (causal_band(num_new, num_seen, None, real.device) & real[:, None, None, :]) | own


class ValueModel(PackedTrunk):
    """A decoder with a linear value head, which is initialized to 0."""

    def __init__(self, model: PreTrainedModel, settings: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__(model, settings, compute_dtype)
        self.value_head = nn.Linear(model.config.hidden_size, 1, device=self.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self,
        token_ids: Int[Tensor, "T"],
        position_ids: Int[Tensor, "T"],
        cu_seqlens: Int[Array, "N_plus_1"],
        shared: IntArray | None = None,
    ) -> Float[Tensor, "T"]:
        """Return the value of the state after each token, Float32[T]. The head computes in float32."""
        layout = self.layout(cu_seqlens, shared)
        hidden = self.hidden_states(token_ids, position_ids, layout)
        values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
        return values.float()[layout.computed_index]
