"""The tokenization filter: written columns, selected and continued rows, and refused ones."""

import json
import logging
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from data.filter import filter_dataset
from data.rows import Message, Row, TaskRows
from data.schema import provenance, write_splits
from data.tasks import build_dataset, dataset_directory
from data.tokenizer import PieceEncoder
from rlcore.batching.prompts import read_prompts
from rlcore.config import CountdownData, ParquetData
from rlcore.config.compose import load_config
from rlcore.errors import DataError, DiskSpaceError
from rlcore.models.tokenizer import end_of_text_ids, load_tokenizer
from rlcore.run.layout import RunInputs
from rlcore.run.supervised import Demonstrations
from rlcore.storage.publish import published_directory
from tests.data.conftest import saved, settings_in
from tests.helpers.file_shapes import write_rows
from tests.helpers.tokenizer_kinds import CHAT_TEMPLATE, KINDS
from tests.storage.small_disk import fill
from tests.storage.small_disk import small_disk as small_disk

CHAT = CountdownData(train_size=300, validation_size=30, template="chat")


def row(content, index=0, split="train", **more):
    return {
        "data_source": "mine", "prompt": [{"role": "user", "content": content}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)}, "extra_info": {"split": split, "index": index},
        **more,
    }  # fmt: skip


def rows(count, split="train"):
    return [row(f"{split} question {'very ' * (i % 7)}{i}", i, split) for i in range(count)]


def written(folder, train, validation=None, **changes):
    """Return settings that read these rows as they are."""
    for name, content in (("train", train), ("validation", validation or rows(5, "validation"))):
        changes[f"{name}_file"] = str(write_rows(folder / f"{name}.parquet", content))
    return ParquetData(**changes)


def filtered(settings, tokenizer, root, **changes):
    dataset = build_dataset(settings, seed=1, root=root)
    return filter_dataset(dataset.directory, tokenizer, settings_in(root, filter=changes))


def test_chat_prompts_equal_those_of_the_tokenizer(chat_tokenizer, artifacts_root):
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    made = filtered(CHAT, chat_tokenizer, artifacts_root)
    table = pq.read_table(made.directory / "train.parquet").to_pylist()
    assert len(table) == 300
    for found in table:
        options = {"add_generation_prompt": True, "return_dict": False}
        assert found["prompt_ids"] == tokenizer.apply_chat_template(found["prompt"], **options)
        for name in ("solution", "distractor"):
            text = found["extra_info"][name]
            expected = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] if text else []
            assert found[f"{name}_ids"] == expected
        assert json.loads(found["ground_truth_json"]) == found["reward_model"]["ground_truth"]


def test_overlong_prompts_are_dropped_cut_or_refused(chat_tokenizer, artifacts_root, tmp_path):
    settings = written(tmp_path, rows(70), rows(7, "validation"))
    full = filtered(settings, chat_tokenizer, artifacts_root)
    prompts = {p.prompt_id: p.token_ids for p in read_prompts(full.directory / "train.parquet")}
    limit = sorted(map(len, prompts.values()))[35]
    fitting = {index: ids for index, ids in prompts.items() if len(ids) <= limit}
    assert 0 < len(fitting) < 70
    message = rf"validation.parquet: row \d+: filter.max_prompt_tokens is {limit}, the prompt has \d+ tokens"
    with pytest.raises(DataError, match=message):
        filtered(settings, chat_tokenizer, artifacts_root, max_prompt_tokens=limit, overlong="error")
    cut = {index: ids[-limit:] for index, ids in prompts.items()}
    for overlong, reason, expected in (("drop", "overlong", fitting), ("truncate_left", "truncated", cut)):
        result = filtered(settings, chat_tokenizer, artifacts_root, max_prompt_tokens=limit, overlong=overlong)
        assert {p.prompt_id: p.token_ids for p in read_prompts(result.directory / "train.parquet")} == expected
        assert (result.counts["train"], result.counts[f"train/{reason}"]) == (len(expected), 70 - len(fitting))


def test_batch_size_does_not_change_the_rows(chat_tokenizer, artifacts_root, tmp_path, monkeypatch):
    settings = written(tmp_path, rows(70))
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    results = []
    for size in (8_192, 16, 1):
        monkeypatch.setattr("data.schema.ROWS_PER_GROUP", size)
        result = filter_dataset(dataset.directory, chat_tokenizer, settings_in(tmp_path / f"root{size}"))
        results.append((pq.read_table(result.directory / "train.parquet").to_pylist(), result.counts))
    assert results[0] == results[1] == results[2]


