"""Trials of a dry run: scorer, loss, tokenizer, rows."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import trial
from data.trial import FirstRow, first_row
from flows.chain import stages_of
from flows.stages.stage import try_tokenizer
from flows.work.checks import run_stage_checks
from flows.work.open_run import OpenRun
from rlcore.config import CustomData, ScratchModel
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError, MillraceError
from rlcore.models.tokenizer import build_scratch_tokenizer
from tests.flows.conftest import changed

OWN = """
import os, time
from rlcore.rollout.environment import Turn
from data.rows import Message, Row, TaskRows

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
class Other(NoTurn):
    def step(self, text):
        return Turn(str(os.getpid()))
class OtherDeclared(Other):
    repeatable = False

def seven(settings, seed, truth=7):
    rows = [Row((Message("user", "what"),), truth, 1, "7")]
    return TaskRows("own", "math", "text", {"train": rows, "validation": rows})
def long(settings, seed):
    return seven(settings, seed, "7" * 300)
def raises(settings, seed):
    raise KeyError("words.txt")
def never(settings, seed):
    time.sleep(600)
"""

Try = Callable[..., str]


@pytest.fixture
def dry_run(tmp_path: Path, artifacts_root: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Run the trials with custom functions in the module `tried_out`."""
    (tmp_path / "tried_out.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tried_out", raising=False)

    def run(*overrides: str) -> str:
        config = load_config(["experiment=debug", f"paths.root={artifacts_root}", *overrides])
        run = OpenRun(config)
        return run_stage_checks(run, [stage for stage in stages_of(config) if not stage.status(run).cached])

    return run


NOWHERE = "http://127.0.0.1:9"  # an address without a server
READS = ["warm_start.enabled=false", "filter.max_prompt_tokens=256", "rollout.max_response_tokens=64"]
OWN_BUILD = ("data=custom", "data.build=tried_out:seven", "data.scorer=tried_out:right")
JUDGE = ("data.scorer=data.judge:score", "reward.num_processes=1", "reward.deadline_s=35",
         "reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.model=m", "reward.judge.tries=1")  # fmt: skip
THINKING = "data.chat_template_kwargs.enable_thinking=false"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.scorer=tried_out:nothing"],
         r'data\.scorer: .* got tried_out:nothing, .* ground truth {"target".*TypeError: a scorer must return a number '
         r"or rlcore\.score\.Score, got NoneType"),
        (["data.scorer=tried_out:wants_more"],
         r"data\.scorer: .* got tried_out:wants_more, .* ground truth {\"target\".*KeyError: 'difficulty'"),
        (JUDGE, r"^reward\.judge: must give a verdict on any response; got no verdict of http://127(?!.*data\.scorer)"
                r".* is reachable and serves reward\.judge\.model$"),
        (["algo.policy_loss=tried_out:loss"],
         r"algo\.policy_loss: .* got tried_out:loss, which raises TypeError: loss\(\) got"),
        (["data.train_size=4767", "data.validation_size=560"],
         "5,327 problems asked for, but only 5,326 exist with 3 numbers"),
        (["data=custom", "data.train_size=11110000", "data.validation_size=9"],
         "at most 11110000 problems exist, got 11110009"),
        ([*OWN_BUILD[:2], "data.scorer=tried_out:wants_more"],
         "on response '7' to the task's first row, with ground truth 7: KeyError"),
        (["data=custom", "data.build=tried_out:raises"], "failed to make its first row: KeyError: 'words.txt'"),
        (["data.environment=tried_out:NoReset", "warm_start.enabled=false", "data=custom", "data.build=tried_out:long"],
         r"data\.environment: must .* got tried_out:NoReset, which failed in reset on the task's first row, \"7{199}: "
         r"LookupError: .?no such game"),
        (["data.environment=tried_out:NoTurn", "warm_start.enabled=false"],
         r"data\.environment: must .* got tried_out:NoTurn, which failed in step on .*{\"target\".*TypeError: step "
         r"must return rlcore\.rollout\.environment\.Turn, got str"),
        (["data.environment=tried_out:Other", "warm_start.enabled=false"],
         r"data\.environment: must repeat its replies, or declare repeatable = False; got tried_out:Other, "),
        (["data=openenv", "data.options=['{game}',text]", "warm_start.enabled=false",
          f"episode.server={NOWHERE}"],
         r"data\.environment: .*episode\.server: .* got from http://127\.0\.0\.1:9 ConnectError: .* Start it, correct"),
        (["data=custom", "data.build=tried_out:seven", "data.environment=data.openenv:OpenEnv", "episode.server=''",
          "warm_start.enabled=false"],
         r"episode\.server: must name the server of data\.environment=data\.openenv:OpenEnv"),
    ],
)  # fmt: skip
def test_failing_code_and_builds_are_refused(dry_run, overrides, message):
    with pytest.raises((ConfigError, DataError), match=message):
        dry_run(*overrides)


