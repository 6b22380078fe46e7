"""What only a try can tell is told by a dry run: scorer, loss, tokenizer, and whether the problems exist."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import trial
from data.trial import FirstRow, first_row
from flows.chain import stages_of
from flows.plan.checks import run_stage_checks
from flows.stages.trials import count_rows, judge_failure_message, try_tokenizer
from flows.work.open_run import OpenRun
from rlcore.config import CustomData, RunConfig, ScratchModel
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError, MillraceError
from rlcore.models.tokenizer import build_scratch_tokenizer

OWN = """
import time
from data.multiplication import Message, Row, TaskRows

def right(response, truth):
    return float(response == "7")
def nothing(response, truth):
    return None
def wants_more(response, truth):
    return float(truth["difficulty"])

def loss(policy_logprobs, old_logprobs, advantages):
    return policy_logprobs

class NoReset:
    def reset(self, row):
        raise LookupError("no such game")
    def step(self, text):
        return "more"
class NoTurn(NoReset):
    def reset(self, row):
        return None

def seven(settings, seed):
    rows = [Row((Message("user", "what"),), 7, 1, "7")]
    return TaskRows("own", "math", "text", {"train": rows, "validation": rows})
def long(settings, seed):
    rows = [Row((Message("user", "what"),), "7" * 300, 1, "7")]
    return TaskRows("own", "math", "text", {"train": rows, "validation": rows})
def raises(settings, seed):
    raise KeyError("words.txt")
def never(settings, seed):
    time.sleep(600)
