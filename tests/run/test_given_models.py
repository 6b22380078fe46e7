"""The files of the models that a run was given, as its record has them."""

from pathlib import Path

import pytest

from rlcore.config import ModelConfig, RunConfig
from rlcore.errors import DataError, ModelError
from rlcore.run import given_models
from rlcore.run.given_models import changed_models, keep_models, keep_start, model_paths, require_same_start


def rewrite(file: Path, content: str) -> None:
    """Until the file system's clock ticks."""
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:
        file.write_text(content)


def digest(file: Path) -> str:
    return given_models.content_digest(file)[:16]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "folder.json").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "merges.txt", "README.md", "manifest.json"):
        (folder / name).write_text(name)
    return folder


def test_each_changed_file_counts_and_the_first_is_shown(tmp_path: Path, model: Path) -> None:
    record, paths = tmp_path / "models.json", {"model.path": str(model), "critic.path": None}
    assert changed_models(record, paths) == [], "nothing was recorded"
    keep_models(record, paths)
    assert changed_models(record, paths) == []
    for name in ("README.md", "manifest.json"):
        rewrite(model / name, "another")
    assert changed_models(record, paths) == [], "neither is read"
    before = digest(model / "merges.txt")
    rewrite(model / "merges.txt", "another")
    line = f"  model.path, {model}: merges.txt was {before}, is {digest(model / 'merges.txt')} now"
    assert changed_models(record, paths) == [line]
    gone = digest(model / "config.json")
    (model / "config.json").unlink()
    line = f"  model.path, {model}: config.json was {gone}, is absent now (and 1 more files)"
    assert changed_models(record, paths) == [line]
    (model / "added.json").write_text("{}")
    line = f"  model.path, {model}: added.json was absent, is {digest(model / 'added.json')} now (and 2 more files)"
    assert changed_models(record, paths) == [line]


def test_a_file_is_read_again_only_where_its_size_or_its_time_differs(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, paths = tmp_path / "models.json", {"model.path": str(model)}
    keep_models(record, paths)
    written = record.stat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr(given_models, "content_digest", lambda file: pytest.fail(f"{file} is read again"))
        assert changed_models(record, paths) == []
        keep_models(record, paths)
    assert record.stat().st_ino == written, "what says the same is not written again"
    rewrite(model / "config.json", "config.json")
    assert changed_models(record, paths) == [], "the same content at another time"


def test_the_record_of_a_model_that_is_not_here_stays(tmp_path: Path, model: Path) -> None:
    record = tmp_path / "models.json"
    keep_models(record, {"model.path": str(model)})
    before = record.read_text()
    model.rename(tmp_path / "moved")
    keep_models(record, {"model.path": str(model), "critic.path": "owner/name"})
    assert record.read_text() == before
    assert changed_models(record, {"model.path": str(model)}) == []


def test_a_model_that_has_changed_since_a_shared_result_was_begun_is_refused(tmp_path: Path, model: Path) -> None:
    config = RunConfig(model=ModelConfig(path=str(model)))
    assert model_paths(config) == {"model.path": str(model), "critic.path": None}
    record = tmp_path / "models.json"
    keep_start(record, config)
    require_same_start(record, config, "table: the pass rates were")
    rewrite(model / "config.json", "another")
    with pytest.raises(ModelError) as told:
        require_same_start(record, config, "table: the pass rates were")
    assert str(told.value).startswith(
        "table: the pass rates were begun with another model than lies at model.path now:\n  model.path, "
    )
    assert str(told.value).endswith(
        "now\nPut it back, or give the other model a folder of another name and set model.path to that."
    )
    record.write_text("[]")
    with pytest.raises(DataError, match=r"If they are still the same, delete it; else start another run$"):
        require_same_start(record, config, "table: the pass rates were")
