"""Tokenizers of prompts and responses: end token, special tokens, fingerprint, and names that a template reads."""

import inspect
import json
import shutil

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data import tokenizer as tokenizers
from data.demonstrations import tokenize_demonstrations
from data.filter import filter_dataset
from data.tasks import build_dataset
from data.tokenizer import FastPathError, PieceEncoder, PromptTokenizer, encode_whole, to_bytes, tokenizer_fingerprint
from rlcore.batching.prompts import read_demonstrations
from rlcore.config import CountdownData, MixtureData
from rlcore.config.data import RENDERING_NAMES, MixturePart
from rlcore.errors import DataError
from rlcore.storage.manifest import part_directories
from tests.data.conftest import saved, settings_in, user_prompts
from tests.helpers.file_shapes import write_rows
from tests.helpers.tokenizer_kinds import CHAT_TEMPLATE

EACH_WAY = pytest.mark.parametrize("fast_path", [True, False])
# As in Qwen3, an empty thought switches thinking off. `voice` is read in every message.
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + (' ' + voice if voice is defined else '') + '\\n' "
    "+ m.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant'"
    " + (' ' + voice if voice is defined else '') + '\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
QUIET, LOUD = {"enable_thinking": False}, {"voice": "loud"}
# Words of several scripts and kinds of white space, many of them shared by the texts of a batch.
PIECES = st.sampled_from([
    "the", "The", "number", "12", "7,", "(3", "+", "'s", "it's", "...", "=", "a_b", "", "<|im_start|>", "<|im_end|>\n",
    "x\ny", "\n", "\n\n", "\t", "\r\n", "\x0b", "\u00a0", "\u3000", "caf\u00e9", "e\u0301", "\u0301", "\u4e2d\u6587",
    "\U0001f642", "\u2019s",
])  # fmt: skip
SPACES = st.sampled_from([" ", " ", " ", " ", "", "  ", "   ", "\n", " \n", "\n "])
TEXTS = st.lists(st.tuples(PIECES, SPACES), max_size=12).map(lambda parts: "".join(map("".join, parts)))
MANY = settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_fingerprint_depends_on_files_and_broken_ones_are_refused(trained_bpe, chat_tokenizer, tmp_path):
    folder = shutil.copytree(chat_tokenizer, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"weights do not count")
    same = tokenizer_fingerprint(folder)
    assert same == tokenizer_fingerprint(chat_tokenizer)
    (folder / "chat_template.jinja").write_text("other")
    assert tokenizer_fingerprint(folder) != same
    looked_for = r"holds no tokenizer \(looked for tokenizer.json, tokenizer_config.json, tokenizer.model, ...\)"
    with pytest.raises(DataError, match=looked_for):
        tokenizer_fingerprint(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        PromptTokenizer(folder, chat=False)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained_bpe.to_str())).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=rf"^{tmp_path}: the tokenizer has no eos_token; set it in tokenizer_config\."):
        tokenizers.load_tokenizer(tmp_path)


@EACH_WAY
@pytest.mark.parametrize(("single", "before", "after"), [
    ("<|endoftext|> $A <|im_start|>", [0], [1]), ("$A <|im_end|>", [], []),
    ("<|im_start|> <|endoftext|> $A", [1, 0], []), ("$A", [], []),
])  # fmt: skip
def test_special_tokens_surround_plain_text(trained_bpe, tmp_path, fast_path, single, before, after):
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


def test_fast_path_is_checked_on_a_sample(chat_tokenizer, monkeypatch):
    found = PromptTokenizer(chat_tokenizer, chat=True)
    monkeypatch.setattr(tokenizers, "_CHECK_EVERY", 2)
    monkeypatch.setattr(PieceEncoder, "encode", lambda encoder, texts: [b"" for _ in texts])
    with pytest.raises(FastPathError, match=r"^x$"):
        found.encode_prompts(["x", "y"])


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role == 'assistant' "
    "else m.content.strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