def test_duplicates_are_dropped_kept_or_refused(chat_tokenizer, artifacts_root, tmp_path):
    settings = written(tmp_path, [*rows(20), *rows(3)])
    with pytest.raises(DataError, match=r"train.parquet: row 20: the same prompt as row 0. Remove one of them"):
        filtered(settings, chat_tokenizer, artifacts_root, duplicates="error")
    for way, expected in (("drop", (20, 3)), ("keep", (23, 0))):
        counts = filtered(settings, chat_tokenizer, artifacts_root, duplicates=way).counts
        assert (counts["train"], counts.get("train/duplicate", 0)) == expected


def problem(text, numbers, goal="target"):
    return row(text, reward_model={"style": "rule", "ground_truth": {goal: 9, "numbers": numbers}})


@pytest.mark.parametrize(("train", "validation", "message"), [
    ([*rows(20), *rows(3, "validation")[2:]], rows(5, "validation"),
     r"train.parquet: row 20: has the same prompt as row 2 of the validation split"),
    ([problem("a", [1, 2]), problem("b", [5, 3, 4])], [problem("c", [3, 4, 5])],
     r"train.parquet: row 1: has the same multiset of numbers \[3, 4, 5\] as row 0 of the validation split"),
], ids=["prompt", "multiset"])  # fmt: skip
def test_held_out_rows_in_training_are_refused(chat_tokenizer, artifacts_root, tmp_path, train, validation, message):
    with pytest.raises(DataError, match=message):
        filtered(written(tmp_path, train, validation), chat_tokenizer, artifacts_root)
    assert list((artifacts_root / "filtered").iterdir()) == []
    other = written(tmp_path, [problem("b", [5, 3], goal="most")], [problem("c", [3, 5], goal="most")])
    assert filtered(other, chat_tokenizer, artifacts_root).counts["train"] == 1, "numbers of another task may repeat"


def test_rows_without_a_prompt_or_with_several_texts_are_refused(chat_tokenizer, artifacts_root, tmp_path):
    with published_directory(artifacts_root / "datasets/made", {"kind": "dataset", "fingerprint": "made"}) as folder:
        made = [Row((Message("user", "One"),), "1"), Row((), "1")]
        write_splits(folder, TaskRows("own", "math", "chat", {"train": made, "validation": made[:1]}), {})
    with pytest.raises(DataError, match=r"train.parquet: row 1: prompt must be a list of messages .* got \[\]"):
        filter_dataset(artifacts_root / "datasets/made", chat_tokenizer, settings_in(artifacts_root))
    settings = written(tmp_path, [*rows(3), talk(3, ("system", "Count."), ("user", "One"))], template="text")
    with pytest.raises(DataError, match=r"row 3: a prompt that is plain text must be one message, got 2"):
        filtered(settings, chat_tokenizer, artifacts_root)


def test_unknown_words_are_refused_in_solutions_and_reported(scratch_tokenizer, artifacts_root, tmp_path, caplog):
    numbers = {"min_numbers": 2, "max_numbers": 2, "number_low": 150, "number_high": 190}
    settings = CountdownData(train_size=20, validation_size=5, template="bare", **numbers)
    with pytest.raises(DataError, match="no token for a word of the solution"):
        filtered(settings, scratch_tokenizer, artifacts_root)
    train = [row(text, i) for i, text in enumerate(("0 + 1 =", "1 + 1 =", "two + 1 ="))]
    filtered(written(tmp_path, train, [row("7 + 2 =")]), scratch_tokenizer, artifacts_root)
    assert "does not know a word of 1 of 4 prompts, such as 'two + 1 ='" in caplog.text


@pytest.mark.parametrize(("changes", "problems"), [
    ({"prompt": "text"},
     [r"prompt: expected list of \{role: string, content: string\}, got string", "prompt", "prompt"]),
    ({"extra_info": {"solution": 3}}, ["extra_info.solution: expected string, got int64"]),
    ({"reward_model": {"style": "rule", "ground_truth": None}},
     ["reward_model.ground_truth: expected string, number, list or struct, got null"]),
    ({"data_source": None, "reward_model": None, "extra_info": None, "ability": 1},
     ["data_source: .* got nothing", "reward_model: .* got nothing", "ability: expected string, got int64"]),
])  # fmt: skip
def test_all_mistyped_columns_are_named(artifacts_root, tmp_path, changes, problems):
    changed = [{name: value for name, value in {**one, **changes}.items() if value is not None} for one in rows(3)]
    settings = written(tmp_path, changed)
    with pytest.raises(DataError, match=r"train.parquet: does not have the row schema:") as error:
        build_dataset(settings, seed=1, root=artifacts_root)
    lines = str(error.value).splitlines()[1:-1]
    assert len(lines) == len(problems)
    assert all(re.match(f"  column {problem}", line) for line, problem in zip(lines, problems, strict=True))


