"""Tasksets of the package verifiers: rows, scores equal to the package's, and tasksets that need a harness."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import verifiers
from data.verifiers import build, inputs, score
from rlcore.config import RewardConfig
from rlcore.config.data import VerifiersData
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.environment import await_value
from rlcore.rollout.scoring import ScoringPool
from tests.data.openenv_servers import block_of_the_page

ODD = """
import verifiers.v1 as vf

class Plain(vf.Task[vf.TaskData]):
    @vf.reward
    async def full(self, trace) -> float: return 1.0
class Unrewarded(vf.Task[vf.TaskData]): pass
class Contained(Plain): NEEDS_CONTAINER = True
class Prepared(Plain):
    async def setup(self, trace, runtime): pass
class Running(Plain):
    @vf.metric
    async def files(self, trace, runtime) -> float: return 1.0
class WithTools(Plain):
    @classmethod
    def toolsets(cls, config): return []
class Named(vf.Env[vf.EnvConfig]):
    async def run(self, task, agents): pass

def tasks(kind, **data):
    class Tasks(vf.Taskset[kind, vf.TasksetConfig]):
        def load(self): yield kind(vf.TaskData(**data), self.config.task)
    return Tasks
Fine = tasks(Plain, prompt=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}])
NoReward, Box, Setup, Runs, Tools = (tasks(kind, prompt="Hi") for kind in
    (Unrewarded, Contained, Prepared, Running, WithTools))
Silent = tasks(Plain)
Seen = tasks(Plain, prompt=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
"""


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "PACKAGE", "verifiers_that_is_not_there")
    with pytest.raises(ConfigError, match=r"must be installed, and is not\. .* pip install -e '\.\[verifiers\]'"):
        inputs(VerifiersData(taskset="sums:Sums"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for imports with the taskset of the documentation and odd ones."""
    pytest.importorskip("verifiers", reason="needs the package verifiers: pip install -e '.[verifiers]'")
    (tmp_path / "sums.py").write_text(block_of_the_page("sums.py"))
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "paired.py").write_text(f"{ODD}\n__all__ = ['Fine', 'Named']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    verifiers._taskset.cache_clear()
    yield tmp_path
    for name in ("sums", "odd", "paired"):
        sys.modules.pop(name, None)


def test_rows_of_a_seed_have_separate_splits(folder: Path) -> None:
    settings = VerifiersData(taskset="sums:Sums", taskset_options={"highest": 3}, train_size=100, validation_size=4)
    found = {split: list(rows) for split, rows in build(settings, 1).splits.items()}
    prompts = {split: [row.prompt[0].content for row in rows] for split, rows in found.items()}
    assert sorted(prompts["validation"] + prompts["train"]) == [f"{a} + {b} =" for a in range(4) for b in range(4)]
    assert len(prompts["validation"]) == 4
    assert found == {split: list(rows) for split, rows in build(settings, 1).splits.items()}
    assert found != {split: list(rows) for split, rows in build(settings, 2).splits.items()}
    apart = settings.model_copy(update={"validation_options": {"highest": 1}})
    assert {len(row.prompt[0].content) for row in build(apart, 1).splits["validation"]} == {7}
    assert len(list(build(apart, 1).splits["train"])) == 16
    assert len(inputs(settings)) == 2
    before = inputs(settings)
    (folder / "sums.py").write_text(block_of_the_page("sums.py") + "\n")
    assert inputs(settings) != before


def test_scores_are_those_of_the_package(folder: Path) -> None:
    """The naive twin: a trace that the package's own graph builds from the conversation, and the formula."""
    from sums import Sums, SumsConfig
    from verifiers import v1
    from verifiers.v1 import graph

    settings = VerifiersData(taskset="sums:Sums", taskset_options={"highest": 2}, validation_size=1)
    rows = {row.prompt[0].content: row for row in build(settings, 1).splits["train"]}
    responses = ["3", " 3 ", "4", "three", "", "0" * 50]
    asked, expected = [], []
    for task in Sums(SumsConfig(highest=2)):
        if task.data.prompt not in rows:
            continue
        for response in responses:
            trace = v1.Trace(
                task=v1.TraceTask(type="SumTask", data=task.data), agent=v1.AgentInfo(config=v1.AgentConfig())
            )
            said = v1.AssistantMessage(content=response)
            turn = graph.prepare_turn(trace, [v1.UserMessage(content=task.data.prompt)])
            turn.commit(v1.Response(id="1", created=0, model="m", message=said, finish_reason="stop"))
            await_value(task.score(trace))
            text = response.strip()
            formula = float(text == str(task.data.total)) + 0.1 * text.isdecimal()
            assert trace.reward == pytest.approx(formula)
            parts = {name: reward.score for name, reward in trace.rewards.items()} | trace.metrics
            expected.append((trace.reward, parts))
            asked.append((response, rows[task.data.prompt].ground_truth))
    assert len(expected) == 8 * len(responses)
    assert [(found.total, found.parts) for found in (score(*one) for one in asked)] == expected
    with ScoringPool("data.verifiers:score", RewardConfig(num_processes=1, deadline_s=60)) as pool:
        found = pool.score([response for response, _ in asked], [json.dumps(truth) for _, truth in asked])
    assert [(one.total, one.parts) for one in found] == expected


@pytest.mark.parametrize(("taskset", "message"), [
    ("odd:NoReward", "needs a reward, and has none"), ("odd:Box", "needs a container"),
    ("odd:Setup", "needs a harness for its method setup"), ("odd:Tools", "needs a harness for its method toolsets"),
    ("odd:Runs", "needs a runtime for files"), ("odd:Silent", "needs a user who begins task 0"),
    ("odd:Seen", "needs more than text in the prompt of task 0"), ("paired:Fine", "needs Named of its package"),
    ("odd:Plain", "TypeError: odd:Plain is no subclass of verifiers.v1.Taskset"), ("odd:Nothing", "AttributeError"),
    ("nothing:Nothing", "ModuleNotFoundError"),
])  # fmt: skip
def test_taskset_that_needs_more_is_refused(folder: Path, taskset: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.taskset: must .*{message}"):
        list(build(VerifiersData(taskset=taskset), 1).splits["validation"])


def test_wrong_option_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r'must name a taskset .* with {"lowest": 1} \(ValidationError'):
        inputs(VerifiersData(taskset="sums:Sums", taskset_options={"lowest": 1}))


def test_conversation_of_a_prompt_is_kept(folder: Path) -> None:
    (row,) = build(VerifiersData(taskset="odd:Fine"), 1).splits["validation"]
    assert [(message.role, message.content) for message in row.prompt] == [("user", "Hi"), ("assistant", "Well,")]
    assert score("what", row.ground_truth).total == 1
