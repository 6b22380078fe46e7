"""Names that a chat template reads, in prompts, demonstrations and later turns."""

import inspect
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.demonstrations import tokenize_demonstrations
from data.filter import filter_dataset
from data.tasks import build_dataset
from rlcore.batching.prompts import read_demonstrations
from rlcore.config import CountdownData, FilterConfig, MixtureData, WarmStartConfig
from rlcore.config.data import RENDERING_NAMES, MixturePart
from rlcore.errors import DataError
from rlcore.storage.manifest import part_directories
from tests.data.conftest import saved

# As in Qwen3, an empty thought switches thinking off. `voice` is read in every message.
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + (' ' + voice if voice is defined else '') + '\\n' "
    "+ m.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant'"
    " + (' ' + voice if voice is defined else '') + '\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
QUIET = {"enable_thinking": False}
LOUD = {"voice": "loud"}


@pytest.fixture
def folder(trained_bpe: Tokenizer, tmp_path: Path) -> Path:
    return saved(trained_bpe, tmp_path / "tokenizer", chat_template=TEMPLATE)


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Any, names: dict[str, Any], *, prompt: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **names))


@pytest.mark.parametrize("mixture", [False, True])
def test_prompts_are_rendered_with_the_names(
    folder: Path, tokenizer: PreTrainedTokenizerBase, artifacts_root: Path, mixture: bool
) -> None:
    tasks = [CountdownData(train_size=20, validation_size=4, template="chat", number_high=high) for high in (40, 60)]
    parts = tuple(MixturePart(data=task, name=f"to-{task.number_high}") for task in tasks)
    dataset = build_dataset(MixtureData(parts=parts) if mixture else tasks[0], seed=1, root=artifacts_root)
    settings = FilterConfig(max_prompt_tokens=2_000)
    found = {
        name: filter_dataset(dataset.directory, folder, settings, root=artifacts_root, chat_template_kwargs=names)
        for name, names in (("without", None), ("none", {}), ("quiet", QUIET), ("both", QUIET | LOUD))
    }
    assert found["none"].directory == found["without"].directory
    assert len({result.directory for result in found.values()}) == 3
    for name, names in (("without", {}), ("quiet", QUIET), ("both", QUIET | LOUD)):
        files = [part / "train.parquet" for part in part_directories(found[name].directory)]
        assert len(files) == 1 + mixture
        for row in (row for file in files for row in pq.read_table(file).to_pylist()):
            assert tokenizer.decode(row["prompt_ids"]) == rendered(tokenizer, row["prompt"], names, prompt=True)


def test_demonstrations_are_rendered_with_the_names(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    talks = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        for question, reply in (("What is 2 + 2?", "It is 4."), ("Hello", "Hi."))
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    config = WarmStartConfig(demonstrations=str(file), held_out_rows=0)
    plain, loud = (
        tokenize_demonstrations(config, folder, seed=1, root=tmp_path, chat_template_kwargs=names)
        for names in ({}, LOUD)
    )
    assert plain.directory != loud.directory
    for found, names in ((plain, {}), (loud, LOUD)):
        for row, talk in zip(read_demonstrations(found.directory / "train.parquet"), talks, strict=True):
            assert tokenizer.decode(list(row.token_ids)) == rendered(tokenizer, talk, names, prompt=False)
    with pytest.raises(DataError, match="does not read voise"):
        tokenize_demonstrations(config, folder, seed=1, root=tmp_path, chat_template_kwargs={"voise": "loud"})


def test_arguments_of_transformers_are_not_template_names() -> None:
    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
    assert arguments <= RENDERING_NAMES