"""

Try = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(["experiment=debug", f"paths.root={tmp_path / 'root'}"])


@pytest.fixture
def dry_run(tmp_path: Path, artifacts_root: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """A dry run's tries, with functions of one's own in the module `tried_out`."""
    (tmp_path / "tried_out.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tried_out", raising=False)

    def run(*overrides: str) -> str:
        config = load_config(["experiment=debug", f"paths.root={artifacts_root}", *overrides])
        run = OpenRun(config)
        return run_stage_checks(run, [stage for stage in stages_of(config) if not stage.status(run).cached])

    return run


@pytest.mark.parametrize(
    ("scorer", "why"),
    [
        ("nothing", r"TypeError: a scorer must return a number or rlcore\.score\.Score, got NoneType"),
        ("wants_more", r"KeyError: 'difficulty'"),
    ],
)
def test_a_scorer_that_fails_on_a_row_of_the_task(dry_run: Try, scorer: str, why: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'data\.scorer: .* got tried_out:{scorer}, .* ground truth {{"target".*{why}'
    ):
        dry_run(f"data.scorer=tried_out:{scorer}")


def test_an_absent_judge_is_reported_as_a_judge(dry_run: Try) -> None:
    dead = (
        "reward.deadline_s=35",
        "reward.judge.url=http://127.0.0.1:9/v1",
        "reward.judge.model=m",
        "reward.judge.tries=1",
    )
    with pytest.raises(
        ConfigError, match=r"^reward\.judge: must give a verdict .*; got no verdict of http://127"
    ) as told:
        dry_run("data.scorer=data.judge:score", "reward.num_processes=1", *dead)
    assert "data.scorer" not in str(told.value)


def test_a_scorer_is_tried_on_the_solution_of_built_rows(dry_run: Try) -> None:
    dry_run("data=custom", "data.build=tried_out:seven", "data.scorer=tried_out:right")
    with pytest.raises(ConfigError, match=r"on the answer '7' to the task's first row, with ground truth 7: KeyError"):
        dry_run("data=custom", "data.build=tried_out:seven", "data.scorer=tried_out:wants_more")


def test_a_loss_with_a_wrong_signature(dry_run: Try) -> None:
    with pytest.raises(
        ConfigError, match=r"algo\.policy_loss: .* got tried_out:loss, which raises TypeError: loss\(\) got"
    ):
        dry_run("algo.policy_loss=tried_out:loss")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.train_size=100000"], "100,032 problems asked for, but only 5,326 exist with 3 numbers"),
        (["data.train_size=4767", "data.validation_size=560"], "5,327 problems asked for, but only 5,326 exist"),
        (["data.number_high=90", "data.train_size=100000000"], "100,000,032 problems asked for, but only about"),
        (["data=custom", "data.train_size=5000", "data.validation_size=9"], "at most 4851 products exist, got 5009"),
        (["data=custom", "data.build=tried_out:raises"], "failed to make its first row: KeyError: 'words.txt'"),
    ],
)  # fmt: skip
def test_more_problems_than_exist_and_a_build_that_fails(dry_run: Try, overrides: list[str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        dry_run(*overrides)


def test_a_build_that_takes_long_is_not_waited_for(dry_run: Try, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "BUILD_DEADLINE_S", 2.0)
    dry_run("data=custom", "data.build=tried_out:never", "data.scorer=tried_out:nothing")


READS = ["warm_start.enabled=false", "filter.max_prompt_tokens=256", "rollout.max_response_tokens=64"]

WEAK = {"code": ("sandbox.allow_weak=true",)}
"""Settings by which a task is tried on a machine without bubblewrap."""
LINES = {
    "gsm8k": {"question": "What is 1 + 1?", "answer": "2\n#### 2"},
    "mapped": {"question": "What is 1 + 1?", "answer": "2"},
    "code": {"question": "Print 7.", "tests": [{"stdin": "", "stdout": "7"}]},
}


def lines_of(task: str, split: str, count: int) -> list[str]:
    """Rows of a data file, no two of which have one prompt."""
    text = json.dumps(LINES[task])
    return [text.replace("What", f"{split} {n}: what").replace("Print", f"{split} {n}: print") for n in range(count)]


@pytest.mark.parametrize("task", LINES)
def test_a_broken_line_of_a_data_file(dry_run: Try, tmp_path: Path, task: str) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(lines_of(task, "train", 400)))
    (tmp_path / "test.jsonl").write_text("\n".join([*lines_of(task, "test", 400), '{"question": ']))
    place = f"data.options=[{tmp_path}]" if task == "code" else f"data.source={tmp_path}"
    read = (*READS, "model.path=some/model", f"data={task}", place, "reward.num_processes=1", *WEAK.get(task, ()))
    with pytest.raises(DataError, match=r"test\.jsonl: line 401: is no JSON .*; repair or remove the line"):
        dry_run(*read)


@pytest.mark.parametrize("task", LINES)
def test_fewer_rows_in_a_file_than_a_batch_warn(dry_run: Try, tmp_path: Path, task: str) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines_of(task, name, 4)))
    place = f"data.options=[{tmp_path}]" if task == "code" else f"data.source={tmp_path}"
    read = (*READS, "model.path=some/model", f"data={task}", place, "reward.num_processes=1", *WEAK.get(task, ()))
    told = dry_run(*read)
    assert told.startswith("warning: trainer.batch_size=8 is more than the 4 training rows of the dataset, so a prompt")
    assert dry_run(*read, "trainer.batch_size=4", "trainer.mini_batch_size=4") == ""


def test_fewer_rows_asked_for_than_in_a_batch_are_told(dry_run: Try) -> None:
    assert "trainer.batch_size=8 is more than the 7 training rows of the dataset" in dry_run("data.train_size=7")
    assert dry_run("data.train_size=8") == ""
    own = ("data=custom", "data.build=tried_out:seven", "data.scorer=tried_out:right", "data.train_size=7")
    assert "batch_size=8 is more than the 7 training rows that data.train_size asks for" in dry_run(*own)


def test_a_broken_line_of_a_suite_and_of_demonstrations(dry_run: Try, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(LINES["gsm8k"]))
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(LINES['gsm8k'])}\n[1]\n")
    suite = f"validation.suites=[{{name: sums, data: {{task: gsm8k, source: {tmp_path}, template: text}}}}]"
    with pytest.raises(DataError, match=r"test\.jsonl: line 2: must be a JSON object"):
        dry_run(*READS, "model.path=some/model", "data.template=base", suite)
    talks = tmp_path / "talks.jsonl"
    talks.write_text('{"prompt": "a", "completion": "b"}\n' * 300 + "{")
    with pytest.raises(DataError, match=r"talks\.jsonl: line 301: is no JSON"):
        dry_run(f"warm_start.demonstrations={talks}", "data.search_tries=null")


def model(folder: Path, *, without: str = "", template: str | None = None) -> str:
    folder.mkdir()
    build_scratch_tokenizer(ScratchModel(), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for file in folder.glob(without or "nothing"):
        file.unlink()
    return f"model.path={folder}"


def test_a_folder_without_a_tokenizer(dry_run: Try, tmp_path: Path) -> None:
    """Its chat template alone is none."""
    path = model(tmp_path / "model", without="token*")
    assert (tmp_path / "model" / "chat_template.jinja").is_file()
    with pytest.raises(DataError, match=r"model: the tokenizer cannot be loaded .*tokenizer_config\.json"):
        dry_run(*READS, path, "data.template=base")


def test_a_chat_template_that_is_missing_or_cannot_be_rendered(dry_run: Try, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this tokenizer has no chat template"):
        dry_run(*READS, model(tmp_path / "none", without="chat*"), "data.template=chat")
    with pytest.raises(DataError, match=r"broken: .*chat template"):
        dry_run(*READS, model(tmp_path / "broken", template="{% for m in %}"), "data.template=chat")


def test_unread_names_for_a_chat_template_are_refused(dry_run: Try, tmp_path: Path) -> None:
    own = "data.chat_template_kwargs.enable_thinking=false"
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs=.*no prompt is a chat.*data\.template=chat"):
        dry_run(*READS, model(tmp_path / "plain"), own, "data.template=base")
    template = "{{ messages[0].content }}{{ 'A:' if add_generation_prompt }}"
    with pytest.raises(DataError, match=r"does not read enable_thinking .*only the messages"):
        dry_run(*READS, model(tmp_path / "own", template=template), own, "data.template=chat")


def test_what_is_made_already_is_not_made_again(artifacts_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data.tasks import build_dataset

    settings = CustomData(train_size=20, validation_size=5)
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    row = first_row(settings, 1, artifacts_root)
    monkeypatch.setattr(trial, "_build_in_process", lambda config, seed: pytest.fail("made again"))
    assert first_row(settings, 1, artifacts_root) == row
    assert dataset.counts == {"train": 20, "validation": 5}


@pytest.mark.parametrize(
    ("environment", "task", "why"),
    [
        (
            "NoReset",
            ("data=custom", "data.build=tried_out:long"),
            r"failed in reset on the task's first row, \"7{199}: LookupError: .?no such game",
        ),
        (
            "NoTurn",
            (),
            r"failed in step on .*{\"target\".*TypeError: step must return rlcore\.rollout\.environment\.Turn, got str",
        ),
    ],
)
def test_an_environment_that_fails_on_a_row_of_the_task(
    dry_run: Try, environment: str, task: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data\.environment: must .* got tried_out:{environment}, which {why}"):
        dry_run(f"data.environment=tried_out:{environment}", "warm_start.enabled=false", *task)


@pytest.mark.parametrize(
    ("source", "truth", "words", "why"),
    [
        ("codecontests", '{"inputs": ["1"]}', (), r"^data\.scorer: must be given for .*data_source codecontests"),
        (
            "openai/gsm8k",
            "18",
            ("data.scorer=data.countdown:score",),
            r"TypeError: the ground truth of countdown is \{",
        ),
        ("countdown", {"target": 3, "numbers": [1, 2]}, ("data.scorer=data.gsm8k:score",), r"KeyError: 'answer'"),
        ("openai/gsm8k", "18", (), ""),
    ],
)
def test_a_scorer_that_cannot_read_the_ground_truth_is_refused(
    dry_run: Try, tmp_path: Path, source: str, truth: object, words: tuple[str, ...], why: str
) -> None:
    files = {name: tmp_path / f"{name}.parquet" for name in ("train", "validation")}
    for name, file in files.items():
        prompt = [{"role": "user", "content": f"{name}?"}]
        row = {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": truth}}
        pq.write_table(pa.Table.from_pylist([row] * 8), file)
    given = (f"data.{name}_file={file}" for name, file in files.items())
    plain = ("data.template=text", "reward.num_processes=1", "filter.duplicates=keep", "warm_start.enabled=false")
    words = ("data=parquet", *given, *plain, model(tmp_path / "model"), *words)
    if not why:
        dry_run(*words)
        return
    with pytest.raises(MillraceError, match=why):
        dry_run(*words)


def test_a_prompt_that_ends_with_the_answer(dry_run: Try, tmp_path: Path) -> None:
    plain = ("reward.num_processes=1", "warm_start.enabled=false", model(tmp_path / "model"))

    def overrides(words: str) -> list[str]:
        for split, question in (("train", "a"), ("validation", "b")):
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": words}]
            row = {"data_source": "gsm8k", "prompt": said, "reward_model": {"style": "rule", "ground_truth": "7"}}
            pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{split}.parquet")
        files = [f"data.{split}_file={tmp_path}/{split}.parquet" for split in ("train", "validation")]
        return ["data=parquet", "data.scorer=data.math:score", *files, *plain]

    told = dry_run(*overrides("7 is"))
    assert (
        told.count("1 prompts that end with the assistant's words have their ground truth, a number, among them") == 2
    )
    with pytest.raises(DataError, match=r"train\.parquet: row 0: .* must not end with the row's ground truth '7'"):
        dry_run(*overrides("It is 7."))


def test_only_a_judges_failure_is_reported_as_a_judge() -> None:
    assert judge_failure_message("JudgeError: no verdict of http://a") == (
        "reward.judge: must give a verdict on any answer; got no verdict of http://a. Look whether the endpoint "
        "answers, and serves reward.judge.model"
    )
    assert judge_failure_message("KeyError: JudgeError: x") == ""


def test_a_tokenizer_is_loaded_without_rows(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        try_tokenizer(tmp_path / "empty", [], config)
    (tmp_path / "model").mkdir()
    build_scratch_tokenizer(ScratchModel(), tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    try_tokenizer(tmp_path / "model", [], config)


def test_a_template_unfit_for_turns_is_refused_for_environments(config: RunConfig, tmp_path: Path) -> None:
    build_scratch_tokenizer(ScratchModel(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}{{ '=' if add_generation_prompt }}")
    chat = FirstRow([{"role": "user", "content": "1 + 2"}], "chat", "{}", "")
    try_tokenizer(tmp_path, [chat], config)
    data = config.data.model_copy(update={"environment": "data.calculator:Countdown"})
    played = config.model_copy(update={"data": data})
    try_tokenizer(tmp_path, [replace(chat, prompt_form="text")], played)
    with pytest.raises(
        ConfigError, match=r"^data\.environment: the tokenizer's chat template drops or changes earlier"
    ):
        try_tokenizer(tmp_path, [chat], played)


def test_rows_are_counted_from_files_or_settings(tmp_path: Path) -> None:
    for name, number in (("train", 3), ("test", 2)):
        lines = (json.dumps({"question": f"{name} {n}?", "answer": "1"}) for n in range(number))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    root = f"paths.root={tmp_path / 'root'}"
    config = load_config(["experiment=debug", root])
    assert count_rows(config) == config.data.train_size  # type: ignore[union-attr]
    read = [
        "model.path=some/model",
        "warm_start.enabled=false",
        "filter.max_prompt_tokens=256",
        "reward.num_processes=1",
    ]
    mapped = load_config(["experiment=debug", root, *read, "data=mapped", f"data.source={tmp_path}"])
    assert count_rows(mapped) == 3
    ours = load_config(["experiment=debug", root, "data=custom", "data.train_size=9"])
    assert count_rows(ours) == 9
    (tmp_path / "test.jsonl").write_text('{"question": "a?", "answer": "1"}\n{"question": "a?"')
    with pytest.raises(DataError, match=r"test\.jsonl: line 2: is no JSON"):
        count_rows(mapped)
