"""Fixtures for the tests of datasets: the published GSM8K files next to the repository, and tokenizers."""

import os
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from rlcore.config import MappedData, RunConfig
from rlcore.config.model import ScratchModel
from rlcore.models.tokenizer import build_scratch_tokenizer
from tests.helpers.file_shapes import write_rows
from tests.helpers.tokenizer_kinds import CHAT_TEMPLATE, CHATML, byte_level

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    folder = Path(os.environ.get("MILLRACE_GSM8K", REPOSITORY.parent / "shared" / "data" / "gsm8k"))
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"the published GSM8K files are not at {folder}; set MILLRACE_GSM8K to their folder")
    return folder


@pytest.fixture(scope="session")
def scratch_tokenizer(tmp_path_factory) -> Path:
    return build_scratch_tokenizer(ScratchModel(), tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="session")
def trained_bpe() -> Tokenizer:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    return byte_level(CHATML, [file.read_text(errors="replace") for file in files], vocab_size=2_000)


def settings_in(root: Path, **sections: object) -> RunConfig:
    return RunConfig(paths={"root": str(root)}, **sections)


def user_prompts(*questions: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


def saved(core: Tokenizer, folder: Path, *, chat_template: str | None) -> Path:
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    copy = Tokenizer.from_str(core.to_str())
    PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=chat_template, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(trained_bpe, tmp_path_factory) -> Path:
    return saved(trained_bpe, tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def base_tokenizer(trained_bpe, tmp_path_factory) -> Path:
    """A tokenizer without a chat template that puts a token before every text."""
    core = Tokenizer.from_str(trained_bpe.to_str())
    first = [("<|endoftext|>", 0)]
    core.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=first)
    return saved(core, tmp_path_factory.mktemp("base"), chat_template=None)


@pytest.fixture
def mapped(tmp_path: Path) -> MappedData:
    """Return three rows for training and two held-out rows."""
    for name, number in (("train", 3), ("test", 2)):
        rows = [{"question": f"{name} {n}?", "answer": str(n)} for n in range(number)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    return MappedData(source=str(tmp_path))
