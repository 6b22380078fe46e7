"""Hub datasets, by the hub's protocol from a local server, and from the cache without the server."""

import io
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.records import commit_of, snapshot
from data.schema import provenance
from data.tasks import build_dataset
from rlcore.config import Gsm8kData, MappedData
from rlcore.errors import DataError
from tests.helpers.hub_server import Repository, serving, use_hub

OLD, NEW = "a" * 40, "b" * 40
# The published dataset has two subsets and no default.
CARD = "---\nconfigs:" + "".join(
    f"""
- config_name: {subset}
  data_files:
  - split: train
    path: {subset}/train-*
  - split: test
    path: {subset}/test-*"""
    for subset in ("main", "socratic")
)


def gsm8k(commit):
    files = {"README.md": f"{CARD}\n---\nof {commit}".encode()}
    for subset in ("main", "socratic"):
        for split, rows in (("train", 4), ("test", 2)):
            questions = [f"{subset} {commit[0]} {split} {row}: what?" for row in range(rows)]
            answers = [f"It is\n#### {row}" for row in range(rows)]
            pq.write_table(pa.table({"question": questions, "answer": answers}), file := io.BytesIO())
            files[f"{subset}/{split}-00000-of-00001.parquet"] = file.getvalue()
    return files


def puzzles(commit):
    lines = [json.dumps({"q": f"{commit[0]} {row}: what?", "a": row}) for row in range(4)]
    return {"train.jsonl": "\n".join(lines).encode(), "test.jsonl": "\n".join(lines[::2]).encode()}


@pytest.fixture
def reach(monkeypatch, tmp_path):
    """Reset the caches of the process, and use a hub at this port."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")

    def begin(port=None):
        commit_of.cache_clear()
        snapshot.cache_clear()
        if port:
            use_hub(monkeypatch, tmp_path, port)

    yield begin
    begin()


def questions(result):
    rows = pq.read_table(Path(result.directory) / "train.parquet").to_pylist()
    return [row["prompt"][0]["content"].partition(":")[0] for row in rows]


def test_second_start_needs_no_network(reach, artifacts_root, tmp_path):
    published = Repository({OLD: gsm8k(OLD), NEW: gsm8k(NEW)}, {"main": OLD, "v1": OLD})
    with serving({"datasets/openai/gsm8k": published}) as hub:
        reach(hub.port)
        first = build_dataset(Gsm8kData(), seed=1, root=artifacts_root)
        assert questions(first) == [f"main a train {row}" for row in range(4)]
        assert provenance(first.directory / "train.parquet")["inputs"] == {"hub": "openai/gsm8k/main", "commit": OLD}

        num_asked = len(hub.asked)
        assert build_dataset(Gsm8kData(revision=OLD), seed=1, root=artifacts_root).cached
        assert build_dataset(Gsm8kData(revision="v1"), seed=1, root=artifacts_root).cached
        assert hub.asked[num_asked:] == ["GET /api/datasets/openai/gsm8k/revision/v1"]
    reach(hub.port)  # the server is gone
    again = build_dataset(Gsm8kData(), seed=1, root=artifacts_root)
    assert (again.fingerprint, again.cached) == (first.fingerprint, True)
    elsewhere = build_dataset(Gsm8kData(), seed=1, root=tmp_path / "elsewhere")
    assert (elsewhere.fingerprint, elsewhere.cached) == (first.fingerprint, False)
    assert questions(elsewhere) == questions(first)


def test_moved_branches_make_new_datasets_and_commits_do_not(reach, artifacts_root):
    repository = Repository({OLD: puzzles(OLD), NEW: puzzles(NEW)}, {"main": OLD})
    settings = MappedData(source="somebody/puzzles", question="q", answer="a")
    with serving({"datasets/somebody/puzzles": repository}) as hub:
        reach(hub.port)
        before = build_dataset(settings, seed=1, root=artifacts_root)
        assert questions(before) == [f"a {row}" for row in range(4)]
        repository.refs["main"] = NEW
        assert build_dataset(settings, seed=1, root=artifacts_root).cached, "one process, one commit"
        reach(hub.port)
        after = build_dataset(settings, seed=1, root=artifacts_root)
        assert questions(after) == [f"b {row}" for row in range(4)]
        pinned = settings.model_copy(update={"revision": OLD})
        assert build_dataset(pinned, seed=1, root=artifacts_root).fingerprint == before.fingerprint
    reach(hub.port)
    assert build_dataset(settings, seed=1, root=artifacts_root).fingerprint == after.fingerprint


def test_moved_branch_keeps_the_resolved_commit(reach):
    repository = Repository({OLD: puzzles(OLD), NEW: puzzles(NEW)}, {"main": OLD})
    with serving({"datasets/somebody/puzzles": repository}) as hub:
        reach(hub.port)
        assert commit_of("somebody/puzzles", "") == OLD
        repository.refs["main"] = NEW
        assert (snapshot("somebody/puzzles", "") / "train.jsonl").read_bytes() == puzzles(OLD)["train.jsonl"]


def test_unavailable_datasets_are_refused_with_a_remedy(reach, artifacts_root):
    repository = Repository({OLD: puzzles(OLD)}, {"main": OLD})

    def refused(**settings):
        with pytest.raises(DataError) as caught:
            build_dataset(Gsm8kData(**settings), seed=1, root=artifacts_root)
        return str(caught.value)

    with serving({"datasets/somebody/puzzles": repository}) as hub:
        reach(hub.port)
        assert "no folder openai/gsm8k here, and the hub dataset of that name cannot be had (Repos" in refused()
        assert "of that name at v2 cannot be had (RevisionNotFound" in refused(source="somebody/puzzles", revision="v2")
        assert "somebody/puzzles/main, split train, cannot be read" in refused(source="somebody/puzzles")
    reach(hub.port)
    for settings, words in (
        ({}, "(hf download openai/gsm8k --repo-type dataset), or give data.source a folder"),
        ({"revision": NEW}, f"(hf download openai/gsm8k --repo-type dataset --revision {NEW}), or give"),
    ):
        message = refused(**settings)
        assert words in message
        assert len(message) < 700