@pytest.mark.parametrize("template", [
    CHAT_TEMPLATE, THINKS, THINKS.replace("<think>", ""), "{{ messages | tojson }}",
    CHAT_TEMPLATE.replace("m.content", "m.content.split('|')[0]"),
    CHAT_TEMPLATE.replace("m.content", "m.content.split('\n')[0]"),
])  # fmt: skip
def test_framed_texts_equal_rendered_texts(trained_bpe, tmp_path, template):
    folder = saved(trained_bpe, tmp_path, chat_template=template)
    texts = ["add 1 and 2", " 3", "4 ", "a  b\nc", "x</think>y", "p|q", "user", "<|im_end|>", "", '"', "\u00e9"]
    prompts = [*user_prompts(*texts), [{"role": "system", "content": "s"}, *user_prompts("a")[0]]]
    fast, plain = (PromptTokenizer(folder, chat=True, fast_path=fast_path) for fast_path in (True, False))
    rendered = plain.texts(prompts)
    assert fast.texts(prompts) == rendered
    pairs = [(row, response) for row in range(len(prompts)) for response in texts]
    columns = [prompts[row] for row, _ in pairs], [rendered[row] for row, _ in pairs], [text for _, text in pairs]
    assert fast.encode_responses(*columns) == plain.encode_responses(*columns)


def test_template_renders_a_sample_of_framed_texts(chat_tokenizer, monkeypatch):
    found, render, seen = PromptTokenizer(chat_tokenizer, chat=True), PromptTokenizer.render, []

    def noted(tokenizer, messages, **options):
        seen.append(messages[0]["content"])
        return render(tokenizer, messages, **options)

    monkeypatch.setattr(PromptTokenizer, "render", noted)
    prompts = user_prompts(*map(str, range(300)))
    texts = found.texts(prompts)
    assert (seen, len(texts)) == (["0", "256"], 300)
    seen.clear()
    found.encode_responses(prompts, texts, ["7"] * 300)
    assert set(seen) == {"0", "256", "?"}, "the question shows what ends a turn"


def test_framed_text_that_differs_is_an_error(trained_bpe, tmp_path):
    shouts = CHAT_TEMPLATE.replace("m.content", "(m.content | upper if m.content | length > 40 else m.content)")
    assert shouts != CHAT_TEMPLATE
    found = PromptTokenizer(saved(trained_bpe, tmp_path, chat_template=shouts), chat=True)
    assert found.texts(user_prompts("a")) == [found.render(user_prompts("a")[0])]
    with pytest.raises(FastPathError, match="A" * 41):
        found.texts(user_prompts("a" * 41))
    with pytest.raises(FastPathError, match="b" * 41):
        found.encode_responses(user_prompts("a"), found.texts(user_prompts("a")), ["b" * 41])


def test_templates_without_tools_or_names_are_refused(trained_bpe, chat_tokenizer, base_tokenizer, tmp_path):
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
    problem = r"its chat template does not read deep, thinks \(data\.chat_template_kwargs\), only depth, think\."
    remedy = r"Correct the name or leave it out, or put a chat_template\.jinja that reads it next to the tokenizer"
    with pytest.raises(DataError, match=f"^{thinks}: {problem} {remedy}$"):
        PromptTokenizer(thinks, chat=True, chat_template_kwargs={"thinks": 1, "deep": 2})


def test_texts_are_neither_truncated_nor_padded(trained_bpe, tmp_path):
    core = Tokenizer.from_str(trained_bpe.to_str())
    expected = encode_whole(core, texts := ["a", "a b c d e f g"])
    core.enable_truncation(2)
    core.enable_padding(length=4)
    found = tokenizers.load_tokenizer(saved(core, tmp_path, chat_template=None))
    assert encode_whole(found.backend_tokenizer, texts) == expected
    assert PromptTokenizer(tmp_path, chat=False, chat_template_kwargs={"deep": 1}).texts([[]]) == [""]


@pytest.fixture
def folder(trained_bpe, tmp_path):
    return saved(trained_bpe, tmp_path / "tokenizer", chat_template=TEMPLATE)


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer, messages, names, *, prompt):
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **names))


