"""The command line: mistakes are reported immediately, a dry run writes nothing, every command explains itself."""

import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml

from flows.cli import app, exit_code, extend_module_path
from flows.commands import options, rollouts, runs
from flows.commands.settings import root_in_overrides
from flows.work.runs import STATES
from rlcore.config import RunConfig
from rlcore.config.base import CONFIG_DIR_VARIABLE, GROUPS
from rlcore.config.compose import load_config
from rlcore.config.problems import override_value
from rlcore.config.run import all_keys
from rlcore.responses import query
from rlcore.storage.publish import write_text_atomically
from tests.flows.conftest import REPOSITORY, in_this_process
from tests.helpers.file_shapes import write_model
from tests.helpers.hub_server import HUB_ID, Repository, serving


@pytest.mark.parametrize(
    ("words", "code"), [(["run", "experiment=countdown_demo", "trainer.totl_steps=5"], 2), (["runs", "--root={}"], 0)]
)
def test_settings_and_runs_are_read_without_heavy_imports(tmp_path, words, code):
    script = (
        "import sys\nfrom flows.cli import app, exit_code\n"
        f"assert exit_code(lambda: app({[word.format(tmp_path) for word in words]})) == {code}\n"
        "heavy = {'torch', 'transformers', 'ray', 'prefect', 'mlflow', 'matplotlib', 'datasets', 'vllm'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_project(capsys):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert in_this_process(capsys, "--version").out == f"millrace {project['version']}\n"
    shown = in_this_process(capsys)  # the help of the group
    assert (shown.code, "Look at results:" in shown.out) == (0, True)


def test_a_dry_run_or_too_small_a_disk_writes_nothing(artifacts_root, capsys):
    words = ("experiment=debug", f"paths.root={artifacts_root}", "--dry-run")
    done = in_this_process(capsys, "run", *words, code=0)
    for stage in ("dataset", "filter", "warm-start", "train", "validate", "report"):
        assert stage in done.out
    assert "0 of 2 done" in done.out
    assert done.err == "", "no setting without effect was given"
    (held,) = [line.split()[1:] for line in done.out.splitlines() if line.startswith("sum ")]
    assert min(map(float, held)) > 0, "a tiny model is shown in a unit that it fills"
    done = in_this_process(capsys, "train", *words, "--json", "algo.importance.cap=3")
    assert done.err == (
        "warning: algo.importance.cap=3.0: has no effect with algo.importance.mode=off. Set "
        "algo.importance.mode=truncate or mask, or leave it out\n"
    )
    assert json.loads(done.out)["stages"][0]["name"] == "dataset"
    assert list(artifacts_root.iterdir()) == []
    done = in_this_process(capsys, "run", *words[:2], "checkpoint.reserve_gb=1e9")
    assert (done.code, "GB are missing" in done.err, "checkpoint.reserve_gb" in done.err) == (75, True, True), done
    assert list(artifacts_root.iterdir()) == []


def test_hub_without_login_causes_no_lines(tmp_path):
    files = {file.name: file.read_bytes() for file in write_model(tmp_path / "model").iterdir()}
    with serving({HUB_ID: Repository({"a" * 40: files}, {"main": "a" * 40})}) as hub:
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        words = ("experiment=debug", f"model.path={HUB_ID}", "data.train_size=20", f"paths.root={tmp_path}")
        command = [sys.executable, "-m", "flows.cli", "data", "make", *words]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert hub.asked


@pytest.mark.parametrize("verb", ["runs", "slots", "slots --set 2", "up", "sync", "down"])
def test_a_root_that_is_no_folder_is_refused(capsys, tmp_path, verb):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, what in (("file", "file"), ("file/below", "file"), ("loop", "loop")):
        for given in (f"--root={tmp_path / name}", f"paths.root={tmp_path / name}"):
            done = in_this_process(capsys, *verb.split(), given)
            assert (done.code, f"must be a folder, and {tmp_path / what} is none" in done.text) == (2, True), done
    for given in (["--root="], ["--root", ""], ["paths.root="]):
        done = in_this_process(capsys, *verb.split(), *given)
        assert (done.code, "--root: must not be empty" in done.text) == (2, True), done


def test_any_name_of_a_root_is_read(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves ~ as it is behind an =
    for given in ("--root=~/mine", "paths.root=~/mine"):
        assert str(tmp_path / "mine" / "runs") in in_this_process(capsys, "runs", given).text
    assert load_config(["paths.root='~/mine'"], experiment="debug").paths.root == str(tmp_path / "mine")
    for root in ("/data/jürgen", "my runs", "/a(b),c=d", "it's \\ odd", "ends in \\", "null", "1e3", "/plain/path-1.0"):
        word = f"paths.root={override_value(root)}"
        assert load_config([word], experiment="debug").paths.root == root
        assert root_in_overrides([word]) == Path(root)


@pytest.mark.parametrize("verb", ["run", "train", "validate", "sweep", "data make", "report", "checkpoints"])
def test_settings_given_as_options_are_reported_with_their_keys(capsys, verb):
    words = (*verb.split(), "experiment=debug", "--lr", "1e-4", "--total-steps=5", "--experiment")
    done, meant = in_this_process(capsys, *words), ["optim.lr=1e-4?", "trainer.total_steps=5?", "experiment=VALUE?"]
    assert (done.code, [line.partition("Did you mean ")[2] for line in done.text.splitlines()[1:]]) == (2, meant)


def test_a_folder_in_the_place_of_a_file_is_reported(tmp_path, capsys):
    assert exit_code(lambda: write_text_atomically(tmp_path, "a page")) == 1
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory\n"


@pytest.mark.parametrize("given", ["--root={}", "paths.root={}"])
def test_every_command_takes_the_root_as_option_or_setting(capsys, tmp_path, given):
    root, where = str(tmp_path / "there"), given.format(tmp_path / "there")
    for line, code in (
        ("run experiment=debug --dry-run", 0), ("sweep debug_grid --dry-run", 0), ("down", 0), ("status", 1), ("ui", 2),
        ("report absent", 2), ("checkpoints absent", 2), ("compare absent", 2), ("sync absent", 2),
        ("report experiment=debug", 2),
    ):  # fmt: skip
        done = in_this_process(capsys, *line.split(), where)
        assert (done.code, root in done.text) == (code, True), done


@pytest.mark.parametrize(
    ("redirected", "code", "words"),
    [("", 0, r"a\xfc/runs"), (">&-", 0, ""), ("2>&-", 0, r"a\xfc/runs"), (">/dev/full", 1, "No space")],
)
def test_an_unusable_output_gives_no_traceback(tmp_path, redirected, code, words):
    command = f'"$0" -m flows.cli run experiment=debug --dry-run --root "$1" {redirected}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, str(tmp_path / "a\xfc")],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done
    assert "Traceback" not in done.stderr


def test_an_unusable_working_folder_is_reported(capsys, tmp_path, monkeypatch):
    for name, said, code in (
        ("a\udcff", "must be UTF-8 text", 2),
        ("gone", "is deleted. Change to an existing one", 1),
    ):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "gone":
            (tmp_path / name).rmdir()
            extend_module_path()
        done = in_this_process(capsys, "slots")
        assert (done.code, said in done.text) == (code, True), done
    monkeypatch.chdir(tmp_path)
    assert in_this_process(capsys, "slots").code == 0, "without arguments"


def test_the_composed_settings_are_printed(capsys):
    def print_settings(line: str, code: int = 0) -> str:
        return in_this_process(capsys, *line.split(), code=code).text

    printed = print_settings("run experiment=debug algo=rloo seed=3 --cfg job")
    assert RunConfig.model_validate(yaml.safe_load(printed)) == load_config(["experiment=debug", "algo=rloo", "seed=3"])
    info = print_settings("train experiment=debug algo=rloo seed=3 --info")
    lines = dict(line.split(maxsplit=1) for line in info.splitlines())
    assert (lines["experiment"], lines["overrides"]) == ("experiment/debug.yaml", "experiment=debug algo=rloo seed=3")
    assert {"data=countdown", "algo=rloo"} <= set(lines["groups"].split())
    sources = [line.split()[1:] for line in info.splitlines() if line.startswith("value ")]
    assert ["algo.advantage=rloo", "algo=rloo"] in sources
    assert ["trainer.total_steps=2", "experiment/debug.yaml"] in sources
    assert [value for value, source in sources if source == "override"] == ["seed=3"]
    assert "optim.weight_decay" not in info, "only values that are not the default"
    said = print_settings("run experiment=debug algo=dapo algo.overlong.buffer_tokens=9 --cfg job -p algo.overlong", 2)
    printed, _, problem = said.partition("algo.overlong.buffer_tokens: must be at most rollout.max_response_tokens")
    assert (yaml.safe_load(printed)["buffer_tokens"], problem[:1]) == (9, ";")
    printed = print_settings("run experiment=debug -c job --resolve -p optim optim.lr=0.5")
    assert (printed.partition("\n")[0], yaml.safe_load(printed)["lr"]) == ("# @package optim", 0.5)
    for words, value in (
        ("trainer.total_steps", "2\n"), ("critic", "null\n"),
        ("data.operations", "# @package data.operations\n- +\n"),
        ("reward.weights.correct reward.weights={correct:0.5} reward.num_processes=1", "0.5\n"),
    ):  # fmt: skip
        assert print_settings(f"run experiment=debug data.operations=[+] --cfg job -p {words}") == value
    said = print_settings("run experiment=debug optim.lr=x --cfg job -p trainer.total_steps", 2)
    assert said.startswith("2\noptim.lr: must be"), "nothing about values that are not printed"
    said = print_settings("run experiment=debug optim.lr=x --cfg job -p optim.lr", 2)
    assert said.startswith("# A value of the wrong type or range is replaced by its default. The problems follow.\n")
    other_task = print_settings("run experiment=debug data=gsm8k data.source=gone --info", 2)
    assert "value      data.template=chat  data=gsm8k" in other_task, "not from the experiment's file"
    sources = print_settings("run --info defaults experiment=debug")
    assert sources.startswith("experiment experiment/debug.yaml\ngroups     data=countdown model=scratch")
    whole = print_settings("run --info experiment=debug")
    assert whole.startswith("run        debug-s1-")
    wrong = print_settings("run --info experiment=debug trainer.batch_size=6", 2).splitlines()
    assert wrong[:3] == whole.splitlines()[1:4], "the sources, without a run"
    assert wrong[3] == "overrides  experiment=debug trainer.batch_size=6"
    rest = [line.partition(":")[0] for line in wrong[4:] if not line.startswith("value ")]
    assert rest == ["trainer.mini_batch_size"]
    assert print_settings("run --info experiment=debgu", 2).startswith("experiment: must name a file in")


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("bash", {"COMP_WORDS": "millrace sto", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "millrace sto"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "millrace sto", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_a_shell_completes_commands(shell, asked, monkeypatch, capsys):
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_MILLRACE_COMPLETE", f"complete_{shell}")
    with pytest.raises(SystemExit):
        app(prog_name="millrace")
    found = capsys.readouterr().out
    assert ("stop" in found, "status" in found) == (True, False)


COMPLETE = """
import json, os, sys
from flows.cli import app
for words in json.loads(sys.argv[1]):
    os.environ |= {"COMP_WORDS": " ".join(["millrace", *words]), "COMP_CWORD": str(len(words))}
    try:
        app(prog_name="millrace")
    except SystemExit:
        print("---")
print(sorted({"torch", "hydra", "mlflow", "rich", "psutil", "rlcore.config"} & set(sys.modules)))
"""


def test_tab_completes_words_without_heavy_imports(tmp_path):
    for run_id in ("debug-s1-aa", "debug-s2-bb", "mine-s1-cc"):
        (tmp_path / "other" / "runs" / run_id).mkdir(parents=True)
        (tmp_path / "other" / "runs" / run_id / "run.json").touch()
    (tmp_path / "artifacts" / "runs").mkdir(parents=True)
    (tmp_path / "other" / "runs" / "debug-s1-aa").rename(tmp_path / "artifacts" / "runs" / "debug-s1-aa")
    expected: dict[tuple[str, ...], list[str]] = {
        ("sto",): ["stop"],
        ("run", "trainer.tot"): ["trainer.total_steps="],
        ("run", "experiment", "=", "debu"): ["debug"],  # bash cuts at =
        ("train", "algo=dap"): ["algo=dapo"],  # other shells do not
        ("train", "rollout.engine", "="): ["hf", "none", "vllm"],
        ("run", "algo.policy_loss=gm"): ["algo.policy_loss=gmpo"],
        ("run", "--cfg", "j"): ["job"],
        ("stop", "deb"): ["debug-s1-aa"],
        ("logs", "--root", "other", "deb"): ["debug-s2-bb"],
        ("report", "optim.l"): ["optim.lr="],
        ("run", "++optim.l"): ["++optim.lr="],
        ("run", "++algo.policy_loss=gm"): ["++algo.policy_loss=gmpo"],
        ("run", "~optim.l"): ["~optim.lr"],
        ("eval", "--suite", "gs"): ["gsm8k"],
        ("rollouts", "--kind", ""): ["all", "training", "validation"],
        ("rollouts", "--sort", "s"): ["step", "score"],
        ("new", "s"): ["scorer", "suite", "sweep", "slurm"],
        ("new", "los"): ["loss"],
        ("run", "--totl", "x", "optim.l"): ["optim.lr="],  # and refuses nothing
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE, json.dumps([("data", "make", "sandbox."), *expected])],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "_MILLRACE_COMPLETE": "complete_bash"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    sandboxes, *found, imported = done.stdout.split("---\n")
    assert imported == "[]\n", done.stderr
    assert sandboxes
    assert dict(zip(expected, map(str.splitlines, found), strict=True)) == expected


def test_tab_completes_every_setting_group_and_sort_key():
    assert rollouts.SORTS == query.SORTS
    assert get_args(get_args(rollouts.Kind)[0]) == query.KINDS
    assert runs.STATES == STATES
    assert options.OWN_CONF == CONFIG_DIR_VARIABLE
    assert options._values_by_key().keys() == all_keys().keys()
    assert set(options._groups()) == {*GROUPS, "experiment"}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("millrace run exper", "millrace run experiment="),
        ("millrace run experiment=deb", "millrace run experiment=debug "),
        ("millrace run algo.aggregation=token", "millrace run algo.aggregation=token-mean "),
        ("millrace runs --state fai", "millrace runs --state failed "),
    ],
)
def test_bash_completes_without_a_space_after_an_equals_sign(tmp_path, monkeypatch, capsys, typed, completed):
    """The line and a tab are typed into a new interactive bash."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit):
        app(["--show-completion", "bash"], prog_name="millrace")
    (tmp_path / "complete.sh").write_text(capsys.readouterr().out)
    code = f"import sys; sys.path.append({str(REPOSITORY)!r}); from flows.cli import app; app(prog_name='millrace')"
    (tmp_path / "millrace").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    (tmp_path / "millrace").chmod(0o755)

    def read_until(end: bytes) -> str:
        text = b""
        while end not in text:
            text += os.read(terminal, 4096)
        return text.partition(end)[0].decode()

    shell = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PS1": "ready> ", "INPUTRC": "/dev/null", "TERM": "dumb"}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], os.environ | shell)
    try:
        os.write(terminal, b"source complete.sh; echo be''gin\n")
        read_until(b"begin\r\nready> ")
        os.write(terminal, f"{typed}\t|end".encode())
        assert read_until(b"|end") == completed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("stop", "RUN: is missing; got stop. millrace stop --help describes the arguments and options"),
        ("runs --stat failed", "millrace runs: no such option; got --stat. Did you mean --state?"),
        ("up --workers x", "--workers: must be a valid integer"),
        ("status x", "millrace status: got unexpected extra argument"),
        ("runs --root", "--root: must not be empty"),
        ("run --info plugins", "--info / -i: must be one of all, defaults, searchpath; got plugins. --cfg job"),
        ("run --resolve", "millrace run: no such option; got --resolve. Write millrace run KEY=VALUE ... --cfg"),
        ("run -cn mine", "millrace run: no such option; got -cn. Name your file by experiment=NAME"),
        ("run experiment=debug --root=one paths.root=two --dry-run", "paths.root: is given more than once"),
        ("report experiment=debgu", "experiment: must name a file in conf/experiment"),
        ("data make experiment=debgu", "experiment: must name a file in conf/experiment"),
        ("train experiment=debug --json", "--json: goes with --dry-run alone; nothing was started"),
        ("sweep debug_grid trainer.total_steps=2 --json", "--json: goes with --dry-run alone; nothing was started"),
        ("runs --state gone", "--state: must be one of running"),
        ("run -p algo experiment=debug", "--package: goes with --cfg job alone; got algo"),
        ("run experiment=debug -c job -p agol", "--package: must be a key of these settings; got agol. Did you mean a"),
        ("run experiment=debug -c job -p optim.rl", "--package: must be a key of these settings; got optim.rl. Did"),
        ("run experiment=debug -c job -p seed.x", "--package: must be a key of these settings; got seed.x. Did you"),
    ],
)
def test_every_mistake_in_the_arguments_has_one_form(capsys, words, message):
    done = in_this_process(capsys, *words.split())
    assert (done.code, done.text.count("\n")) == (2, 1)
    assert done.text.startswith(message), done


@pytest.mark.parametrize("words", ["run --dry-run", "run", "validate --checkpoint start"])
def test_a_missing_package_is_a_wrong_setting(capsys, artifacts_root, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say that there is none
    done = in_this_process(capsys, *words.split(), "experiment=debug", "rollout=vllm", f"paths.root={artifacts_root}")
    assert (done.code, "rollout.engine: vllm is not installed here. In the" in done.err) == (2, True), done
    assert list(artifacts_root.iterdir()) == []


def test_an_own_experiment_extends_another_own_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_DIR_VARIABLE, "conf")  # relative
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    (own / "first.yaml").write_text("defaults: [debug, _self_]\nname: first\noptim: {lr: 0.5}\n")
    (own / "second.yaml").write_text("defaults: [first, _self_]\nname: second\n")
    (own / "third.yaml").write_text("defaults: [second.yaml, _self_]\nname: third\n")
    done = in_this_process(capsys, "run", "experiment=third", "--cfg", "job", code=0)
    assert (yaml.safe_load(done.out)["name"], yaml.safe_load(done.out)["optim"]["lr"]) == ("third", 0.5)
    monkeypatch.setenv(CONFIG_DIR_VARIABLE, "absent")
    done = in_this_process(capsys, "run", "experiment=third", "--cfg", "job")
    assert (done.code, "MILLRACE_CONFIG_DIR: must be an existing folder; got absent" in done.text) == (2, True)


def test_demo_names_the_next_commands(tmp_path):
    (tmp_path / "millrace").symlink_to("/bin/true")
    words = ["make", "-s", "-o", ".venv/.installed", "demo", f"BIN={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    commands = (
        "rollouts countdown_demo-s1",
        "run experiment=countdown_demo seed=2",
        "compare countdown_demo-s1 countdown_demo-s2",
    )
    expected = [f"{tmp_path}/millrace {command}" for command in commands]
    assert [" ".join(words[words.index(f"{tmp_path}/millrace") :]) for words in lines] == expected
