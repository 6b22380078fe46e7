"""Tokenizers as prompts and answers need them: their end token, special tokens, and what a template reads."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from data import tokenizer as tokenizers
from data.tokenizer import ChatFrame, FrameError, PieceEncoder, PromptTokenizer, encode_whole, load_tokenizer, to_bytes
from rlcore.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE, asked, saved


def test_a_tokenizer_without_an_end_token_is_refused(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained_bpe.to_str())).save_pretrained(tmp_path)
    with pytest.raises(DataError) as told:
        load_tokenizer(tmp_path)
    assert str(told.value) == f"{tmp_path}: the tokenizer has no eos_token; set it in tokenizer_config.json"


def test_special_tokens_surround_plain_text(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    core = Tokenizer.from_str(trained_bpe.to_str())
    ends = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
    (plain,) = encode_whole(core, ["a b"])
    for name, single, before, after in (
        ("both", "<|endoftext|> $A <|im_start|>", [0], [1]),
        ("end", "$A <|im_end|>", [], []),
        ("first", "<|im_start|> <|endoftext|> $A", [1, 0], []),
        ("none", "$A", [], []),
    ):
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
        for short_way in (True, False):
            found = PromptTokenizer(saved(core, tmp_path / name, chat_template=None), chat=False, short_way=short_way)
            expected = to_bytes(before) + plain + to_bytes(after)
            assert found.encode_prompts(["a b"]) == [expected]
            (answer,) = encode_whole(core, [" a b"])
            assert found.encode_responses(asked("x", "x"), ["x", "x"], [" a b", ""]) == (
                [answer + to_bytes([2]), b""],
                {},
            )
            assert found.stop_ids == {2}
            assert found.texts([[{"role": "user", "content": "a"}, {"role": "user", "content": " b"}]]) == ["a b"]
    assert np.frombuffer(to_bytes([1, 2]), dtype=np.int32).tolist() == [1, 2]


def test_a_frame_is_the_text_around_a_message() -> None:
    def frame(text: str, **render: str) -> ChatFrame | None:
        return ChatFrame.of(text, lambda messages: "<" + messages[0]["content"] + ">")

    assert frame("{{ x }}") == ChatFrame("<", ">", False, None)
    stripped = ChatFrame.of("{{ x }}", lambda messages: f"<{messages[0]['content'].strip()}>")
    assert stripped == ChatFrame("<", ">", True, None)
    assert stripped.text(" a ") == "<a>"
    found = frame("{% if '</think>' in m %}{% endif %}{{ m.split('||')[0] }}{{ m | replace('%%', ' ') }}{{ 'x' + m }}")
    assert found is not None
    assert [found.text(text) for text in ("a</think>", "a||", "a%%", "ax", " a ")] == [
        None,
        None,
        None,
        "<ax>",
        "< a >",
    ]
    assert frame("{% for m in %}") is None
    assert ChatFrame.of("{{ x }}", lambda messages: messages[0]["content"].upper()) is None
    assert ChatFrame.of("{{ x }}", lambda messages: "") is None


def test_the_short_way_is_checked_on_each_so_many_texts(chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = PromptTokenizer(chat_tokenizer, chat=True)
    texts = found.texts(asked("a", "b", "c"))
    assert PromptTokenizer(chat_tokenizer, chat=True, short_way=False).texts(asked("a", "b", "c")) == texts
    monkeypatch.setattr(tokenizers, "_CHECK_EVERY", 2)  # 256 texts would be needed
    monkeypatch.setattr(ChatFrame, "text", lambda frame, content: f"{content}!")
    with pytest.raises(FrameError, match="'a'"):
        found.texts(asked("a", "b"))
    monkeypatch.setattr(PieceEncoder, "encode", lambda encoder, texts: [b"" for _ in texts])
    with pytest.raises(FrameError, match=r"^x$"):
        found.encode_prompts(["x", "y"])


def test_a_template_without_tools_or_names_is_refused(
    trained_bpe: Tokenizer, chat_tokenizer: Path, base_tokenizer: Path, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(DataError, match=rf"^{chat_tokenizer}: its chat template shows no tools to the model"):
        PromptTokenizer(chat_tokenizer, chat=True, tools=[tool])
    PromptTokenizer(base_tokenizer, chat=False, tools=[tool])
    with pytest.raises(DataError, match=rf"^{base_tokenizer}: the prompts are chats, but this tokenizer has no chat"):
        PromptTokenizer(base_tokenizer, chat=True)
    shows = saved(trained_bpe, tmp_path, chat_template="{{ tools | tojson if tools }}" + CHAT_TEMPLATE)
    found = PromptTokenizer(shows, chat=True, tools=[tool])
    assert found.render([{"role": "user", "content": "a"}]).startswith(
        '[{"type": "function", "function": {"name": "f"}}]'
    )
    assert found.render([{"role": "user", "content": "a"}], opened=False).endswith("a<|im_end|>\n")
    assert found.render([{"role": "user", "content": "a"}]).endswith("a<|im_end|>\n<|im_start|>assistant\n")
    thinks = saved(trained_bpe, tmp_path / "thinks", chat_template=CHAT_TEMPLATE + "{{ think }}{{ depth }}")
    assert (
        PromptTokenizer(thinks, chat=True, chat_template_kwargs={"think": 7})
        .render([{"role": "user", "content": "a"}])
        .endswith("assistant\n7")
    )
    with pytest.raises(DataError) as told:
        PromptTokenizer(thinks, chat=True, chat_template_kwargs={"thinks": 1, "deep": 2})
    assert str(told.value) == (
        f"{thinks}: its chat template does not read deep, thinks (data.chat_template_kwargs), only depth, think. "
        "Correct the name or leave it out, or put a chat_template.jinja that reads it next to the tokenizer"
    )


def test_texts_are_neither_truncated_nor_padded(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    core = Tokenizer.from_str(trained_bpe.to_str())
    texts = ["a", "a b c d e f g"]
    expected = encode_whole(core, texts)
    core.enable_truncation(2)
    core.enable_padding(length=4)
    found = load_tokenizer(saved(core, tmp_path, chat_template=None))
    assert encode_whole(found.backend_tokenizer, texts) == expected
    assert PromptTokenizer(tmp_path, chat=False, chat_template_kwargs={"deep": 1}).texts([[]]) == [""]