def test_wrong_option_of_a_build_is_a_wrong_setting(dry_run):
    with pytest.raises(ConfigError, match=r"data\.options: must be a prompt with {game}.* got \['no number'\]"):
        dry_run("data=openenv", "data.options=[no number]", "warm_start.enabled=false", f"episode.server={NOWHERE}")


@pytest.mark.parametrize(
    ("without", "template", "overrides", "message"),
    [
        ("token*", None, ["data.template=base"], r"model: the tokenizer cannot be loaded .*tokenizer_config\.json"),
        ("chat*", None, ["data.template=chat"], "this tokenizer has no chat template"),
        ("", "{% for m in %}", ["data.template=chat"], r"model: .*chat template"),
        ("", None, ["data.template=base", THINKING],
         r"data\.chat_template_kwargs=.*no prompt is a chat.*data\.template=chat"),
        ("", "{{ messages[0].content }}{{ 'A:' if add_generation_prompt }}", ["data.template=chat", THINKING],
         r"does not read enable_thinking .*only the messages"),
    ],
)  # fmt: skip
def test_unusable_tokenizers_are_refused(dry_run, tmp_path, without, template, overrides, message):
    path = model(tmp_path / "model")
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    for file in (tmp_path / "model").glob(without or "nothing"):
        file.unlink()
    with pytest.raises((ConfigError, DataError), match=message):
        dry_run(*READS, path, *overrides)


def test_trials_that_refuse_nothing(dry_run, monkeypatch):
    dry_run(*OWN_BUILD)
    dry_run("data.environment=tried_out:OtherDeclared", "warm_start.enabled=false")  # it is played once
    monkeypatch.setattr(trial, "BUILD_DEADLINE_S", 2.0)
    dry_run("data=custom", "data.build=tried_out:never", "data.scorer=tried_out:nothing")  # it is not awaited


def model(folder: Path) -> str:
    folder.mkdir()
    build_scratch_tokenizer(ScratchModel(), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return f"model.path={folder}"


LINES = {
    "gsm8k": {"question": "What is 1 + 1?", "answer": "2\n#### 2"},
    "mapped": {"question": "What is 1 + 1?", "answer": "2"},
    "code": {"question": "Print 7.", "tests": [{"stdin": "", "stdout": "7"}]},
}


@pytest.mark.parametrize("task", LINES)
def test_rows_of_files_are_checked_and_counted(dry_run, tmp_path, task):
    def write(name: str, count: int, *more: str) -> None:
        text = json.dumps(LINES[task])
        lines = [text.replace("What", f"{name} {n}: what").replace("Print", f"{name} {n}: print") for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, *more]))

    place = [f"data.options=[{tmp_path}]", "sandbox.allow_weak=true"] if task == "code" else [f"data.source={tmp_path}"]
    read = (*READS, "model.path=some/model", f"data={task}", *place, "reward.num_processes=1")
    write("train", 400)
    write("test", 400, '{"question": ')
    with pytest.raises(DataError, match=r"test\.jsonl: line 401: is no JSON .*; repair or remove the line"):
        dry_run(*read)
    write("train", 4)
    write("test", 4)
    said = "warning: trainer.batch_size=8 is more than the 4 training rows of the dataset, so a prompt"
    assert dry_run(*read).startswith(said)
    assert dry_run(*read, "trainer.batch_size=4", "trainer.mini_batch_size=4") == ""


