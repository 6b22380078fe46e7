"""Tokenizers of prompts and responses: end token, special tokens, fingerprint, and names that a template reads."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from data import tokenizer as tokenizers
from data.tokenizer import (
    FastPathError,
    PieceEncoder,
    PromptTokenizer,
    encode_whole,
    load_tokenizer,
    to_bytes,
    tokenizer_fingerprint,
)
from rlcore.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE, saved, user_prompts

EACH_WAY = pytest.mark.parametrize("fast_path", [True, False])


def test_fingerprint_depends_on_the_tokenizers_files(chat_tokenizer, tmp_path):
    folder = shutil.copytree(chat_tokenizer, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"weights do not count")
    same = tokenizer_fingerprint(folder)
    assert same == tokenizer_fingerprint(chat_tokenizer)
    (folder / "chat_template.jinja").write_text("other")
    assert tokenizer_fingerprint(folder) != same
    with pytest.raises(DataError, match="holds no tokenizer"):
        tokenizer_fingerprint(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        PromptTokenizer(folder, chat=False)


def test_tokenizers_without_an_end_token_are_refused(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained_bpe.to_str())).save_pretrained(tmp_path)
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: the tokenizer has no eos_token; set it in tokenizer_config\.js"
    ):
        load_tokenizer(tmp_path)


@EACH_WAY
@pytest.mark.parametrize(
    ("single", "before", "after"),
    [
        ("<|endoftext|> $A <|im_start|>", [0], [1]),
        ("$A <|im_end|>", [], []),
        ("<|im_start|> <|endoftext|> $A", [1, 0], []),
        ("$A", [], []),
    ],
)
def test_special_tokens_surround_plain_text(
    trained_bpe: Tokenizer, tmp_path: Path, fast_path: bool, single: str, before: list[int], after: list[int]
) -> None:
    core = Tokenizer.from_str(trained_bpe.to_str())
    (plain,), (response,) = encode_whole(core, ["a b"]), encode_whole(core, [" a b"])
    special = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    found = PromptTokenizer(saved(core, tmp_path, chat_template=None), chat=False, fast_path=fast_path)
    assert found.encode_prompts(["a b"]) == [to_bytes(before) + plain + to_bytes(after)]
    responses = found.encode_responses(user_prompts("x", "x"), ["x", "x"], [" a b", ""])
    assert responses == ([response + to_bytes([2]), b""], {})
    assert found.stop_ids == {2}
    assert found.texts([[{"role": "user", "content": "a"}, {"role": "user", "content": " b"}]]) == ["a b"]


@EACH_WAY
def test_first_token_is_not_repeated(base_tokenizer, fast_path):
    tokenizer = PromptTokenizer(base_tokenizer, chat=False, fast_path=fast_path)
    plain, begun = tokenizer.encode_prompts(["add 1 and 2", "<|endoftext|>add 1 and 2"])
    assert plain == begun


def test_templates_have_a_constant_date(trained_bpe, tmp_path):
    dated = saved(trained_bpe, tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    tokenizer = PromptTokenizer(dated, chat=True)
    assert tokenizer.texts(user_prompts("how many?")) == ["26 Jul 2024: how many?"]


def test_fast_path_is_checked_on_a_sample(chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = PromptTokenizer(chat_tokenizer, chat=True)
    monkeypatch.setattr(tokenizers, "_CHECK_EVERY", 2)
    monkeypatch.setattr(PieceEncoder, "encode", lambda encoder, texts: [b"" for _ in texts])
    with pytest.raises(FastPathError, match=r"^x$"):
        found.encode_prompts(["x", "y"])


def test_templates_without_tools_or_names_are_refused(
    trained_bpe: Tokenizer, chat_tokenizer: Path, base_tokenizer: Path, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    [message] = user_prompts("a")
    with pytest.raises(DataError, match=rf"^{chat_tokenizer}: its chat template shows no tools to the model"):
        PromptTokenizer(chat_tokenizer, chat=True, tools=[tool])
    PromptTokenizer(base_tokenizer, chat=False, tools=[tool])
    with pytest.raises(DataError, match=rf"^{base_tokenizer}: the prompts are chats, but this tokenizer has no chat"):
        PromptTokenizer(base_tokenizer, chat=True)
    shows = saved(trained_bpe, tmp_path, chat_template="{{ tools | tojson if tools }}" + CHAT_TEMPLATE)
    found = PromptTokenizer(shows, chat=True, tools=[tool])
    assert found.render(message).startswith('[{"type": "function", "function": {"name": "f"}}]')
    assert found.render(message, opened=False).endswith("a<|im_end|>\n")
    assert found.render(message).endswith("a<|im_end|>\n<|im_start|>assistant\n")
    thinks = saved(trained_bpe, tmp_path / "thinks", chat_template=CHAT_TEMPLATE + "{{ think }}{{ depth }}")
    found = PromptTokenizer(thinks, chat=True, chat_template_kwargs={"think": 7})
    assert found.render(message).endswith("assistant\n7")
    with pytest.raises(DataError) as error:
        PromptTokenizer(thinks, chat=True, chat_template_kwargs={"thinks": 1, "deep": 2})
    assert str(error.value) == (
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
    assert np.frombuffer(to_bytes([1, 2]), dtype=np.int32).tolist() == [1, 2]