@pytest.mark.parametrize("mixture", [False, True])
def test_prompts_are_rendered_with_the_names(folder, tokenizer, artifacts_root, mixture):
    tasks = [CountdownData(train_size=20, validation_size=4, template="chat", number_high=high) for high in (40, 60)]
    parts = tuple(MixturePart(data=task, name=f"to-{task.number_high}") for task in tasks)
    dataset = build_dataset(MixtureData(parts=parts) if mixture else tasks[0], seed=1, root=artifacts_root)
    directories = set()
    for names in ({}, QUIET, QUIET | LOUD):
        config = settings_in(artifacts_root, data=CountdownData(chat_template_kwargs=names))
        directories.add(directory := filter_dataset(dataset.directory, folder, config).directory)
        files = [part / "train.parquet" for part in part_directories(directory)]
        assert len(files) == 1 + mixture
        for row in (row for file in files for row in pq.read_table(file).to_pylist()):
            assert tokenizer.decode(row["prompt_ids"]) == rendered(tokenizer, row["prompt"], names, prompt=True)
    assert len(directories) == 3


def test_demonstrations_are_rendered_with_the_names(folder, tokenizer, tmp_path):
    texts = ("What is 2 + 2?", "It is 4."), ("Hello", "Hi.")
    talks = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in texts]
    file = write_rows(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])

    def tokenize(names):
        data, warm = CountdownData(chat_template_kwargs=names), {"demonstrations": str(file), "held_out_rows": 0}
        return tokenize_demonstrations(settings_in(tmp_path, data=data, warm_start=warm), folder).directory

    directories = [tokenize(names) for names in ({}, LOUD)]
    assert directories[0] != directories[1]
    for directory, names in zip(directories, ({}, LOUD), strict=True):
        for row, talk in zip(read_demonstrations(directory / "train.parquet"), talks, strict=True):
            assert tokenizer.decode(list(row.token_ids)) == rendered(tokenizer, talk, names, prompt=False)
    with pytest.raises(DataError, match="does not read voise"):
        tokenize({"voise": "loud"})


def test_arguments_of_transformers_are_not_template_names():
    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
    assert arguments <= RENDERING_NAMES


@pytest.fixture(scope="module")
def encoder(trained_bpe):
    return PieceEncoder.of(trained_bpe)


@MANY
@given(middles=st.lists(TEXTS, max_size=6), before=TEXTS, after=TEXTS)
@example(middles=["1", "2"], before="a b ", after=" c d")
@example(middles=["", " "], before="a b", after="c d")
@example(middles=["x", "x"], before="", after="")
@example(middles=["a b", "a b c"], before="", after=" ")
def test_texts_of_shared_pieces_have_the_tokenizers_ids(encoder, trained_bpe, middles, before, after):
    texts = [before + middle + after for middle in middles]
    assert encoder.encode(texts) == encode_whole(trained_bpe, texts)


@MANY
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_any_text_has_the_tokenizers_ids(encoder, trained_bpe, texts):
    assert encoder.encode(texts) == encode_whole(trained_bpe, texts)


def test_cache_of_pieces_is_bounded(trained_bpe, monkeypatch):
    monkeypatch.setattr("data.tokenizer._MAX_PIECES", 20)
    encoder = PieceEncoder.of(trained_bpe)
    for start in range(0, 200, 10):
        texts = [f"{start + i} and {start - i} or {start * i}" for i in range(10)]
        assert encoder.encode(texts) == encode_whole(trained_bpe, texts)
        for cache in (encoder._pieces, encoder._heads):
            assert len(cache) <= 20 + 3 * len(texts)  # the bound, and the pieces of one call


def changed(core, **parts):
    """Copy a tokenizer, with parts of its description replaced or set."""
    copy = Tokenizer.from_str(json.dumps({**json.loads(core.to_str()), **parts.pop("description", {})}))
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def test_tokenizers_that_do_not_split_at_single_spaces_are_refused(trained_bpe):
    assert PieceEncoder.of(changed(trained_bpe)) is not None
    words, greedy = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), changed(trained_bpe)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    greedy.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    unsplit = changed(trained_bpe, description={"pre_tokenizer": None})
    prefixed = changed(trained_bpe, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    lowered = changed(trained_bpe, normalizer=normalizers.Lowercase())
    assert [PieceEncoder.of(tokenizer) for tokenizer in (words, greedy, unsplit, prefixed, lowered)] == [None] * 5


@pytest.mark.parametrize(("last", "merges", "splits"), [
    ("\u0120b", [], True), ("a\u0120", [("a", "\u0120")], False),
], ids=["without merges", "merged over a space"])  # fmt: skip
def test_probe_finds_tokens_over_spaces(last, merges, splits):
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), last]
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    assert (PieceEncoder.of(core) is not None) is splits
