"""Mistakes of a new user: each is reported before anything starts, with key, rule, value and remedy."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import app, exit_code
from rlcore.config import ScratchModel
from rlcore.models.tokenizer import build_scratch_tokenizer

SCORERS = """
def says_one(response, truth): return "1"
def forgets_the_wrong(response, truth):
    if response.strip() != "0" and response: return 1.0
def raises(response, truth): raise ValueError("no")
"""
FILES = {
    "mine.py": SCORERS,
    "broken.py": "def score(:\n",
    "seed.yaml": "name: s\nexperiment: debug\nseed: [1, 2]\ngrid:\n  optim.lr: [1e-3, 1e-4]\n",
    "typo.yaml": "name: s\nexperiment: debug\ngrids:\n  optim.lr: [1e-3]\n",
    "short.yaml": "name: s\nexperiment: debug\ngrid:\n  lr: [1e-3]\n",
    "mine.yaml": "defaults: [debug, _self_]\nname: mine\nlr: 1e-4\n",
    "nothing.yaml": "# later\n",
    "first.yaml": "defaults: [_self_, debug]\nname: first\ntrainer: 5\noptm: {lr: 1}\nseed: 7\n",
    "rows/train.jsonl": '{"q": "What is 2 + 2?", "a": "4"}\n',
    "rows/test.jsonl": '{"q": "What is 1 + 2?", "a": "3"}\n',
    "half/train.jsonl": '{"q": "What is 2 + 2?", "a": "4"}\n',
    "torn/train.jsonl": '{"q": "What is\n',
    "torn/test.jsonl": '{"q": "What is\n',
    "leak/train.jsonl": '{"q": "What is 2 + 2?", "a": "4"}\n\n{"q": "What is 1 + 2?", "a": "3"}\n',
    "leak/test.jsonl": '{"q": "What is 1 + 2?", "a": "3"}\n',
    "doubled/train.jsonl": '{"q": "What is 2 + 2?", "a": "4"}\n' * 2,
    "doubled/test.jsonl": '{"q": "What is 1 + 2?", "a": "3"}\n',
    "csv/train.csv": "q,a\nWhat is 2 + 2?,4\n",
    "bare/train.jsonl": "",
    "bare/test.jsonl": "",
    "empty/nothing": "",
    "lr=1/run.json": "{",
    "no_tokenizer/config.json": json.dumps({"model_type": "qwen2"}),
}
READS = ["model.path=model", "warm_start.enabled=false", "filter.max_prompt_tokens=256"]
NO_TOKENIZER = ["model.path=no_tokenizer", "warm_start.enabled=false", "filter.max_prompt_tokens=256"]
MAPPED = ["data=mapped", "data.question=q", "data.answer=a", "reward.num_processes=1", *READS]
MISTAKES: list[tuple[str, list[str]]] = [
    # the command
    ("rum experiment=debug", ["millrace: no such command; got rum. Did you mean run?"]),
    ("train debug", ["'debug'", "Did you mean experiment=debug?"]),
    ("train mine.yaml", ["Did you mean experiment=mine.yaml?"]),
    ("train --lr 1e-4", ["millrace train: no such option, and a setting", "got --lr. Did you mean optim.lr=1e-4?"]),
    ("train --dry-rnu", ["--dry-run"]),
    ("train -m seed=1,2 experiment=debug", ["millrace train: no such option; got -m. Write millrace run -m"]),
    ("train exprmnt=debug", ["exprmnt: there is", "got 'exprmnt=debug'. Did you mean experiment=debug?"]),
    ("train alg=dapo", ["alg: there is no such setting", "Did you mean algo=dapo?"]),
    ("rollouts absent --text x", ["millrace rollouts: no such option; got --text. There are --json", "--search"]),
    ("validate debug-s1 99", ["RUN: takes no step; got debug-s1 99", "validate debug-s1 --checkpoint 99"]),
    ("train --cfg hydra", ["--cfg / -c: must be job", "got hydra"]),
    ("train --root=/proc/here", ["paths.root: must be writable, and /proc is not", "choose another"]),
    ("train --root=/dev/null/here", ["--root", "must be a folder, and /dev/null is none"]),
    ("train paths.root=", ["paths.root: must be a folder; got '', which is not one"]),
    ("train --fork absent", ["absent: is neither the folder nor the id of a run", "--root"]),
    ("rollouts absent --pairs p.jsonl", ["--pairs: takes no file", "got p.jsonl. Write", "absent --pairs > p.jsonl"]),
    ("report absent extra", ["RUN: must be one run, by its folder or id, or its settings", "got absent extra"]),
    ("logs absent -n 99999999999999999999", ["--lines", "less than or equal to"]),
    ("logs lr=1", ["lr=1/run.json: cannot be read"]),
    ("eval lr=1 --suite gsm8k", ["lr=1/run.json: cannot be read"]),
    (f"logs {'x' * 300}", [f"{'x' * 300}/run.json: File name too long"]),
    ("runs a\udcff", ["'a\\udcff': must be UTF-8 text"]),
    ("checkpoints absent --checkpoint best", ["--checkpoint best: names the one to export", "--export DIR"]),
    ("slots --per-gpu 2", ["--per-gpu 2: is the number of slots of each of --gpus"]),
    (f"slots --per-gpu 64 --gpus {','.join(map(str, range(17)))}", ["--gpus: must give 1,024 slots at most", "1,088"]),
    ("slots --set 2 --root=/proc/here", ["/proc/here/slots: cannot be written"]),
    ("up --root=/proc/here", ["/proc/here: cannot be written"]),
    ("deploy mine.yaml --name a/b", ["--name: must have none of / % & < >, which Prefect refuses; got a/b with /"]),
    ("sweep debug_grid --max-hours 1e999", ["--max-hours", "less than or equal to 100000"]),
    ("eval model --suite pipe.yaml", ["--suite: must be a regular file"]),
    *((f"{line}=", [f"{line.split()[-1]}: must not be empty; is a shell variable unset?"]) for line in (
        "runs --root", "sync --uri", "audit absent --scorer", "train --fork", "deploy mine.yaml --name",
    )),
    (f"new task {'x' * 65}", ["NAME: must be small letters, digits and _, at most 64"]),
    ("validate experiment=debug --checkpoint 77", ["checkpoint=step-000077", "train first"]),
    # the experiment
    ("train experiment=debgu", ["got debgu", "Did you mean debug?"]),
    ("train experiment=gone.yaml", ["there is no such file", "got gone.yaml in", "Fix it, or name one of"]),
    ("train experiment=mine.yaml", ["lr: there is no such setting", "Did you mean optim.lr?"]),
    ("train experiment=empty", ["experiment: must name a file in conf/experiment; got empty"]),
    ("train experiment=nothing.yaml", ["experiment: its file must hold keys and values", "got nothing.yaml"]),
    ("train experiment=first.yaml", [
        "3 problems", "_self_ must be the last of its defaults", "got _self_ before debug in first.yaml. Put _self_ "
        "behind debug", "trainer: is a section", "optim.lr?"]),
    # values
    ("train lr=1e-4", ["lr: there is no such setting; got 0.0001", "Did you mean optim.lr?"]),
    ("train trainer.batch_size=6", ["trainer.mini_batch_size: must divide trainer.batch_size", "Use one of"]),
    ("train runtime.num_workers=4", ["runtime.num_workers: must be 1", "Set runtime.backend=ray"]),
    # models
    ("train model.path=empty warm_start.enabled=false", ["model.path: must be a transformers model directory"]),
    ("train model.path=small warm_start.enabled=false", ["model.path: must have an embedding of every token", "is 40"]),
    ("train algo=ppo critic.path=small", ["critic.path: must have an embedding of every token", "vocab_size is 40"]),
    ("train algo=ppo critic.path=other", ["critic.path: must have the policy's tokenizer", "such as '8'"]),
    ("train algo.teacher.path=other", ["algo.teacher.path: must have the policy's tokenizer", "such as '8'"]),
    (" ".join(["train data.template=base", *NO_TOKENIZER]), ["no_tokenizer", "tokenizer", "model.path"]),
    (" ".join(["train data=mapped data.source=rows data.question=q data.answer=a reward.num_processes=1",
               *NO_TOKENIZER]), ["no_tokenizer", "tokenizer", "model.path"]),
    # data
    (" ".join(["train data.source=rows", *MAPPED, "data.question=question"]), ["question", "given more than once"]),
    (" ".join(["train data.source=rows", *MAPPED[:1], "data.question=question", *MAPPED[2:]]), [
        "data.question: must name a column of rows/train.jsonl: line 1 (columns: q, a); got question. Name another"]),
    (" ".join(["train data.source=half", *MAPPED]), ["half", "test"]),
    (" ".join(["train data.source=rows/train.jsonl", *MAPPED]), ["data.source: must be a folder", "rows/train.jsonl"]),
    (" ".join(["train data.source=csv", *MAPPED]), ["csv lacks train and test, as", "Its files: train.csv. Put the"]),
    (" ".join(["train data.source=bare", *MAPPED]), ["bare: the train split has no row"]),
    (" ".join(["train data.source=torn", *MAPPED]), ["torn", "train.jsonl"]),
    (" ".join(["train data.source=leak", *MAPPED]), [
        "leak/test.jsonl: line 1: the same prompt as leak/train.jsonl: line 3", "Remove it from one of the two files"]),
    (" ".join(["train data.source=doubled", *MAPPED]), [
        "doubled/train.jsonl: line 2: the same prompt as doubled/train.jsonl: line 1", "filter.duplicates to drop"]),
    (" ".join(["data make experiment=debug data.source=leak", *MAPPED]), ["leak/test.jsonl: line 1: the same prompt"]),
    (" ".join(["train data.source=gone", *MAPPED]), ["gone"]),
    ("train data.build=mine:build", ["data.build: is a setting of task custom", "add data=custom"]),
    # scorers
    ("train data.scorer=mine", ["data.scorer: must be `module:function`; got mine"]),
    ("train data.scorer=mine:gone", ["data.scorer: must name a function", "no attribute 'gone'"]),
    ("train data.scorer=gone:score", ["No module named 'gone'", "A module is found in the working directory"]),
    ("train data=custom data.build=broken:build", ["data.build: must name a function", "broken.py, line 1"]),
    ("train data=custom data.build=mine:says_one", ["mine:says_one must return data.rows.TaskRows, got str"]),
    ("train data.scorer=broken:score", ["SyntaxError", "broken.py, line 1"]),
    *((f"train data.scorer=mine:{name}", [f"got mine:{name}, which failed on response", why, "docs/data.md"])
      for name, why in (
        ("says_one", "got str"), ("forgets_the_wrong", "on response '0'"), ("raises", "ValueError: no"),
    )),
    # sweeps
    ("sweep seed.yaml", ["seed: a sweep has no such key; got [1,2]", "Did you mean seeds?"]),
    ("sweep typo.yaml", ["grids: a sweep has no such key", "Did you mean grid?"]),
    ("sweep short.yaml", ["lr: there is no such setting; got lr in grid", "Did you mean optim.lr?"]),
    ("sweep mine.yaml", ["this is an experiment's", "Run it by millrace run experiment=mine.yaml"]),
    ("sweep nothing.yaml", ["sweep: its file must hold keys and values; got nothing.yaml", "docs/sweeps.md"]),
    ("eval model --suite nothing.yaml", ["--suite: its file must hold keys and values; got nothing.yaml"]),
    ("eval model --suite gsm9k", ["must name files in conf/suite, or paths; got gsm9k. Did you mean gsm8k?"]),
    ("sweep nope", ["sweep: must be the path of a file, or a name in conf/sweep; got nope"]),
    ("sweep debug_grid seed=3", ["seed and run_id differ from run to run", "Write seeds: [...] instead"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "model").mkdir()
    build_scratch_tokenizer(ScratchModel(), folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    shutil.copytree(folder / "model", folder / "small")
    (folder / "small" / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 40}))
    shutil.copytree(folder / "model", folder / "other")
    tokenizer = json.loads((folder / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["8"], vocabulary["9"] = vocabulary["9"], vocabulary["8"]
    (folder / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("rlcore.models.hub.is_hub_reachable", lambda: False)
    yield
    for name in ("mine", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("line", "reported"), MISTAKES, ids=[line for line, _ in MISTAKES])
@pytest.mark.usefixtures("in_the_folder")
def test_a_mistake_is_reported_before_anything_starts(
    line: str, reported: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *words = line.split()
    if verb == "train" and not any(word.startswith("experiment=") or word in ("debug", "mine.yaml") for word in words):
        words = ["experiment=debug", *words]
    before = set(folder.iterdir())
    code = exit_code(lambda: app([verb, *words, *(["--dry-run"] if verb in ("train", "sweep") else [])]))
    said = capsys.readouterr().err
    is_setting = said.startswith(("data.source: must be a folder", "data.question: must name", "paths.root: must"))
    assert code == 2 if is_setting else code in (1, 2), said
    assert [text for text in reported if text not in said] == [], said
    assert "Traceback" not in said
    assert {path for path in folder.iterdir() if path.name != "__pycache__"} <= before
