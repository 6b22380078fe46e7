"""The header of a GGUF file, made by hand: where its tensors are, and in which exact words a file is refused."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from rlcore.config.gguf import TYPES, gguf_config, gguf_file, gguf_problem, is_gguf, read_header
from rlcore.errors import ModelError

META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.context_length": 128,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "bc"],
    "tokenizer.ggml.token_type": [1, 3],
}
Tensor = tuple[str, tuple[int, ...], int, int]
EMBEDDINGS: Tensor = ("token_embd.weight", (32, 10), 0, 0)
"""Name, dimensions (the last of torch's first), type and offset of a tensor."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(value: Any) -> bytes:
    """The type of a metadata entry, and its value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def header_bytes(
    meta: dict[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], int, int]], version: int = 3
) -> bytes:
    entries = b"".join(text(key) + entry(value) for key, value in meta.items())
    table = b"".join(
        text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        for name, shape, kind, offset in tensors
    )
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(meta)) + entries + table


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made.gguf"


def write(file: Path, *, version: int = 3, tensors: Sequence[Tensor] = (EMBEDDINGS,), **meta: Any) -> Path:
    """A file with room for its tensors; `meta`: entries instead of those of `META` (`_` for `.`), None leaves out."""
    entries = META | {key.replace("__", "."): value for key, value in meta.items()}
    head = header_bytes({key: value for key, value in entries.items() if value is not None}, tensors, version)
    file.write_bytes(head + bytes(10_000))
    return file


@pytest.mark.parametrize("kind", TYPES)
def test_a_block_of_a_type_has_the_weights_and_bytes_that_the_format_says(kind: int) -> None:
    assert TYPES[kind] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]


def test_these_types_are_read() -> None:
    names = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
             "IQ4_NL", "IQ4_XS"]  # fmt: skip
    assert {gguf.GGMLQuantizationType[name].value for name in names} == set(TYPES)


SCALARS = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60_000), 3: ("h", -300), 4: ("I", 2**31), 5: ("i", -70_000),
           6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**40)), 12: ("d", 0.1)}  # fmt: skip


def test_values_of_every_kind_are_read(file: Path) -> None:
    entries = b"".join(
        text(f"one.{kind}") + struct.pack(f"<I{form}", kind, value)
        + text(f"list.{kind}") + struct.pack(f"<IIQ{form}{form}", 9, kind, 2, value, value)
        for kind, (form, value) in SCALARS.items()
    )  # fmt: skip
    head = header_bytes({key: value for key, value in META.items() if value is not None}, (EMBEDDINGS,))
    of_meta = head.index(text("general.architecture"))
    file.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 1, len(META) + 2 * len(SCALARS)) + entries + head[of_meta:] + bytes(10_000)
    )
    metadata = read_header(file).metadata
    for kind, (_, value) in SCALARS.items():
        assert (metadata[f"one.{kind}"], metadata[f"list.{kind}"]) == (value, [value, value])


def test_a_header_may_end_with_the_file(file: Path) -> None:
    file.write_bytes(header_bytes({"general.architecture": "gemma3"}, ()))
    problem = gguf_problem(file)
    assert problem is not None
    assert problem.got == f"{file}, which holds gemma3"
    file.write_bytes(file.read_bytes()[:-1])
    problem = gguf_problem(file)
    assert problem is not None
    assert problem.got == f"{file}, which ends within its header"


@pytest.mark.parametrize(("alignment", "version"), [(None, 3), (64, 2), (1, 3)])
def test_tensors_begin_where_the_header_ends_at_a_multiple_of_the_alignment(
    file: Path, alignment: int | None, version: int
) -> None:
    tensors = (EMBEDDINGS, ("blk.0.attn_q.weight", (256, 3), 12, 1_280), ("output.weight", (32, 10), 8, 1_728))
    write(file, version=version, tensors=tensors, general__alignment=alignment)
    end, step = file.stat().st_size - 10_000, alignment or 32
    start = next(at for at in range(end, end + step) if at % step == 0)
    header = read_header(file)
    assert {name: (one.shape, one.offset, one.num_bytes) for name, one in header.tensors.items()} == {
        "token_embd.weight": ((10, 32), start, 1_280),
        "blk.0.attn_q.weight": ((3, 256), start + 1_280, 3 * 144),
        "output.weight": ((10, 32), start + 1_728, 10 * 34),
    }
    assert header.float32_bytes == 4 * (320 + 768 + 320)
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "bc"]
    assert header.metadata["tokenizer.ggml.token_type"] == [1, 3]


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 0.5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BIAS = ("blk.0.attn_q.bias", (32,), 0, 1_280)
OF_QWEN2 = {key.replace("llama.", "qwen2."): value for key, value in META.items() if key.startswith("llama.")}


@pytest.mark.parametrize(
    ("tensors", "meta", "differing"),
    [
        ((EMBEDDINGS,), {}, {}),
        ((EMBEDDINGS,), {"llama__rope__dimension_count": 6}, {"head_dim": 6}),
        ((EMBEDDINGS,), {"llama__rope__dimension_count": 6, "llama__attention__key_length": 16}, {"head_dim": 16}),
        ((EMBEDDINGS,), {"llama__attention__head_count_kv": 2}, {"num_key_value_heads": 2}),
        ((EMBEDDINGS,), {"llama__rope__freq_base": 5e5}, {"rope_theta": 5e5}),
        ((EMBEDDINGS, ("output.weight", (32, 10), 0, 1_280)), {}, {"tie_word_embeddings": False}),
        ((EMBEDDINGS, BIAS), {}, {"attention_bias": True}),
        (
            (EMBEDDINGS,),
            {"tokenizer__ggml__eos_token_id": 3, "tokenizer__ggml__eot_token_id": 3,
             "tokenizer__ggml__bos_token_id": 1},
            {"eos_token_id": 3, "bos_token_id": 1},
        ),
        (
            (EMBEDDINGS,),
            {"tokenizer__ggml__eos_token_id": 3, "tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": 4,
             "tokenizer__ggml__padding_token_id": 0},
            {"eos_token_id": [3, 5, 4], "pad_token_id": 0},
        ),
        ((EMBEDDINGS,), {"llama__expert_count": 0}, {}),
        ((EMBEDDINGS,), {"llama__rope__scaling__type": "none"}, {}),
    ],
)  # fmt: skip
def test_the_config_has_the_sizes_of_the_file_and_what_is_usual(
    file: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]],
    meta: dict[str, Any],
    differing: dict[str, Any],
) -> None:
    assert gguf_config(str(write(file, tensors=tensors, **meta))) == CONFIG | differing


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_2_has_biases_and_one_width_of_heads_without_saying_so(file: Path, kind: str) -> None:
    sizes = {key.replace("qwen2.", f"{kind}.").replace(".", "__"): value for key, value in OF_QWEN2.items()}
    config = gguf_config(str(write(file, tensors=(EMBEDDINGS, BIAS), general__architecture=kind, **sizes)))
    left_out = ("attention_bias", "head_dim") if kind == "qwen2" else ()
    assert config == {key: value for key, value in CONFIG.items() if key not in left_out} | {"model_type": kind}


FOLDER = "Give a folder with config.json and safetensors instead"
COPY = "Copy or download it again"
BPE = "must hold a byte-level BPE tokenizer (gpt2, pre-tokenizer smollm, gpt-2, llama-bpe, qwen2, deepseek-r1-qwen)"
TRAINED = "must hold an architecture that is trained from GGUF (llama, qwen2, qwen3)"


@pytest.mark.parametrize(
    ("tensors", "meta", "rule", "got", "remedy"),
    [
        ((EMBEDDINGS,), {"general__architecture": None}, TRAINED, "holds none", FOLDER),
        (
            (EMBEDDINGS,), {"general__architecture": "gemma3", "gemma3__expert_count": 4},
            TRAINED, "holds gemma3", FOLDER,
        ),
        ((EMBEDDINGS,), {"llama__expert_count": 4}, TRAINED, "holds llama with experts", FOLDER),
        (
            (EMBEDDINGS, ("a", (32,), 40, 0), ("b", (32,), 39, 0)), {},
            "must hold types of tensors that are read here", "has ggml type 39", FOLDER,
        ),
        (
            (EMBEDDINGS,), {"llama__rope__scaling__type": "linear"},
            "must not scale its rotary positions by an entry of the file", "has 'linear'", FOLDER,
        ),
        ((EMBEDDINGS,), {"tokenizer__ggml__model": "llama"}, BPE, "has llama, pre-tokenizer smollm", FOLDER),
        ((EMBEDDINGS,), {"tokenizer__ggml__pre": "tekken"}, BPE, "has gpt2, pre-tokenizer tekken", FOLDER),
        (
            (EMBEDDINGS,), {"llama__context_length": None},
            "must name the model's sizes", "lacks 'context_length'", FOLDER,
        ),
        (
            (EMBEDDINGS,), {"llama__attention__head_count": 0}, "must name the model's sizes",
            "whose sizes make no model (integer division or modulo by zero)", FOLDER,
        ),
    ],
)  # fmt: skip
def test_why_a_file_cannot_be_trained(
    file: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]],
    meta: dict[str, Any],
    rule: str,
    got: str,
    remedy: str,
) -> None:
    problem = gguf_problem(write(file, tensors=tensors, **meta))
    assert problem is not None
    which = got if got.startswith("whose") else f"which {got}"
    assert (problem.key, problem.rule, problem.got, problem.remedy) == ("model.path", rule, f"{file}, {which}", remedy)
    assert gguf_config(str(file)) is None
    with pytest.raises(ModelError) as caught:
        read_header(file)
    assert str(caught.value) == str(problem)


def test_a_file_is_whole_with_the_last_byte_of_its_last_tensor(file: Path) -> None:
    end = read_header(write(file)).tensors["token_embd.weight"].offset + 1_280
    content = file.read_bytes()
    file.write_bytes(content[:end])
    assert gguf_problem(file) is None
    file.write_bytes(content[: end - 1])
    problem = gguf_problem(file)
    assert problem is not None
    assert problem.rule == "must be a whole GGUF file"
    assert problem.got == f"{file}, which has {end - 1:,} bytes where its tensors need {end:,}"
    assert problem.remedy == COPY


@pytest.mark.parametrize("version", [1, 4])
def test_a_file_of_another_version_is_refused(file: Path, version: int) -> None:
    problem = gguf_problem(write(file, version=version))
    assert problem is not None
    assert problem.rule == "must be a GGUF file of version 2 or 3"
    assert problem.got == f"{file}, which is damaged (version {version})"


@pytest.mark.parametrize("cut", [1, 30])
def test_a_file_that_ends_within_its_header_is_refused(file: Path, cut: int) -> None:
    write(file)
    file.write_bytes(file.read_bytes()[:-10_000][:-cut])
    problem = gguf_problem(file)
    assert problem is not None
    assert (problem.rule, problem.got) == ("must be a whole GGUF file", f"{file}, which ends within its header")


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    assert gguf_config(str(write(file))) == CONFIG
    assert gguf_config(str(write(file, llama__block_count=33, llama__vocab_size=5))) == CONFIG | {
        "num_hidden_layers": 33
    }


def test_a_path_is_that_of_a_file_by_its_name_or_since_it_is_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"GGUF")
    assert is_gguf(str(tmp_path / "model"))
    assert not is_gguf(str(tmp_path))
    assert gguf_file("~/x.gguf") == Path.home() / "x.gguf"
    assert gguf_file("package:no-such-package-here") is None
    assert gguf_file("package:pytest") is None, "a package without such a file"
    assert gguf_config("package:no-such-package-here") is None
