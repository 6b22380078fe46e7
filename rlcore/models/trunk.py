"""What the policy and the value model share: a transformers decoder run over packed sequences."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlcore.models.kernels import AttentionChoice, choose_attention
from rlcore.models.layout import Array, PackedLayout, build_layout
from rlcore.models.library import PreTrainedModel

_MOST_GRAPHS = 64
"""Of the layers' code in one process; 10 or so are in use."""


class PackedTrunk(nn.Module):
    """Runs a decoder over T packed tokens. Subclasses put a head on its hidden states.

    `compute_dtype` is the type of the matrix products. Weights in float32 with a bfloat16 compute type run under
    autocast, unless FSDP hands the layers weights in that type already (`sharded`).
    """

    def __init__(self, *, attention: Literal["auto", "flash_attn", "varlen", "sdpa"], compute_dtype: torch.dtype):
        super().__init__()
        self._attention_request = attention
        self._wanted_dtype = compute_dtype
        self.sharded = False

    @property
    def decoder(self) -> PreTrainedModel:
        """The decoder stack without a head."""
        raise NotImplementedError

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last; none where the decoder is of an unknown build, which loading refuses."""
        found = getattr(self.decoder, "layers", None)
        return found if isinstance(found, nn.ModuleList) else nn.ModuleList()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the matrix products."""
        stored = next(self.parameters()).dtype
        return self._wanted_dtype if stored == torch.float32 else stored

    @property
    def attention(self) -> AttentionChoice:
        """The packed attention for this device and compute type, and why."""
        config = self.decoder.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return choose_attention(self._attention_request, self.device, self.compute_dtype, head_dim)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer in backward instead of keeping its activations (in training mode)."""
        if enabled:
            self.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.decoder.gradient_checkpointing_disable()  # type: ignore[no-untyped-call]

    def compile_layers(self) -> None:
        """Compile each decoder layer by itself, all to the same code; call before `shard`.

        `forward` alone is compiled, so that hooks of FSDP and checkpointing stay outside. All models of a process share
        that code and its count of graphs: with adapters beside a critic and a reference there are more kinds of passes
        (gradient or none, sharded or not) than torch's limit of 8, beyond which it runs the others uncompiled.
        """
        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MOST_GRAPHS)
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward)

    def mark_sharded(self, compute_dtype: torch.dtype) -> None:
        """FSDP from now on hands the layers weights in `compute_dtype`."""
        self.sharded = True
        self._wanted_dtype = compute_dtype

    def layout(self, cu_seqlens: Int[Array, "N_plus_1"]) -> PackedLayout:
        """The layout of a micro-batch for the attention in use."""
        return build_layout(cu_seqlens, backend=self.attention.name, device=self.device)

    def hidden_states(
        self, token_ids: Int[Tensor, "T"], position_ids: Int[Tensor, "T"], layout: PackedLayout
    ) -> Float[Tensor, "T H"]:
        """Last hidden states in the order of `layout`: token t of the batch stands at `layout.place[t]`."""
        with self.precision():
            output = self.decoder(
                input_ids=token_ids[layout.token_order][None],
                position_ids=position_ids[layout.token_order][None],
                use_cache=False,
                packed_layout=layout,
            )
        return cast(Tensor, output.last_hidden_state)[0]

    def precision(self) -> AbstractContextManager[object]:
        """Autocast where float32 weights meet another compute type and FSDP does not cast them."""
        stored = next(self.parameters()).dtype
        if self.sharded or stored == self.compute_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedTrunk":
        # `.to(bfloat16)` would round the rotary frequencies too, and with them every position.
        exact = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            owner, _, attribute = name.rpartition(".")
            moved = self.get_buffer(name)
            if moved.dtype != torch.float32:
                setattr(self.get_submodule(owner), attribute, buffer.to(moved.device))
        return self
