"""Origin of a run: stages from manifests, and run.json."""

import getpass
import json
import os
import subprocess
from pathlib import Path

import pytest

from rlcore.config import RunConfig
from rlcore.errors import DataError
from rlcore.storage.publish import published_directory
from rlcore.tracking import lineage
from rlcore.tracking.lineage import Origin, Stage, code_diff, code_revision, lineage_tags, read_origin, stage_of


def published(folder: Path, **values: object) -> Path:
    with published_directory(folder, values) as made:
        (made / "rows.bin").write_bytes(b"12345")
    return folder


def test_stage_facts_come_from_manifest(tmp_path: Path) -> None:
    folder = published(tmp_path / "0a1b", kind="dataset", seed=3, share=0.5, ok=True, none=None, names=["a"],
                       counts={"train": 9, "validation": 2})  # fmt: skip
    facts = {"kind": "dataset", "seed": 3, "share": 0.5, "ok": True}
    counts = {"train rows": 9, "validation rows": 2}
    stage = stage_of("dataset", folder)
    assert (stage.name, stage.fingerprint, stage.path) == ("dataset", "0a1b", str(folder))
    assert {name: value for name, value in stage.facts.items() if name in facts | counts} == facts | counts
    assert stage.facts["size_bytes"] == 5
    assert not {"none", "names", "counts"} & stage.facts.keys()
    assert "train rows" not in stage_of("model", published(tmp_path / "2c", counts=5)).facts


@pytest.mark.parametrize("manifest", [None, "{"])
def test_stage_without_manifest_has_no_facts(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    assert stage_of("start_model", folder) == Stage("start_model", "model", str(folder), {})


def test_origin_round_trip_masks_command(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    whole = Origin(
        RunConfig(seed=3), {"model.path": {"a": "0"}}, (Stage("code", "c0", "/c", {"rows": 3}),), ("millrace", "run"),
        "c0ffee", True, {"torch": "2"},
    )  # fmt: skip
    whole.write(tmp_path)
    assert read_origin(tmp_path) == whole
    Origin(RunConfig(), command=("run", "tracking.uri=http://me:SECRET@host")).write(tmp_path)
    found = read_origin(tmp_path)
    assert (found.command, found.git_dirty) == (("run", "tracking.uri=http://me:***@host"), False)


@pytest.mark.parametrize("change", [{"version": 2}, {"settings": {"from_tomorrow": 1}}, {"stages": 3}])
def test_other_versions_are_rejected(tmp_path: Path, change: dict[str, object]) -> None:
    Origin(RunConfig()).write(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=r"run\.json: cannot be read \(.*\); use the version of Millrace that wrote it"):
        read_origin(tmp_path)


def test_slow_repository_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, timeout: float, **__: object) -> None:
        assert timeout == 10.0
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert (code_revision(tmp_path), code_diff(tmp_path)) == (("", False), "")


def test_git_index_is_never_locked(tmp_path: Path) -> None:
    """A git that is killed while it rewrites the index would leave `index.lock`."""
    (tmp_path / "rlcore").mkdir()
    file = tmp_path / "rlcore" / "a.py"
    file.write_text("a = 1\n")
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    os.utime(file, (1, 1))  # git compares the file, and would record its new time
    commit, is_dirty = code_revision(tmp_path)
    assert (len(commit), is_dirty) == (40, False)
    assert "\n@@" not in code_diff(tmp_path)
    assert index.read_bytes() == before


def test_user_without_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 77")

    monkeypatch.setattr(lineage, "code_revision", lambda: ("", False))
    config = lineage.RunConfig()
    assert lineage_tags(config, stage="train", run_id="r")["mlflow.user"] == getpass.getuser()
    monkeypatch.setattr(getpass, "getuser", nameless)
    tags = lineage_tags(config, stage="train", run_id="r")
    assert tags["mlflow.user"] == "unknown"
    assert not [name for name in tags if "git" in name]
