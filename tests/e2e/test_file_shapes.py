"""Files in the shapes that people publish, trained for two steps each by the commands of docs/data.md."""

import re
import shlex
from collections.abc import Iterator
from contextlib import chdir, closing
from pathlib import Path

import pytest

from flows.stages.dataset import Dataset, Demonstrations, Filter
from flows.work.open_run import OpenRun
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.run.initial_policy import ensure_tokenizer
from rlcore.run.layout import RunInputs
from rlcore.workers.group import LocalGroup
from tests.flows.conftest import in_this_process, journal
from tests.helpers.file_shapes import DEMONSTRATIONS, PROBLEMS, write_files, write_model
from tests.helpers.small_run import SmallRun, train, warm_start

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line.replace("=MODEL", "=model"))[1:]
    for line in re.findall(r"^millrace train experiment=tried\.yaml .*", PAGE.replace("\\\n", " "), re.MULTILINE)
]
SMALL = ("rollout.max_response_tokens=8", "reward.num_processes=1", "tracking.enabled=false", "warm_start.max_steps=3")
"""Short answers, few processes and few supervised steps, for a machine of two cores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("shapes")
    write_files(found)
    write_model(found / "model")
    (experiment,) = re.findall(r"^```yaml\n(# millrace run experiment=tried\.yaml\n.*?)^```", PAGE, re.MULTILINE | re.S)
    (found / "tried.yaml").write_text(experiment)
    return found


@pytest.fixture
def inside(folder: Path) -> Iterator[Path]:
    with chdir(folder):
        yield folder


def named(words: list[str]) -> str:
    keys = ("data.train_file=", "data.source=", "warm_start.demonstrations=")
    (place,) = [word.partition("=")[2] for word in words if word.startswith(keys)]
    return place.partition("/")[0]


def composed(*words: str) -> RunConfig:
    return load_config([*words, *SMALL])


def test_each_shape_has_a_command() -> None:
    files = {name.partition("/")[0] for name in PROBLEMS} | set(DEMONSTRATIONS)
    assert {named(words) for words in COMMANDS} == files - {"eurus"}
    assert len(COMMANDS) == len(files) - 1


@pytest.mark.parametrize("words", COMMANDS, ids=named)
@pytest.mark.usefixtures("inside")
def test_two_steps_of_each_shape(words: list[str]) -> None:
    config = composed(*words[1:])
    of_run = OpenRun(config)
    dataset, filtered = Dataset().make(of_run), Filter().make(of_run)
    shown = Demonstrations().make(of_run) if config.warm_start.enabled else None
    if shown is None:
        assert dataset.counts == filtered.counts == {"train": 20, "validation": 20}
    else:
        assert shown.counts == {"train": 18, "validation": 2}
    inputs = RunInputs(
        filtered.directory, ensure_tokenizer(config), dataset.directory, shown.directory if shown else None
    )
    run = SmallRun(config, inputs, warm_start(config, inputs).directory)
    with closing(LocalGroup(config, str(run.model_directory))) as group:
        steps = train(run, group, 2)
    assert len(steps) == 2
    assert not any("reward/unscored_share" in step for step in steps), "the scorer fails on no answer"


@pytest.mark.parametrize("name", ["verl_gsm8k", "calls.jsonl", "pairs.jsonl"])
@pytest.mark.usefixtures("inside")
def test_the_whole_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = (words for words in COMMANDS if named(words) == name)
    done = in_this_process(capsys, *words, *SMALL, f"name={name.partition('.')[0]}")
    assert done.code == 0, done.err
    (run_dir,) = Path("artifacts/runs").glob(f"{name.partition('.')[0]}-*")
    assert [record["step"] for record in journal(run_dir)][-1] == 2


@pytest.mark.usefixtures("inside")
def test_programs_and_mathematics_in_one_file_are_refused_unless_a_scorer_is_known_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [f"data.{split}_file=eurus/{name}.parquet" for split, name in (("train", "train"), ("validation", "test"))]
    words = ("train", "experiment=tried.yaml", "model.path=model", "data=parquet", *files, *SMALL)
    done = in_this_process(capsys, *words)
    assert done.code == 1
    assert "data.scorer: must be given for eurus/train.parquet: its rows have the data_source codeforces" in done.err
    done = in_this_process(capsys, *words, "data.scorer=data.gsm8k:score")
    assert done.code == 1
    counts = r"10 of 20 rows of train \(50\.0%\) and 10 of 20 rows of validation \(50\.0%\)"
    assert re.search(rf"data\.gsm8k:score does not for {counts}:\n.*train\.parquet: row 1", done.err)
