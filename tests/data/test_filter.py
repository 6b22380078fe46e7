"""The tokenization filter: what it writes, keeps, drops and refuses."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from data import filter as filter_module
from data.filter import SuiteOverlap, filter_dataset
from data.schema import provenance, read_batches
from data.tasks import build_dataset, dataset_fingerprint
from data.tokenizer import PieceEncoder, PromptTokenizer, tokenizer_fingerprint
from rlcore.batching.prompts import read_prompts, read_solutions
from rlcore.config import CountdownData, FilterConfig, ParquetData
from rlcore.errors import DataError, DiskSpaceError
from rlcore.storage.publish import published_directory
from tests.data.conftest import CHAT_TEMPLATE, asked, saved
from tests.storage.small_disk import fill
from tests.storage.small_disk import small_disk as small_disk

CHAT = CountdownData(train_size=300, validation_size=30, template="chat")


def rows(count, *, split="train", form="plain"):
    return [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": f"{split} question {'very ' * (i % 7)}{i}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": split, "index": i},
        }
        for i in range(count)
    ]


def written(folder, train, validation, **changes):
    """Settings that take these rows as they are."""
    for name, content in (("train", train), ("validation", validation)):
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet")
    return ParquetData(
        train_file=str(folder / "train.parquet"), validation_file=str(folder / "validation.parquet"), **changes
    )


def filtered(settings, tokenizer, root, **changes):
    dataset = build_dataset(settings, seed=1, root=root)
    return filter_dataset(dataset.directory, tokenizer, FilterConfig(**changes), root=root)


def test_chat_prompts_equal_those_of_the_tokenizer(chat_tokenizer, artifacts_root):
    found = filtered(CHAT, chat_tokenizer, artifacts_root)
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    table = pq.read_table(found.directory / "train.parquet").to_pylist()
    assert len(table) == 300
    for row in table:
        alone = tokenizer.apply_chat_template(
            row["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert row["prompt_ids"] == alone
        for name in ("solution", "distractor"):
            text = row["extra_info"][name]
            expected = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] if text else []
            assert row[f"{name}_ids"] == expected
        assert json.loads(row["ground_truth_json"]) == row["reward_model"]["ground_truth"]


def test_plain_prompts_get_the_tokenizers_own_special_tokens(base_tokenizer, artifacts_root):
    found = filtered(CHAT.model_copy(update={"template": "base"}), base_tokenizer, artifacts_root)
    tokenizer = AutoTokenizer.from_pretrained(base_tokenizer)
    for row in pq.read_table(found.directory / "train.parquet").to_pylist():
        assert row["prompt_ids"] == tokenizer(row["prompt"][0]["content"])["input_ids"]
        assert row["prompt_ids"][0] == tokenizer.convert_tokens_to_ids("<|endoftext|>")


@pytest.mark.parametrize("overlong", ["drop", "truncate_left", "error"])
def test_overlong_prompts(chat_tokenizer, artifacts_root, tmp_path, overlong):
    settings = written(tmp_path, rows(70), rows(7, split="validation"))
    full = filtered(settings, chat_tokenizer, artifacts_root)
    lengths = {p.prompt_id: p.token_ids for p in read_prompts(full.directory / "train.parquet")}
    limit = int(np.median([len(ids) for ids in lengths.values()]))
    long = {index for index, ids in lengths.items() if len(ids) > limit}
    assert 0 < len(long) < 70
    if overlong == "error":
        told = rf"validation.parquet: row \d+: filter.max_prompt_tokens is {limit}, the prompt has \d+ tokens"
        with pytest.raises(DataError, match=told):
            filtered(settings, chat_tokenizer, artifacts_root, max_prompt_tokens=limit, overlong="error")
        return
    found = filtered(settings, chat_tokenizer, artifacts_root, max_prompt_tokens=limit, overlong=overlong)
    kept = {p.prompt_id: p.token_ids for p in read_prompts(found.directory / "train.parquet")}
    if overlong == "drop":
        assert kept == {index: ids for index, ids in lengths.items() if index not in long}
        assert found.counts["train/overlong"] == len(long)
    else:
        assert kept == {index: ids[-limit:] for index, ids in lengths.items()}
        assert found.counts["train/truncated"] == len(long)
    assert found.counts["train"] == len(kept)


def test_batches_do_not_change_the_rows(chat_tokenizer, artifacts_root, tmp_path, monkeypatch):
    settings = written(tmp_path, rows(70), rows(7, split="validation"))
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    results = []
    for size in (8_192, 16, 1):
        monkeypatch.setattr(filter_module, "ROWS_PER_GROUP", size)
        found = filter_dataset(dataset.directory, chat_tokenizer, FilterConfig(), root=tmp_path / f"root{size}")
        results.append((pq.read_table(found.directory / "train.parquet").to_pylist(), found.counts))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("way", ["drop", "keep", "error"])
def test_duplicates(chat_tokenizer, artifacts_root, tmp_path, way):
    settings = written(tmp_path, [*rows(20), *rows(3)], rows(5, split="validation"))
    if way == "error":
        with pytest.raises(DataError, match=r"train.parquet: row 20: the same prompt as row 0. Remove one of them"):
            filtered(settings, chat_tokenizer, artifacts_root, duplicates="error")
        return
    found = filtered(settings, chat_tokenizer, artifacts_root, duplicates=way)
    assert found.counts["train"] == (20 if way == "drop" else 23)
    assert found.counts.get("train/duplicate", 0) == (3 if way == "drop" else 0)


def test_a_held_out_prompt_among_training_rows_is_refused(chat_tokenizer, artifacts_root, tmp_path):
    settings = written(tmp_path, [*rows(20), *rows(3, split="validation")[2:]], rows(5, split="validation"))
    told = r"train.parquet: row 20: has the same prompt as row 2 of the validation split"
    with pytest.raises(DataError, match=told):
        filtered(settings, chat_tokenizer, artifacts_root)
    assert list((artifacts_root / "filtered").iterdir()) == []


def test_a_multiset_of_numbers_in_both_splits_is_refused(chat_tokenizer, artifacts_root, tmp_path):
    def problem(text, numbers, goal="target"):
        [row] = rows(1)
        truth = {goal: 9, "numbers": numbers}
        return {
            **row,
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }

    settings = written(tmp_path, [problem("a", [1, 2]), problem("b", [5, 3, 4])], [problem("c", [3, 4, 5])])
    told = r"train.parquet: row 1: has the same multiset of numbers \[3, 4, 5\] as row 0 of the validation split"
    with pytest.raises(DataError, match=told):
        filtered(settings, chat_tokenizer, artifacts_root)
    of_another_task = written(tmp_path, [problem("b", [5, 3], goal="most")], [problem("c", [3, 5], goal="most")])
    assert filtered(of_another_task, chat_tokenizer, artifacts_root).counts["train"] == 1


def test_a_row_without_a_prompt_is_refused(chat_tokenizer, artifacts_root):
    with published_directory(artifacts_root / "datasets/made", {"kind": "dataset", "fingerprint": "made"}) as folder:
        written(folder, [*rows(2), {**rows(1)[0], "prompt": None}], rows(2, split="validation"))
    with pytest.raises(DataError, match=r"train.parquet: row 2: prompt must be a list of messages .* got None"):
        filter_dataset(artifacts_root / "datasets/made", chat_tokenizer, FilterConfig(), root=artifacts_root)


def test_words_without_a_token_in_an_answer_are_refused(scratch_tokenizer, artifacts_root):
    settings = CountdownData(
        train_size=20, validation_size=5, template="bare", min_numbers=2, max_numbers=2, number_low=150, number_high=190
    )
    with pytest.raises(DataError, match="no token for a word of the solution"):
        filtered(settings, scratch_tokenizer, artifacts_root)


def test_words_without_a_token_in_a_prompt_are_told(scratch_tokenizer, artifacts_root, tmp_path, caplog):
    def asked(question, row):
        extra = {**row["extra_info"], "solution": "", "distractor": ""}
        return {**row, "prompt": [{"role": "user", "content": question}], "extra_info": extra}

    train = [asked(f"{i} + 1 =", row) for i, row in enumerate(rows(3))]
    settings = written(tmp_path, [*train[:2], asked("two + 1 =", rows(3)[2])], [asked("7 + 2 =", rows(1)[0])])
    filtered(settings, scratch_tokenizer, artifacts_root)
    assert "does not know a word of 1 of 4 prompts, such as 'two + 1 ='" in caplog.text


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("prompt", "text", r"column prompt: expected list of \{role: string, content: string\}, got string"),
        ("data_source", 3, r"column data_source: expected string, got int64"),
        ("extra_info", "train", r"column extra_info: expected struct, got string"),
        ("extra_info", {"solution": 3}, r"column extra_info.solution: expected string, got int64"),
        (
            "reward_model",
            {"style": "rule", "ground_truth": None},
            r"column reward_model.ground_truth: expected string, number, list or struct, got null",
        ),
        ("reward_model", None, r"column reward_model: expected struct \{ground_truth\}, got null"),
    ],
)
def test_a_missing_or_mistyped_column_is_named(artifacts_root, tmp_path, column, value, told):
    broken = [{**row, column: value} for row in rows(3)]
    settings = written(tmp_path, broken, rows(2, split="validation"))
    with pytest.raises(DataError, match=rf"train.parquet: does not have the row schema:(?s:.*){told}"):
        build_dataset(settings, seed=1, root=artifacts_root)


def test_every_broken_column_is_told_at_once(artifacts_root, tmp_path):
    broken = [{"prompt": row["prompt"], "ability": 1} for row in rows(3)]
    with pytest.raises(DataError) as caught:
        build_dataset(written(tmp_path, broken, rows(2)), seed=1, root=artifacts_root)
    lines = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]
    assert lines == [f"column {name}" for name in ("data_source", "reward_model", "ability")]


@pytest.mark.parametrize("cut", ["head", "middle", "tail"])
def test_a_damaged_parquet_is_refused(chat_tokenizer, artifacts_root, tmp_path, cut):
    settings = written(tmp_path, rows(2_000), rows(2, split="validation"))
    path = tmp_path / "train.parquet"
    content = bytearray(path.read_bytes())
    if cut == "head":
        content = content[:100]
    elif cut == "middle":
        content[200:3_000] = b"\xff" * 2_800
    else:
        content = content[:-10]
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"train.parquet: (cannot be read as parquet|damaged after row 0)"):
        build_dataset(settings, seed=1, root=artifacts_root)
    assert not list(artifacts_root.glob("datasets/*"))


def test_a_damaged_page_is_named_by_the_rows_before_it(tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"number": range(30)}), path, row_group_size=10, compression="none")
    place = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 20] = b"\xff" * 20
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"train.parquet: damaged after row 20 "):
        list(read_batches(pq.ParquetFile(path), path, 10))


@pytest.mark.parametrize("stage", ["dataset", "filter"])
def test_a_full_disk_leaves_nothing_behind(chat_tokenizer, small_disk, stage):
    """On a real file system that is full in the middle of a row group."""
    settings = CHAT.model_copy(update={"train_size": 3_000})
    if stage == "filter":
        build_dataset(settings, seed=1, root=small_disk)
    ballast = fill(small_disk, leave_bytes=50_000)
    with pytest.raises(DiskSpaceError, match=rf"{small_disk}/{stage}.*Nothing half-written was left"):
        filtered(settings, chat_tokenizer, small_disk)
    assert list((small_disk / ("datasets" if stage == "dataset" else "filtered")).iterdir()) == []
    ballast.unlink()
    found = filtered(settings, chat_tokenizer, small_disk)
    assert found.counts == {"train": 3_000, "validation": 30}


def test_where_the_short_way_fails_the_long_way_is_taken(chat_tokenizer, artifacts_root, monkeypatch, caplog):
    expected = filtered(CHAT, chat_tokenizer, artifacts_root)
    real = PieceEncoder.encode

    def wrong(self, texts):
        return [ids + b"\0\0\0\0" for ids in real(self, texts)]

    monkeypatch.setattr(PieceEncoder, "encode", wrong)
    with caplog.at_level(logging.WARNING):
        again = filter_dataset(
            artifacts_root / "datasets" / dataset_fingerprint(CHAT, 1),
            chat_tokenizer,
            FilterConfig(),
            root=artifacts_root / "other",
        )
    assert "comes out differently" in caplog.text
    for name in ("train.parquet", "validation.parquet"):
        assert (again.directory / name).read_bytes() == (expected.directory / name).read_bytes()


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE.replace("m.content", "m.content | trim"),
        CHAT_TEMPLATE.replace("m.content", "m.content | upper"),
        CHAT_TEMPLATE.replace("m.content", "(m.content if 'rare' not in m.content else 'other')"),
        CHAT_TEMPLATE.replace("m.content", "m.content.split('rare')[-1]"),
        CHAT_TEMPLATE.replace("m.content", "m.content | replace('rare', 'well done')"),
        CHAT_TEMPLATE + "{% macro x() %}{% endmacro %}",
    ],
    ids=["strips", "changes every text", "looks for a word", "cuts at a word", "replaces a word", "has a macro"],
)
def test_templates_that_touch_the_message_are_rendered_as_they_are(trained_bpe, tmp_path, template, artifacts_root):
    folder = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    content = rows(40)
    content[3]["prompt"][0]["content"] = "  rare  words\n"  # not one of those that are checked anyway
    settings = written(tmp_path, content, rows(4, split="validation"))
    found = filtered(settings, folder, artifacts_root)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in pq.read_table(found.directory / "train.parquet").to_pylist():
        alone = tokenizer.apply_chat_template(
            row["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert row["prompt_ids"] == alone


def test_conversations_of_several_messages(chat_tokenizer, artifacts_root, tmp_path):
    content = rows(6)
    content[3]["prompt"] = [{"role": "system", "content": "Count."}, *content[3]["prompt"]]
    settings = written(tmp_path, content, rows(2, split="validation"))
    found = filtered(settings, chat_tokenizer, artifacts_root)
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    for row in pq.read_table(found.directory / "train.parquet").to_pylist():
        alone = tokenizer.apply_chat_template(
            row["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert row["prompt_ids"] == alone
    with pytest.raises(DataError, match=r"row 3: a prompt that is plain text must be one message, got 2"):
        filtered(settings.model_copy(update={"template": "text"}), chat_tokenizer, artifacts_root)


def test_a_tokenizers_fingerprint_follows_its_files(chat_tokenizer, tmp_path):
    for path in chat_tokenizer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"weights do not count")
    same = tokenizer_fingerprint(tmp_path)
    assert same == tokenizer_fingerprint(chat_tokenizer)
    (tmp_path / "chat_template.jinja").write_text("other")
    assert tokenizer_fingerprint(tmp_path) != same
    with pytest.raises(DataError, match="holds no tokenizer"):
        tokenizer_fingerprint(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_refused(chat_tokenizer, tmp_path):
    for path in chat_tokenizer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        PromptTokenizer(tmp_path, chat=False)


def test_foreign_arrow_types_are_taken(chat_tokenizer, artifacts_root, tmp_path):
    """Large strings and short integers, as other writers leave them; further fields are left out."""
    settings = written(tmp_path, rows(5), rows(2, split="validation"))
    path = tmp_path / "train.parquet"
    table = pq.read_table(path)
    table = table.set_column(0, "data_source", table.column("data_source").cast(pa.large_string()))
    pq.write_table(table.append_column("extra", pa.array([1] * 5)), path)
    found = filtered(settings, chat_tokenizer, artifacts_root)
    assert pq.read_table(found.directory / "train.parquet").schema.names[-4:] == [
        "prompt_ids", "solution_ids", "distractor_ids", "ground_truth_json"
    ]  # fmt: skip
    assert {prompt.data_source for prompt in read_prompts(found.directory / "train.parquet")} == {"mine"}
    assert read_solutions(found.directory / "train.parquet") == []


def test_a_template_with_the_date_gives_the_same_prompt(trained_bpe, tmp_path):
    dated = saved(trained_bpe, tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    for short_way in (True, False):
        tokenizer = PromptTokenizer(dated, chat=True, short_way=short_way)
        assert tokenizer.texts(asked("how many?")) == ["26 Jul 2024: how many?"]


@pytest.mark.parametrize("short_way", [True, False])
def test_a_first_token_is_not_repeated(base_tokenizer, short_way):
    tokenizer = PromptTokenizer(base_tokenizer, chat=False, short_way=short_way)
    plain, begun = tokenizer.encode_prompts(["add 1 and 2", "<|endoftext|>add 1 and 2"])
    assert plain == begun


# ---------------------------------------------------------------------- rows that a suite has too


def with_text(content, index, split="train"):
    return {**rows(1, split=split)[0], "prompt": [{"role": "user", "content": content}],
            "extra_info": {"split": split, "index": index}}  # fmt: skip


def naive(text, suite):
    """Exact, 13-gram or None, by comparing with every problem of the suite."""

    def words(text):
        return "".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split()

    def parts(text):
        found = words(text)
        return [found[at : at + 13] for at in range(len(found) - 12)]

    if text in suite:
        return "exact"
    most = max(1, min(10, len(suite) // 2))
    shared = [part for part in parts(text) if 0 < sum(part in parts(other) for other in suite) <= most]
    return "13-gram" if shared else None


@pytest.mark.parametrize("way", ["tell", "drop", "off"])
def test_training_rows_of_a_suite_are_told_or_dropped(chat_tokenizer, artifacts_root, tmp_path, way):
    words = [f"w{i}" for i in range(60)]
    rng = np.random.default_rng(0)
    wording = "Solve this and show every single step that you take on the way to it:"
    suite = [f"{wording} {' '.join(rng.choice(words, 20))}" for _ in range(30)]
    inside = suite[4].split()
    texts = [
        suite[3],
        f"{wording} but quite another question",  # the wording of the task alone
        "Before it, " + " ".join(inside[16:29]).upper().replace(" ", ", ") + "!",  # 13 words, other case and marks
        "Before it, " + " ".join(inside[16:28]) + " and no more",  # 12 words
        *(" ".join(rng.choice(words[:6], 16)) for _ in range(40)),
        *(f"{' '.join(suite[int(at)].split()[20 - int(at) % 5 :])} {at}" for at in rng.choice(30, 12, replace=False)),
    ]
    settings = written(tmp_path, [with_text(text, i) for i, text in enumerate(texts)], rows(5, split="validation"))
    folder = tmp_path / "suite"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([with_text(text, i) for i, text in enumerate(suite)]),
                   folder / "validation.parquet")  # fmt: skip
    expected = [naive(text, suite) for text in texts]
    assert expected[:4] == ["exact", None, "13-gram", None]
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    config = FilterConfig(decontaminate=way, overlong="truncate_left")
    suites = {} if way == "off" else {"mine": folder}
    found = filter_dataset(dataset.directory, chat_tokenizer, config, root=artifacts_root, suites=suites)
    told = {kind: found.counts.get(f"train/{kind} in suite mine", 0) for kind in ("exact", "13-gram")}
    assert told == {kind: 0 if way == "off" else expected.count(kind) for kind in told}
    kept = pq.read_table(found.directory / "train.parquet").to_pylist()
    wanted = [text for text, which in zip(texts, expected, strict=True) if way != "drop" or which is None]
    assert [row["prompt"][0]["content"] for row in kept] == wanted


def test_words_that_most_problems_of_a_suite_share_say_nothing(tmp_path):
    def suite(name, texts):
        (tmp_path / name).mkdir()
        prompts = [[{"role": "user", "content": text}, {"role": "user", "content": None}] for text in texts]
        pq.write_table(pa.table({"prompt": prompts}), tmp_path / name / "validation.parquet")
        return tmp_path / name

    def words(start):
        return " ".join(f"w{number}" for number in range(start, start + 13))

    texts = [*[f"{words(0)} a{n}" for n in range(10)], *[f"{words(100)} b{n}" for n in range(11)], words(200)]
    watch = SuiteOverlap(
        {"many": suite("many", texts), "few": suite("few", [words(300), words(300) + " x", words(400)])}
    )
    assert watch
    assert watch.find(f"{words(0)} a3\n") == ("many", "exact")
    assert watch.find(f"before {words(0).upper()}, after") == ("many", "13-gram")
    assert watch.find(f"before {words(100)} after") is None, "eleven share it"
    assert watch.find(f"{words(200)}?") == ("many", "13-gram")
    assert watch.find(" ".join(words(200).split()[:12])) is None
    assert watch.find(words(300) + " y") is None, "more than half of a small suite share it"
    assert watch.find(words(400) + " y") == ("few", "13-gram")
    one = SuiteOverlap({"one": suite("one", [words(500)])})
    assert one.find(words(500) + " y") == ("one", "13-gram")
    assert not SuiteOverlap({})


def test_progress_and_facts_of_a_filtered_dataset(chat_tokenizer, artifacts_root, tmp_path, monkeypatch):
    settings = written(tmp_path, rows(70), rows(7, split="validation"))
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    monkeypatch.setattr(filter_module, "ROWS_PER_GROUP", 32)
    seen = []
    config = FilterConfig(max_prompt_tokens=4_096)
    found = filter_dataset(
        dataset.directory, chat_tokenizer, config, root=tmp_path, on_progress=lambda *told: seen.append(told)
    )
    assert seen == [("validation", 7, 7), ("train", 32, 70), ("train", 64, 70), ("train", 70, 70)]
    assert not found.cached
    document = provenance(found.directory / "train.parquet")
    assert (document["split"], document["counts"]) == ("train", {"train": 70})
    assert document["fingerprint"] == found.fingerprint
    assert "| train | 70 |" in (found.directory / "README.md").read_text()
    again = filter_dataset(dataset.directory, chat_tokenizer, config, root=tmp_path)
    assert (again.cached, again.counts) == (True, found.counts)


def test_a_split_without_rows_is_refused_with_the_reasons(chat_tokenizer, artifacts_root, tmp_path):
    settings = written(tmp_path, rows(3), rows(2, split="validation"))
    with pytest.raises(DataError) as told:
        filtered(settings, chat_tokenizer, artifacts_root, max_prompt_tokens=1)
    (dataset,) = (artifacts_root / "datasets").glob("*/")
    assert str(told.value) == (
        f"{dataset}/validation.parquet: no row is left after the filter (2 overlong). Raise filter.max_prompt_tokens "
        "(now 1), or check the dataset"
    )
    assert list((artifacts_root / "filtered").iterdir()) == []
    nothing = tmp_path / "nothing"
    with pytest.raises(
        DataError, match=rf"^{nothing}: is no finished dataset \(no manifest\.json\); make it with `mill"
    ):
        filter_dataset(nothing, chat_tokenizer, FilterConfig(), root=artifacts_root)
