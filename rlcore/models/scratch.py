"""A small model and its tokenizer made from nothing: no download, the same bytes for the same settings.

The tokenizer holds arithmetic only: one token for every integer up to a limit and one for each operator. A whole
countdown answer is then a dozen tokens, which is why half a million parameters can learn the task on two CPU cores.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit

from rlcore.config.model import ScratchModel
from rlcore.errors import ModelError
from rlcore.models.library import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    no_progress_bars,
)

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
UNK_TOKEN = "<unk>"
OPERATORS = ("+", "-", "*", "/", "(", ")", "=", ":", ">", ",")

# Messages one after another, nothing around them: a model made from nothing has no roles.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def build_scratch_tokenizer(config: ScratchModel, directory: Path) -> Path:
    """Write the arithmetic tokenizer into `directory` and return it; the bytes depend on `max_integer` alone.

    Text is split at white space, between digits and other characters, and at every single other character, so
    "19+7" and "19 + 7" are the same three tokens. Decoding joins tokens with one space. Whatever is not a number up
    to `max_integer` or an operator becomes `<unk>`.
    """
    words = (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *OPERATORS, *map(str, range(config.max_integer + 1)))
    core = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK_TOKEN))
    core.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex(r"\d+|\D"), behavior="isolated")])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        padding_side="left",
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    return directory


def build_scratch_model(
    config: ScratchModel, *, vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int, directory: Path
) -> Path:
    """Write a randomly initialised Qwen2 model (tied embeddings, float32) into `directory` and return it.

    `seed` alone decides the weights; the process's own random state is left as it was. Put the tokenizer into the
    same directory with `build_scratch_tokenizer` and the result is a complete transformers directory.
    Raises ModelError where `hidden_size` is not a multiple of `num_heads` or the head size is odd.
    """
    head_dim, rest = divmod(config.hidden_size, config.num_heads)
    if rest or head_dim % 2:
        raise ModelError(
            f"model.scratch.hidden_size: must be an even multiple of model.scratch.num_heads ({config.num_heads}), "
            f"got {config.hidden_size}. Set it to a multiple of {2 * config.num_heads}."
        )
    shape = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        dtype=torch.float32,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    shape.architectures = ["Qwen2ForCausalLM"]
    # The CPU generator alone: torch.manual_seed would also reset the generators of every accelerator.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=eos_token_id, pad_token_id=pad_token_id
    )
    directory.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(directory)
    return directory
