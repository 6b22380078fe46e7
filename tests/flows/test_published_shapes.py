"""The commands of docs/data.md for published shapes read every row of a small file and train two steps on it."""

import math
import shlex
from pathlib import Path

import pytest

from data.schema import open_parquet
from flows.work import stages
from rlcore.config.compose import load_config
from rlcore.runtime.local import LocalGroup
from tests.published_shapes import NUM_ROWS, write_chat_model, write_shapes
from tests.small_run import SmallRun, train, warm_start

SMALL = (
    "model.path=model", "model.compile=false", "model.share_prompts=false", "filter.max_prompt_tokens=400",
    "rollout=hf", "optim.warmup_steps=0", "warm_start.optim.warmup_steps=0",
    "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "rollout.max_num_seqs=64", "runtime=local",
    "runtime.device=cpu", "reward.num_processes=1", "pass_rates.samples=0", "pass_rates.draw=uniform",
    "trainer.total_steps=2", "trainer.steps_per_chunk=2", "trainer.batch_size=4", "trainer.mini_batch_size=4",
    "trainer.max_tokens_per_micro_batch=2048", "warm_start.max_steps=2", "warm_start.batch_size=2",
    "warm_start.max_tokens=400", "paths.root=root",
)  # fmt: skip
_, _, SECTION = (Path(__file__).parents[2] / "docs" / "data.md").read_text().partition("### Published shapes")
SHAPES = (
    "verl/",
    "dapo-math-17k",
    "source=chats",
    "source=sheet",
    "sharegpt",
    "alpaca",
    "tool_calls",
    "parts",
    "prompt_c",
)
COMMANDS = [
    line for line in SECTION.partition("\n## ")[0].replace("\\\n", " ").splitlines() if line.startswith("millrace run ")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shapes")
    write_shapes(made)
    write_chat_model(made / "model")
    (made / "gsm8k").mkdir()
    for split in NUM_ROWS:
        rows = (f'{{"question": "{split} {n}?", "answer": "So #### {n}"}}\n' for n in range(4))
        (made / "gsm8k" / f"{split}.jsonl").write_text("".join(rows))
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_the_documented_command_of_a_shape_trains_two_steps(
    shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = (line for line in COMMANDS if shape in line)
    monkeypatch.chdir(folder)
    is_shown = "warm_start.demonstrations" in command
    config = load_config([*shlex.split(command)[2:], *SMALL, *(["data.source=gsm8k"] if is_shown else [])])
    dataset, filtered = stages.make_dataset(config), stages.filter_rows(config)
    shown = stages.tokenize_demonstrations(config) if is_shown else None
    if shown is not None:
        assert shown.counts["train"] + shown.counts["validation"] == NUM_ROWS["train"]
    else:
        assert {name: filtered.counts[name] for name in ("train", "validation")} == {
            "train": NUM_ROWS["train"], "validation": NUM_ROWS["test"]
        }  # fmt: skip
        first = open_parquet(filtered.directory / "train.parquet").read_row_group(0).slice(0, 1).to_pylist()[0]
        assert first["prompt"][-1]["content"].startswith("train: 0 + 1?")
        assert first["reward_model"]["ground_truth"] == "1"
    inputs = stages.inputs_of(config, dataset, filtered, shown)
    start = warm_start(config, inputs)
    group = LocalGroup(config, str(start.directory))
    try:
        steps = train(SmallRun(config, inputs, start.directory), group, 2)
    finally:
        group.close()
    assert len(steps) == 2
    assert all(math.isfinite(step["actor/grad_norm"]) for step in steps)
    assert all(step.get("reward/unscored_share", 0) == 0 for step in steps)
