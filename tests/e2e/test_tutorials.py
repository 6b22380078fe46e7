"""The tutorials as a new user follows them: all files and commands of a page in order, in an empty folder.

Runs have fewer steps than on the page, and less to learn.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.flows.conftest import REPOSITORY
from tests.helpers.pages import BLOCK
from tests.helpers.stack import Stack

pytestmark = pytest.mark.lengthy  # what each command does has its own tests

DOCS = REPOSITORY / "docs"
LOOKED_UP = "## Your own settings"  # the rest of the first page is for reference, and needs a model, a GPU or a cluster
BRIEF = (
    "runtime=local warm_start.stop_at_reward=null warm_start.max_steps=4 warm_start.batch_size=16 "
    "trainer.total_steps=2 trainer.steps_per_chunk=1 trainer.batch_size=8 trainer.mini_batch_size=8 "
    "validation.every_steps=1"
)
ON_A_CPU = (
    "rollout=hf data.train_size=16 data.validation_size=2 optim.warmup_steps=0 warm_start.optim.warmup_steps=0 "
    "warm_start.max_steps=1 warm_start.steps_per_chunk=1 warm_start.check_every=1 warm_start.batch_size=2 "
    "trainer.total_steps=1 trainer.steps_per_chunk=1 trainer.batch_size=1 trainer.mini_batch_size=1 "
    "trainer.max_tokens_per_micro_batch=1024 rollout.samples_per_prompt=2 rollout.max_response_tokens=8 "
    "validation.every_steps=1 validation.samples_per_problem=1"
)


def steps_of(page: Path) -> Iterator[tuple[str, str]]:
    """The files of a page as (name, text) and its command lines as ("", line), in order, up to `LOOKED_UP`."""
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8").partition(LOOKED_UP)[0]):
        named = re.match(r"# (?:millrace .*[= ])?([\w/]+\.(?:py|yaml))\n", block)
        if named and language in ("python", "yaml"):
            yield named[1], block
        elif language == "":
            lines = block.replace("\\\n", " ").splitlines()
            yield from (("", line) for line in lines if not line.startswith("make "))


def run_line(line: str, folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if line.startswith("prefect"):  # after the line that `up` has printed
        environment |= Stack(folder / "artifacts").environment
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    code = re.search(r"# +exit code (\d+)", line)
    assert done.returncode == (int(code[1]) if code else 0), f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def go_through(page: str, folder: Path, settings: Mapping[str, str], other_words: Mapping[str, str]) -> dict[str, str]:
    """Go through a page. `settings`: beginning of a command -> what the test adds. `other_words`: word -> the test's
    own.
    """
    reported = {}
    for name, text in steps_of(DOCS / page):
        if name:
            for word, own in other_words.items():
                text = text.replace(word, own)
            (folder / name).write_text(text)
            continue
        line, _, comment = text.partition("  #")
        added = next((more for beginning, more in settings.items() if line.startswith(beginning)), "")
        for word, own in other_words.items():
            line = line.replace(word, own)
        reported[text] = run_line(f"{line} {added} # {comment}", folder)
    return reported


def test_a_custom_task_and_reward(tmp_path: Path) -> None:
    smaller = f"{BRIEF} data.train_size=64 data.validation_size=16"
    reported = go_through("tutorials/own-task.md", tmp_path, {"millrace run ": smaller}, {})
    assert "none of the responses that must not score did" in reported["millrace audit sort_digits-s1"]
    assert "copy of the prompt" in reported["millrace audit sort_digits-s1 --scorer by_place:score    # exit code 1"]


def test_the_first_run(tmp_path: Path) -> None:
    other_words = {"--step 100": "--step 2", " --push OWNER/NAME": ""}  # uploads: tests/flows/work/test_weights.py
    reported = go_through("get-started.md", tmp_path, {"millrace run ": BRIEF}, other_words)
    compared = reported["millrace compare countdown_demo-s1 countdown_demo-s2"]
    assert re.search(
        r"Over seeds: countdown_demo: mean reward/mean_at_4 [\d.]+, seeds from [\d.]+ to [\d.]+\.", compared
    ), compared
    assert re.search(r"countdown_demo-s2-\w+ minus countdown_demo-s1-\w+: \S+ \[\S+, \S+\]", compared), compared
    rows = [
        [(problem["prompt_text"], problem["ground_truth_json"]) for problem in json.loads(file.read_text())["problems"]]
        for file in sorted((tmp_path / "artifacts" / "runs").glob("countdown_demo-s*/validation/after.json"))
    ]
    assert len(rows) == 2
    assert rows[0] == rows[1], "seeds have the same held-out problems"
    assert "finished" in reported["millrace runs"]


def test_a_real_model(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "models").symlink_to(smollm2.parent)
    (tmp_path / "few.yaml").write_text((REPOSITORY / "conf/suite/countdown.yaml").read_text().replace("1024", "2"))
    settings = {"millrace run ": ON_A_CPU, "millrace eval ": "rollout.engine=hf rollout.max_response_tokens=8"}
    reported = go_through("tutorials/real-model.md", tmp_path, settings, {"--suite countdown": "--suite few.yaml"})
    assert "finished" not in reported["millrace run experiment=smollm2_countdown --dry-run"]
