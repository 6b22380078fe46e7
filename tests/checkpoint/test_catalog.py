"""Listing and finding of checkpoints."""

import pytest

from rlcore.checkpoint.catalog import find_checkpoint, list_checkpoints
from rlcore.errors import CheckpointError
from tests.helpers.checkpoints import save, store_at
from tests.helpers.published import edit_manifest, flip


def test_list_includes_broken_checkpoints(tmp_path):
    store = store_at(tmp_path)
    for step, score in ((1, 0.5), (2, None), (3, 0.25), (4, 0.0)):
        save(store, step, score)
    flip(store.path_of(2) / "policy" / "rank.safetensors", 0)
    (store.path_of(3) / "manifest.json").unlink()
    (store.path_of(4) / "state.json").unlink()
    folder = tmp_path / "checkpoints"
    quick = list_checkpoints(folder)
    assert [(row.step, row.verdict) for row in quick] == [
        (1, "not verified"), (2, "not verified"), (3, "broken"), (4, "broken"),
    ]  # fmt: skip
    full = list_checkpoints(folder, verify_hashes=True)
    assert [row.verdict for row in full] == ["verified", "broken", "broken", "broken"]
    assert (full[0].score, full[0].size_bytes > 1000, full[0].reason) == (0.5, True, "")
    assert "rank.safetensors: hash" in full[1].reason
    assert "never finished" in full[2].reason
    assert (full[2].size_bytes, dict(full[2].metrics), full[2].created, full[2].score) == (0, {}, "", None)
    assert [row.size_bytes for row in full[:2]] == [info.size_bytes for info in store.list()[:2]]
    known = store.list()[0].settings_fingerprint
    assert [row.settings_fingerprint for row in full] == [known, known, "", known]
    assert list_checkpoints(tmp_path / "absent") == ()


def test_find_checkpoint_by_name(tmp_path):
    store, folder = store_at(tmp_path), tmp_path / "checkpoints"
    for number, score in ((1, 0.5), (2, 0.25), (3, None)):
        save(store, number, score)
    names = {"2": 2, "step-000003": 3, "last": 3, "best": 1, "000002": 2}
    assert {name: find_checkpoint(folder, name).step for name in names} == names
    for name in ("7", "first"):
        with pytest.raises(CheckpointError, match=f"no checkpoint '{name}'; there are: step-000001, step-000002"):
            find_checkpoint(folder, name)
    save(store_at(tmp_path / "other"), 1)
    with pytest.raises(CheckpointError, match="no checkpoint 'best'; there are: step-000001"):
        find_checkpoint(tmp_path / "other" / "checkpoints", "best")
    with pytest.raises(CheckpointError, match="there are: none"):
        find_checkpoint(tmp_path / "absent", "last")


def test_unreadable_checkpoint_error_has_the_reason(tmp_path):
    edit_manifest(save(store_at(tmp_path), 1), format_version=99)
    for name in ("1", "step-000001"):
        with pytest.raises(CheckpointError, match="format_version must be 1, got 99"):
            find_checkpoint(tmp_path / "checkpoints", name)