def test_fewer_requested_rows_than_a_batch_warn(dry_run):
    assert "trainer.batch_size=8 is more than the 7 training rows of the dataset" in dry_run("data.train_size=7")
    assert dry_run("data.train_size=8") == ""
    message = dry_run(*OWN_BUILD, "data.train_size=7")
    assert "batch_size=8 is more than the 7 training rows requested by data.train_size" in message


def test_broken_lines_of_a_suite_are_reported(dry_run, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(LINES["gsm8k"]))
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(LINES['gsm8k'])}\n[1]\n")
    suite = f"validation.suites=[{{name: sums, data: {{task: gsm8k, source: {tmp_path}, template: text}}}}]"
    with pytest.raises(DataError, match=r"test\.jsonl: line 2: must be a JSON object"):
        dry_run(*READS, "model.path=some/model", "data.template=base", suite)


def test_existing_dataset_gives_the_first_row(artifacts_root, monkeypatch):
    from data.tasks import build_dataset

    settings = CustomData(train_size=20, validation_size=5)
    dataset = build_dataset(settings, seed=1, root=artifacts_root)
    row = first_row(settings, 1, artifacts_root)
    monkeypatch.setattr(trial, "_build_in_process", lambda config, seed: pytest.fail("made again"))
    assert first_row(settings, 1, artifacts_root) == row
    assert dataset.counts == {"train": 20, "validation": 5}


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
def test_scorer_that_cannot_read_ground_truth_is_refused(dry_run, tmp_path, source, truth, words, why):
    files = {name: tmp_path / f"{name}.parquet" for name in ("train", "validation")}
    for name, file in files.items():
        prompt = [{"role": "user", "content": f"{name}?"}]
        row = {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": truth}}
        pq.write_table(pa.Table.from_pylist([row] * 8), file)
    given = (f"data.{name}_file={file}" for name, file in files.items())
    plain = ("data.template=text", "reward.num_processes=1", "filter.duplicates=keep", "warm_start.enabled=false")
    words = ("data=parquet", *given, *plain, model(tmp_path / "model"), *words)
    with pytest.raises(MillraceError, match=why) if why else nullcontext():
        dry_run(*words)


def test_tokenizer_is_loaded_without_rows(config, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        try_tokenizer(tmp_path / "empty", [], config)
    model(tmp_path / "model")
    try_tokenizer(tmp_path / "model", [], config)


def test_template_that_depends_on_a_length_is_accepted(config, tmp_path):
    build_scratch_tokenizer(ScratchModel(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content | length < 40 else '1' }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )
    try_tokenizer(tmp_path, [FirstRow([{"role": "user", "content": "1 + 2" * 9}], "chat", "{}", "")], config)


def test_template_unfit_for_turns_is_refused_for_environments(config, tmp_path):
    build_scratch_tokenizer(ScratchModel(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}{{ '=' if add_generation_prompt }}")
    chat = FirstRow([{"role": "user", "content": "1 + 2"}], "chat", "{}", "")
    try_tokenizer(tmp_path, [chat], config)
    played = changed(config, "data", environment="data.number_guessing:Game")
    try_tokenizer(tmp_path, [replace(chat, prompt_form="text")], played)
    with pytest.raises(ConfigError, match=r"^data\.environment: the tokenizer's chat template drops or changes ear"):
        try_tokenizer(tmp_path, [chat], played)
