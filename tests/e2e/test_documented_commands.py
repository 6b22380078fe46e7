"""Commands in README, docs, conf/ and help texts are parsed, composed and planned."""

import ast
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM

from data import countdown_problems
from data.records import commit_of
from flows.cli import EXIT_WRONG_SETTINGS, app, exit_code
from rlcore import sandbox
from rlcore.config import CountdownData
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import run_id
from rlcore.config.sweep import load_sweep, multirun_content
from tests.helpers.file_shapes import write_files, write_tokenizer
from tests.helpers.hub_server import Repository, serving, use_hub
from tests.helpers.pages import BLOCK
from tests.models.tiny import CONFIGS

REPOSITORY = Path(__file__).parents[2]
PAGES = (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"))
# The changelog says what was.
PAGES_NOW = sorted(page for page in PAGES if page.name != "CHANGELOG.md")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)?(?:\.venv/bin/)?((?:millrace|make|prefect|python -m)(?: .*)?)")
# What stands for something of the reader's own, and what a test has in its place.
STANDS_FOR = {
    "/path/to/a/transformers/directory": "model",
    "/path/to/folder": "rows",
    "=MODEL": "=model",
    "=GSM8K": "=rows",
    "data.source=gsm8k ": "data.source=rows ",
    "model.path=...": "model.path=model",
    "experiment=<path>": "experiment=mine.yaml",
    "<run id>": "some-run",
    " ...": "",
}
WRONG_ON_PURPOSE = "trainer.totl_steps"


@cache
def whole_command() -> Any:
    return typer.main.get_command(app)


def commands_of(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for language, block in BLOCK.findall(text):
        if language == "":
            yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        yield " ".join(span.split())


def examples_of(command: Any) -> Iterator[str]:
    yield from (command.epilog or "").splitlines()
    for one in getattr(command, "commands", {}).values():
        yield from examples_of(one)


def documented(program: str) -> list[str]:
    first_lines = (
        file.read_text().splitlines()[0].lstrip("# ") for file in sorted(REPOSITORY.glob("conf/experiment/*.yaml"))
    )
    pages = (line for page in PAGES_NOW for line in commands_of(page))
    lines = (*pages, *first_lines, *examples_of(whole_command()))
    found = (match[1] for line in lines if (match := COMMAND.fullmatch(line.strip())))
    plain = (" ".join(re.sub(r" #.*| --dry-run", "", line).split()) for line in found)
    return list(dict.fromkeys(line for line in plain if line.split()[0] == program))


def words_of(line: str) -> list[str]:
    for name, own in STANDS_FOR.items():
        line = line.replace(name, own)
    return shlex.split(line)[1:]


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    command = whole_command()
    left = list(words)
    while children := getattr(command, "commands", {}):
        command = children[left.pop(0)]
    return command.name, command.make_context(command.name, left).params


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES_NOW:
        for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            first = block.partition("\n")[0]
            if language in ("python", "yaml") and (name := re.fullmatch(r"# .*?([\w/]+\.(?:py|yaml))", first)):
                (folder / name[1]).parent.mkdir(exist_ok=True)
                (folder / name[1]).write_text(block)
            elif first.startswith("# millrace sweep"):
                (folder / "my_sweep.yaml").write_text(block)
    shutil.copy(REPOSITORY / "data" / "sort_digits.py", folder / "my_task.py")
    config = CONFIGS["qwen2-tied"]()
    config.max_position_embeddings, config.hidden_size = 4_096, 128  # heads of 32, which vLLM knows
    config.vocab_size, config.eos_token_id = write_tokenizer(folder / "model"), None  # the tokenizer's
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    write_files(folder)
    (folder / "problems").mkdir()
    (folder / "rows").mkdir()
    for split in ("train", "test"):
        problem = {"question": f"Print 1, {split}.", "tests": [{"stdin": "", "stdout": "1"}], "solution": "print(1)"}
        (folder / "problems" / f"{split}.jsonl").write_text(json.dumps(problem))
        row = {"q": f"What is 12 * 12, {split}?", "a": "144", "question": f"{split}?", "answer": "#### 144"}
        (folder / "rows" / f"{split}.jsonl").write_text(json.dumps(row))
    talk = {"messages": [{"role": "user", "content": "Is 4 even?"}, {"role": "assistant", "content": "Yes."}]}
    (folder / "talks.jsonl").write_text(json.dumps(talk))
    return folder


@pytest.fixture(scope="module", autouse=True)
def problems_counted_once() -> Iterator[None]:
    """Require enough problems of a space only once, because counting is slow and many commands need it."""
    require, enough = countdown_problems.require_enough, set()

    def require_once(settings: CountdownData, seed: int) -> None:
        key = (settings.model_dump_json(), seed)
        if key not in enough:
            require(settings, seed)
        enough.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown_problems, "require_enough", require_once)
        yield