@pytest.mark.parametrize("cut", ["head", "middle", "tail"])
def test_damaged_files_are_refused(artifacts_root, tmp_path, cut):
    settings = written(tmp_path, rows(2_000))
    path = tmp_path / "train.parquet"
    content = bytearray(path.read_bytes())
    if cut == "middle":
        content[200:3_000] = b"\xff" * 2_800
    path.write_bytes(bytes({"head": content[:100], "middle": content, "tail": content[:-10]}[cut]))
    with pytest.raises(DataError, match=r"train.parquet: (cannot be read as parquet|damaged after row 0)"):
        build_dataset(settings, seed=1, root=artifacts_root)
    assert not list(artifacts_root.glob("datasets/*"))


@pytest.mark.parametrize("stage", ["dataset", "filter"])
def test_full_disk_leaves_nothing_behind(chat_tokenizer, small_disk, stage):
    """The real file system is full in the middle of a row group."""
    settings = CHAT.model_copy(update={"train_size": 3_000})
    if stage == "filter":
        build_dataset(settings, seed=1, root=small_disk)
    ballast = fill(small_disk, leave_bytes=50_000)
    with pytest.raises(DiskSpaceError, match=rf"{small_disk}/{stage}.*Nothing half-written was left"):
        filtered(settings, chat_tokenizer, small_disk)
    assert list((small_disk / ("datasets" if stage == "dataset" else "filtered")).iterdir()) == []
    ballast.unlink()
    assert filtered(settings, chat_tokenizer, small_disk).counts == {"train": 3_000, "validation": 30}


def test_filter_starts_again_where_the_fast_path_differs(chat_tokenizer, artifacts_root, monkeypatch, caplog):
    expected = filtered(CHAT, chat_tokenizer, artifacts_root)
    encode = PieceEncoder.encode
    monkeypatch.setattr(PieceEncoder, "encode", lambda self, texts: [ids + b"\0" * 4 for ids in encode(self, texts)])
    dataset = dataset_directory(CHAT, 1, artifacts_root)
    with caplog.at_level(logging.WARNING):
        again = filter_dataset(dataset, chat_tokenizer, settings_in(artifacts_root / "other"))
    assert "the fast path gives another text or other tokens; starting again without the fast path" in caplog.text
    for name in ("train.parquet", "validation.parquet"):
        assert (again.directory / name).read_bytes() == (expected.directory / name).read_bytes()


def test_foreign_arrow_types_are_accepted(chat_tokenizer, artifacts_root, tmp_path):
    """Large strings as other writers leave them; further columns are left out."""
    settings = written(tmp_path, rows(5))
    table = pq.read_table(tmp_path / "train.parquet")
    table = table.set_column(0, "data_source", table.column("data_source").cast(pa.large_string()))
    pq.write_table(table.append_column("extra", pa.array([1] * 5)), tmp_path / "train.parquet")
    file = filtered(settings, chat_tokenizer, artifacts_root).directory / "train.parquet"
    added = ["extra_info", "prompt_ids", "solution_ids", "distractor_ids", "ground_truth_json"]
    assert pq.read_table(file).schema.names[-5:] == added
    assert {prompt.data_source for prompt in read_prompts(file)} == {"mine"}


def test_progress_and_provenance_have_the_counts(chat_tokenizer, artifacts_root, tmp_path, monkeypatch):
    settings = written(tmp_path, rows(70), rows(7, "validation"))
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    monkeypatch.setattr("data.schema.ROWS_PER_GROUP", 32)
    calls, made = [], (dataset.directory, chat_tokenizer, settings_in(tmp_path))
    result = filter_dataset(*made, on_progress=lambda *call: calls.append(call))
    assert calls == [("validation", 7, 7), ("train", 32, 70), ("train", 64, 70), ("train", 70, 70)]
    document = provenance(result.directory / "train.parquet")
    assert (document["split"], document["counts"]) == ("train", {"train": 70})
    assert document["fingerprint"] == result.directory.name
    again = filter_dataset(*made)
    assert (result.cached, again.cached, again.counts) == (False, True, result.counts)


def test_empty_results_and_unfinished_datasets_are_refused(chat_tokenizer, artifacts_root, tmp_path):
    settings = written(tmp_path, rows(3), rows(2, "validation"))
    match = r"validation\.parquet: no row is left after the filter \(2 overlong\)\. Raise .* \(now 1\), or check"
    with pytest.raises(DataError, match=match):
        filtered(settings, chat_tokenizer, artifacts_root, max_prompt_tokens=1)
    assert list((artifacts_root / "filtered").iterdir()) == []
    match = rf"^{tmp_path}: is no finished dataset \(no manifest\.json\); make it with `mill"
    with pytest.raises(DataError, match=match):
        filter_dataset(tmp_path, chat_tokenizer, settings_in(artifacts_root))


