"""Tokenizers and chat templates as models are published with, and a tokenizer with special tokens of all kinds."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Words as split by the tokenizers of Qwen and Llama.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LEARNED = [
    "What is 19 + 7? It is 26, I think. Let me see: 12 * 3 = 36.\n\nSo the answer is 36.",
    "Natalia sold 48 clips; how many has she left?\n#### 9",
    'caf\u00e9 \u4e2d\u6587 a  b   c\td (x) "q" don\'t',
] * 20

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + "
    "m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_QWEN3 = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.last or thought %}{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + "
    "'\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
)
QWEN3 = _QWEN3 + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
QWEN3_THINKING = _QWEN3 + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + eos_token }}{% else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)


def byte_level(special: list[str], texts: Sequence[str] = _LEARNED, vocab_size: int = 600) -> Tokenizer:
    core = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return core


def sentence_piece(special: list[str], *, legacy: bool) -> Tokenizer:
    """Return a tokenizer like Llama 2's. `legacy` puts a word mark before the first word after each special token."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *special, *every_byte], show_progress=False)
    core.train_from_iterator([text.replace("\n", " ") for text in _LEARNED], trainer)
    described = json.loads(core.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] not in every_byte]
    core = Tokenizer.from_str(json.dumps(described))
    if legacy:
        core.pre_tokenizer = None
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return core


def unigram(special: list[str]) -> Tokenizer:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", *special], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(_LEARNED, trainer)
    return core


@dataclass(frozen=True)
class Kind:
    """The parts of a tokenizer of the kind. `stops`: tokens of generation_config.eos_token_id, if there is one."""

    core: Callable[[], Tokenizer]
    template: str
    eos: str
    bos: str | None = None
    stops: tuple[str, ...] = ()
    writes: bool = True  # true if the template writes an answer behind the prompt

    def saved(self, folder: Path) -> Path:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.core(), eos_token=self.eos, pad_token=self.eos, bos_token=self.bos,
            unk_token="<unk>" if self.core().token_to_id("<unk>") is not None else None,
            chat_template=self.template, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        tokenizer.save_pretrained(folder)
        if self.stops:
            ids = tokenizer.convert_tokens_to_ids([*self.stops])
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return folder


_ROLES = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
KINDS = {
    "chatml": Kind(lambda: byte_level(CHATML), CHAT_TEMPLATE, "<|im_end|>"),
    "llama3": Kind(
        lambda: byte_level(
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        ),
        LLAMA3, "<|end_of_text|>", "<|begin_of_text|>", ("<|end_of_text|>", "<|eot_id|>"),
    ),
    "legacy": Kind(lambda: sentence_piece(["<s>", "</s>", *_ROLES], legacy=True), ZEPHYR, "</s>", "<s>"),
    "legacy-text-markers": Kind(lambda: sentence_piece(["<s>", "</s>"], legacy=True), ZEPHYR, "</s>", "<s>"),
    "llama2": Kind(lambda: sentence_piece(["<s>", "</s>"], legacy=True), INSTRUCT, "</s>", "<s>"),
    "first": Kind(lambda: sentence_piece(["<s>", "</s>"], legacy=False), ZEPHYR, "</s>", "<s>", ("</s>",)),
    "mistral": Kind(lambda: sentence_piece(["<s>", "</s>"], legacy=False), INSTRUCT, "</s>", "<s>"),
    "unigram": Kind(lambda: unigram(["</s>", *_ROLES]), ZEPHYR, "</s>"),
    "phi": Kind(
        lambda: byte_level(["<|endoftext|>", *_ROLES]), PHI, "<|endoftext|>", None,
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "qwen3": Kind(lambda: byte_level(CHATML), QWEN3, "<|im_end|>", None, ("<|im_end|>", "<|endoftext|>")),
    "qwen3-thinking": Kind(lambda: byte_level(CHATML), QWEN3_THINKING, "<|im_end|>"),
    "r1": Kind(
        lambda: byte_level(["<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>"]), R1, "<|eos|>", "<|bos|>", (), False
    ),
}  # fmt: skip

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