@pytest.fixture
def as_a_reader(readers_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(readers_folder)
    monkeypatch.syspath_prepend(str(readers_folder))
    modules = set(sys.modules)
    commit_of.cache_clear()
    with serving({"datasets/openai/gsm8k": Repository({"a" * 40: {}}, {"main": "a" * 40})}) as hub:
        use_hub(monkeypatch, tmp_path, hub.port)
        yield
    commit_of.cache_clear()
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("my_task", "my_reward", "my_lab", "count_on", "my_tools", "sums"):
            del sys.modules[name]


@pytest.mark.parametrize("line", documented("millrace"))
@pytest.mark.usefixtures("as_a_reader")
def test_a_documented_command_is_understood_and_can_be_planned(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(line)
    if words in ([], ["--help"], ["--version"], ["--install-completion"]):
        return
    name, given = parsed(words)
    if name == "sweep":
        load_sweep(given["spec"], given["overrides"] or ())
        return
    settings = given.get("settings")
    if not settings:
        return
    if given.get("multirun"):
        assert multirun_content(settings)
        return
    is_asked = "reward.judge.url" in line or "episode.server=" in line
    if is_asked or ("data=verifiers" in line and find_spec("verifiers") is None):  # what the reader serves or installs
        load_config(settings)
        return
    if "data=code" in settings and sandbox._missing_requirement():  # a machine without bubblewrap refuses it
        settings = [*settings, "sandbox.allow_weak=true"]
    code = exit_code(lambda: app(["train", *settings, "--dry-run"]))
    reported = capsys.readouterr().err
    if WRONG_ON_PURPOSE in line:
        assert code == EXIT_WRONG_SETTINGS
        assert "Did you mean trainer.total_steps?" in reported
    else:
        assert code == 0, reported
        assert "has no effect" not in reported


def test_every_target_of_make_is_there() -> None:
    makefiles = (REPOSITORY / "Makefile", REPOSITORY / "flows/commands/templates/project/Makefile")
    targets = {name for file in makefiles for name in re.findall(r"^([a-z-]+):", file.read_text(), re.MULTILINE)}
    asked = {words_of(line)[0] for line in documented("make") if words_of(line)}
    assert asked >= {"demo", "test", "check"}
    assert asked <= targets


def test_millrace_is_never_installed_by_its_name() -> None:
    """Millrace is on no registry (decision 16), so a package of that name there would be a stranger's."""
    files = [
        path for folder in ("flows", "data", "rlcore", "docs") for path in (REPOSITORY / folder).rglob("*.[pm][yd]")
    ]
    assert len(files) > 100
    assert [str(path) for path in files if "'millrace[" in path.read_text(encoding="utf-8")] == []


def test_every_module_that_is_started_by_name_is_there() -> None:
    asked = {words_of(line)[1] for line in documented("python")}
    assert [name for name in asked if find_spec(name) is None] == []


def test_every_named_deployment_exists_and_takes_the_settings() -> None:
    by_name = {}
    for one in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]:
        file, _, variable = one["entrypoint"].partition(":")
        flow = getattr(import_module(file.removesuffix(".py").replace("/", ".")), variable)
        by_name[f"{flow.name}/{one['name']}"] = one
    own = {f"pipeline/{Path(words_of(line)[1]).stem}" for line in documented("millrace") if " deploy " in line}
    for line in documented("prefect"):
        if own & set(words := words_of(line)):
            continue
        for name in (word for word in words if re.fullmatch(r"[a-z-]+/[a-z-]+", word)):
            assert name in by_name, line
            for override in (word.removeprefix("overrides=") for word in words if word.startswith("overrides=")):
                load_config(json.loads(override), experiment=by_name[name]["parameters"]["experiment"])


def test_run_ids_in_pages_are_those_of_the_demo() -> None:
    name = run_id(load_config(["experiment=countdown_demo"]))
    pages = [page.read_text(encoding="utf-8") for page in PAGES_NOW]
    found = [shown for page in pages for shown in re.findall(r"countdown_demo-s1-[0-9a-f]{8}", page)]
    assert set(found) == {name}


def test_every_setting_of_the_comparison_with_verl_and_trl_exists() -> None:
    docs = REPOSITORY / "docs"
    known = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", (docs / "settings.md").read_text(encoding="utf-8"), re.MULTILINE))
    sections = {key[: match.start()] for key in known for match in re.finditer(r"\.", key)}
    page = (docs / "from-verl-and-trl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `[^|]*\|([^|]*)\|[^|]*\|$", page, re.MULTILINE)
    named = [
        word.partition("=")[0] for cell in rows for span in re.findall(r"`([^`]+)`", cell) for word in span.split()
    ]
    assert len(named) > 60
    assert [name for name in named if name not in known | sections] == []


@pytest.mark.parametrize("file", sorted((REPOSITORY / "rlcore/algos").glob("[!_]*.py")), ids=lambda file: file.stem)
def test_the_algorithms_page_names_every_public_function(file: Path) -> None:
    page = (REPOSITORY / "docs/algorithms.md").read_text()
    tree = ast.parse(file.read_text())
    public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert public
    assert [name for name in public if f"`{name}`" not in page and f"`{file.stem}.{name}`" not in page] == []
