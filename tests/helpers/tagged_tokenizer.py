"""A tokenizer with special tokens of all kinds."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "</lone>", "[THINK]", "[/THINK]", "<seed:think>")
MARKERS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>", "<unused1>", "<pad>")
PLAIN = ("<answer>", "</answer>", "</seed:think>")  # added tokens that no decoder cuts, as Qwen3 has `<think>`


def tagged(folder: Path, *, byte_level: bool) -> Path:
    if byte_level:
        core = Tokenizer(
            models.BPE({text: id for id, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    else:
        core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([*MARKERS, *TAGS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", clean_up_tokenization_spaces=not byte_level
    ).save_pretrained(folder)
    return folder
