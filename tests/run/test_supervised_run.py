"""A run that ends after its supervised stage: evaluations, journal, export, adapters, ranks and resumes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.initial_policy import stage_layout
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.journal import load_journal, read_journal
from tests.helpers.running import WAIT_S, at, disturb, finish, output_of, steps_of, weights_of, write_record
from tests.helpers.sessions import elsewhere, session_of
from tests.helpers.small_run import SmallRun, prepare

STEPS = 8
SFT = (
    "trainer.total_steps=0", "tracking.enabled=false", "runtime.stop_deadline_s=200", f"warm_start.max_steps={STEPS}",
    "warm_start.steps_per_chunk=4", "warm_start.check_every=4", "warm_start.stop_at_reward=null",
)  # fmt: skip
LORA = "+model.lora.rank=4"
METRIC = "val-core/countdown/reward/greedy"
WHOLE_AND_LORA = pytest.mark.parametrize("more", [(), (LORA,)], ids=["whole", "lora"])
Finished = Callable[[tuple[str, ...]], SmallRun]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Return the undisturbed run with these further settings. Its process is closed between the two models."""

    @cache
    def run(more: tuple[str, ...]) -> SmallRun:
        made = prepare(tmp_path_factory.mktemp("sft"), *SFT, *more)
        with session_of(made) as session:
            session.validate("start", "before")
        with session_of(made) as session:
            session.warm_start()
            session.validate("last", "after")
            session.export("last")
        return made

    return run


def answers(run: SmallRun, name: str) -> list[str]:
    result = ValidationResult.read(run.layout.validation / f"{name}.json")
    return [problem.greedy.text for problem in result.problems if problem.greedy is not None]


@WHOLE_AND_LORA
def test_validations_are_of_the_models_before_and_after(finished, tmp_path, more) -> None:
    run = finished(more)
    (base,) = [folder for folder in run.model_directory.parent.iterdir() if folder != run.model_directory]
    expected = {}
    for name, model in (("before", base), ("after", run.layout.exported_model)):
        other = prepare(tmp_path / "rl", "tracking.enabled=false", "warm_start.enabled=false", f"model.path={model}")
        with session_of(other) as session:
            session.validate("start", name)
        expected[name] = answers(other, name)
    assert {name: answers(run, name) for name in expected} == expected
    assert expected["before"] != expected["after"]


def test_journal_has_the_supervised_steps_and_both_validations(finished: Finished) -> None:
    run = finished(())
    journal = stage_layout(run.config, run.inputs.filtered_directory).journal
    found = read_journal(run.layout.journal)
    assert [record.step for record in found] == [*range(STEPS + 1)]
    for record, expected in zip(found, read_journal(journal), strict=True):
        assert (record.step, record.time) == (expected.step, expected.time)
        assert expected.metrics.items() <= record.metrics.items()
    assert [record.step for record in found if METRIC in record.metrics] == [0, STEPS]
    assert [end.status for _, end in read_attempts(run.layout.run_dir) if end is not None] == ["FINISHED"]
    shutil.rmtree(run.layout.exported_model)  # as if the process had been killed before
    with session_of(run) as session:
        session.export("last")
    assert read_journal(run.layout.journal) == found
    assert len(load_journal(run.layout.journal).events) == len(load_journal(journal).events)


def test_exported_model_is_that_of_the_stage(finished: Finished) -> None:
    folder = finished(()).layout.exported_model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id
    expected = load_file(finished(()).model_directory / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(folder / "model.safetensors").items())


def test_adapters_are_trained_and_exported_merged_and_alone(finished: Finished) -> None:
    folder = finished((LORA,)).layout.exported_model
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before, after = dict(base.named_parameters()), dict(merged.named_parameters())
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert {name.split(".")[-2] for name in changed} == {*settings["target_modules"]}
    ids = torch.arange(2, 22).reshape(2, 10)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, folder / "adapter")
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-5)
    names = {finished(more).model_directory.name for more in ((), (LORA,))}
    assert len(names) == 2, "adapters and whole weights are different results"


def test_adapters_of_a_following_run_leave_the_warm_start_alone(tmp_path: Path) -> None:
    words = [word for word in SFT if not word.startswith("trainer.")]
    plain = prepare(tmp_path, *words)
    assert prepare(tmp_path, *words, LORA).model_directory == plain.model_directory
    assert prepare(tmp_path, *SFT).model_directory == plain.model_directory, "the next run continues from it"


def test_missing_demonstrations_end_the_run_before_an_evaluation(tmp_path: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={tmp_path}", "warm_start.max_tokens=2", *SFT])
    run = replace(prepare(tmp_path, "warm_start.enabled=false"), config=config)  # the same rows, and no model
    rule = r"needs demonstrations.* all 512 are longer than warm_start\.max_tokens=2\. Set warm_start\.enabled"
    with pytest.raises(DataError, match=rule), session_of(run) as session:
        session.validate("start", "before")
    assert not run.layout.validation.exists()


def restarted(run: SmallRun, root: Path, *words: str) -> SmallRun:
    """Return the run under another root, before its stage."""
    again = elsewhere(run, root, *SFT, *words)
    shutil.rmtree(again.model_directory)
    return again


@pytest.mark.multiprocess
@pytest.mark.timeout(WAIT_S + 40)
@WHOLE_AND_LORA
def test_killed_run_resumes_to_the_same_model(finished: Finished, tmp_path: Path, more: tuple[str, ...]) -> None:
    whole, again = (restarted(finished(more), tmp_path / name, *more) for name in ("whole", "again"))
    finish(write_record(whole), tmp_path / "out.log")
    kill, stop = at("warm-start", "SIGKILL", nth=6), at("warm-start", "SIGTERM", nth=2)
    ends = disturb(again, kill, stop, at("testing", "SIGKILL", nth=2), None)
    assert [one["code"] for one in ends] == [-9, 75, -9, 0], output_of(again)
    assert (steps_of(again), weights_of(again)) == (steps_of(whole), weights_of(whole))


@pytest.mark.multiprocess
@pytest.mark.timeout(WAIT_S)
@WHOLE_AND_LORA
def test_two_ranks_reproduce_one(finished: Finished, tmp_path: Path, more: tuple[str, ...]) -> None:
    run = finished(more)
    two = restarted(run, tmp_path, *more, "runtime=ray", "runtime.num_workers=2")
    finish(write_record(two), tmp_path / "out.log")
    events = load_journal(two.layout.journal).events
    assert {event.data["num_workers"] for event in events if event.name == "workers"} == {2}
    for one, other in zip(steps_of(run).values(), steps_of(two).values(), strict=True):
        names = [name for name in one if name.startswith("sft/")]
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4)
    expected, found = (load_file(each.layout.exported_model / "model.safetensors") for each in (run, two))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