def talk(index, *messages, truth="7", solution=""):
    prompt = [{"role": role, "content": content} for role, content in messages]
    more = {"index": index, "solution": solution}
    return row("", prompt=prompt, reward_model={"style": "rule", "ground_truth": truth}, extra_info=more)


def filtered_talks(folder, tokenizer, talks):
    return filtered(written(folder, talks, [talk(0, ("user", "Held out?"))]), tokenizer, folder)


@pytest.mark.parametrize("name", KINDS)
def test_words_are_continued_as_by_transformers(name, tmp_path):
    """One of the four prompts starts a turn. The solution follows the assistant's words."""
    folder = KINDS[name].saved(tmp_path / "tokenizer")
    solution = " 3 + 4 = 7, so 7"
    rows = [
        talk(0, ("user", "What is 3 + 4?"), ("assistant", "Let me see.\n<think>"), truth="x", solution=solution),
        talk(1, ("user", "What is 4 + 4?"), ("assistant", "So: "), truth="x", solution=solution),
        talk(2, ("user", "What is 5 + 4?"), truth="x"),
        talk(3, ("user", "What?"), ("assistant", "9"), ("user", "Sure?"), ("assistant", "No,"), truth="x"),
    ]
    made = filtered_talks(tmp_path, folder, rows)
    tokenizer, stops, num_solutions = load_tokenizer(folder), end_of_text_ids(folder), 0
    for found in pq.read_table(made.directory / "train.parquet").to_pylist():
        messages, is_continued = found["prompt"], found["prompt"][-1]["role"] == "assistant"
        end = {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}
        assert found["prompt_ids"] == tokenizer.apply_chat_template(messages, return_dict=False, **end)
        if found["solution_ids"]:
            num_solutions += 1
            messages[-1]["content"] += solution
            whole = tokenizer.apply_chat_template(messages, return_dict=False)
            joint = found["prompt_ids"] + found["solution_ids"]
            assert (whole[: len(joint)], joint[-1] in stops) == (joint, True)
    assert num_solutions > 0


@pytest.mark.parametrize(("messages", "problem"), [
    ([("user", "a"), ("assistant", r"So \boxed{7}.")], "must not end with the row's ground truth '7', got"),
    ([("user", "a"), ("assistant", "It is <b>seven</b>.")], "the row's solution '<b>seven</b>', got 'It is"),
    ([("user", "a"), ("assistant", "So<|im_end|>\n")], "and must not end with <|im_end|>, which ends a turn"),
    ([("system", "a")], "the prompt must have a message of the user, got the roles system. Add one, or remove"),
])  # fmt: skip
def test_prompts_with_the_answer_or_without_a_question_are_refused(chat_tokenizer, tmp_path, messages, problem):
    good = talk(0, ("user", "x"), ("assistant", "17 or x7 or 77"), solution="<b>seven</b>")
    with pytest.raises(DataError, match=rf"train\.parquet: row 1: .*{re.escape(problem)}"):
        filtered_talks(tmp_path, chat_tokenizer, [good, talk(1, *messages, solution="<b>seven</b>")])


def test_templates_that_drop_the_words_are_refused(trained_bpe, tmp_path):
    template = CHAT_TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else '')")
    folder = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    rows = [talk(0, ("user", "x")), talk(1, ("user", "y"), ("assistant", "So"))]
    with pytest.raises(DataError, match=r"train\.parquet: row 1: .* does not write the assistant's words .*: 'So'"):
        filtered_talks(tmp_path, folder, rows)


def test_solutions_that_the_template_drops_are_left_out(tmp_path, caplog):
    folder = KINDS["r1"].saved(tmp_path / "tokenizer")
    rows = [talk(n, ("user", f"What is {n} + 7?"), solution=f"<think> {n} </think> 9") for n in range(3)]
    made = filtered_talks(tmp_path, folder, rows)
    assert pq.read_table(made.directory / "train.parquet")["solution_ids"].to_pylist() == [[], [], []]
    assert "a warm start cannot show 3 solutions, such as '<think> 0 </think> 9'" in caplog.text
    assert "does not write it behind '" in caplog.text
    config = load_config(["experiment=debug", "warm_start.enabled=true"])
    match = r"there is none\. Of 3 solutions the chat template does not write it behind '.*\. Set warm_start\.enabled"
    with pytest.raises(DataError, match=match):
        Demonstrations.read(config, RunInputs(made.directory, folder))
