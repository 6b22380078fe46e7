"""A model with distinct dimensions, and settings of a run with it, for tests of memory plans."""

from functools import cache

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.models.shape import ModelShape
from rlcore.workers.memory_plan import Device

H, LAYERS, HEADS, QUERY, KV, INNER, VOCAB = 10, 3, 6, 24, 8, 50, 1_000
SHAPE = ModelShape(
    hidden=H, layers=LAYERS, heads=HEADS, kv_heads=2, head_dim=4, intermediate=INNER, vocab=VOCAB, tied=False,
    qkv_bias=True, qk_norm=False,
)  # fmt: skip
LAYER, ROOT, POLICY, CRITIC = 2_200, 2 * VOCAB * H + H, 26_610, 16_621
MATRICES = 2 * H * QUERY + 2 * H * KV + 3 * H * INNER
TOKENS, LONGEST, CHUNK = 30, 10, 7
BASE = (
    "model.path=of/no-model", "trainer.batch_size=8", "trainer.mini_batch_size=4", "rollout.samples_per_prompt=2",
    "filter.max_prompt_tokens=6", "rollout.max_response_tokens=4", f"model.head_chunk_tokens={CHUNK}",
    f"trainer.max_tokens_per_micro_batch={TOKENS}", "rollout.max_num_seqs=64", "model.gradient_checkpointing=false",
)  # fmt: skip
HF, NO_CRITIC = "rollout=hf", ("critic=none", "algo=grpo")
UNKNOWN, CARD = Device("a GPU", 2, None), Device("a card", 2, 50_000_000_000)


@cache
def settings(*overrides: str) -> RunConfig:
    own = {text.partition("=")[0] for text in overrides}
    base = [text for text in BASE if text.partition("=")[0] not in own]
    return load_config(["experiment=tinyzero_ppo", *base, *overrides])


CACHED = 2 * LAYERS * 2 * KV  # bytes of keys and values of a token
