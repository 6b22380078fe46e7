"""Digests of model files: which files count, and when one is read again."""

import os
from hashlib import sha256
from pathlib import Path

from rlcore.config import ModelConfig, RunConfig
from rlcore.run.model_digests import content_digest, digests_in, model_digests


def test_weights_settings_and_tokenizer_count_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("config.json", "model.safetensors", "merges.txt", "README.md", "manifest.json"):
        (tmp_path / name).write_text(name)
    counted = ("config.json", "merges.txt", "model.safetensors")
    assert digests_in(tmp_path) == {name: sha256(name.encode()).hexdigest() for name in counted}
    assert digests_in(tmp_path / "absent") == {}


def test_models_that_are_not_on_this_machine_have_no_digests(tmp_path: Path) -> None:
    assert model_digests(RunConfig(model=ModelConfig(path="owner/name"))) == {}
    assert model_digests(RunConfig(model=ModelConfig(path=str(tmp_path)))) == {"model.path": {}}


def test_another_content_of_equal_size_and_time_has_another_digest(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    os.utime(file, (0, 0))
    before, seen = content_digest(file), file.stat()
    while file.stat().st_ctime_ns == seen.st_ctime_ns:  # until the file system's clock ticks
        file.write_bytes(b"two")
        os.utime(file, (0, 0))
    assert content_digest(file) == sha256(b"two").hexdigest() != before
