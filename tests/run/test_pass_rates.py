"""Pass rates: the table, the selected rows, and training on them."""

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.work.plan import make_plan
from rlcore.batching.prompts import PassCounts
from rlcore.config import PassRatesConfig, RunConfig
from rlcore.errors import DataError, StopRequestedError
from rlcore.evaluation.result import Response
from rlcore.run import pass_rates
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Watchdog
from rlcore.storage.manifest import read_manifest
from rlcore.storage.publish import published_directory
from rlcore.types import Prompt
from tests.helpers.published import flip
from tests.helpers.running import disturb, output_of, steps_of, weights_of
from tests.helpers.sessions import Event, elsewhere, run_to_the_end, session_of
from tests.helpers.small_run import SmallRun, prepare

COARSE = ("data.train_size=48", "pass_rates.samples=4", "tracking.enabled=false")
BASE = (*COARSE, "pass_rates.rows_per_part=20")
DRAWN = (
    *BASE, "pass_rates.keep=[0,0.9]", "pass_rates.draw=band", "pass_rates.band=[0.2,0.8]",
    "algo.dynamic_sampling.enabled=true", "algo.overlong.enabled=true", "algo.overlong.buffer_tokens=4",
    "trainer.steps_per_chunk=2", "trainer.total_steps=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = prepare(tmp_path_factory.mktemp("measured"), *BASE)
    with session_of(run) as session:
        session.measure_pass_rates()
    return run


def table_of(run: SmallRun) -> Path:
    return pass_rates.planned_pass_rates(run.config, run.inputs.filtered_directory) / pass_rates.TABLE


def test_stopped_stage_resumes_to_the_same_bytes(measured: SmallRun, tmp_path: Path) -> None:
    shown: list[Event] = []
    run = elsewhere(measured, tmp_path, *BASE)
    stopped = session_of(run, shown.append, lambda: any(event["event"] == "progress" for event in shown))
    with stopped as session, pytest.raises(StopRequestedError, match="20 of 48 rows are saved"):
        session.measure_pass_rates()
    assert pass_rates.find_pass_rates(run.config, run.inputs) is None
    shown.clear()
    run = elsewhere(measured, tmp_path, *COARSE, "pass_rates.rows_per_part=16")
    with session_of(run, shown.append) as session:
        session.measure_pass_rates()
    shown = [event for event in shown if event["event"] == "progress"]
    assert [event["step"] for event in shown] == [36, 48], "the first twenty are not sampled again"
    assert all(0 < event["tokens_per_s"] < 1e8 for event in shown), "each by its own seconds"
    assert table_of(run).read_bytes() == table_of(measured).read_bytes()
    assert [path.name for path in table_of(run).parents[1].glob("measuring-*/rows-*")] == []


def test_rows_are_selected_by_their_rate(measured: SmallRun, tmp_path: Path) -> None:
    rates = [row["passes"] / row["samples"] for row in pass_rates.read_table(table_of(measured)).to_pylist()]
    root = Path(measured.config.paths.root)
    run = prepare(root, *BASE, "pass_rates.keep=[0.2,0.8]", "trainer.batch_size=2", "trainer.mini_batch_size=2")
    with session_of(run) as session:
        session.measure_pass_rates()
        problems = session._workers.problems
        kept = [prompt.prompt_id for prompt in problems.selected[0]]
    assert kept == [row for row, rate in enumerate(rates) if 0.2 <= rate <= 0.8]
    assert 2 <= len(kept) < 48
    (plan,) = [stage for stage in make_plan(run.config).stages if stage.name == "pass-rates"]
    assert (plan.cached, plan.detail) == (True, f"kept {len(kept)} of 48 rows")
    few = prepare(root, *BASE, "pass_rates.keep=[0.99,1]")
    with session_of(few) as session, pytest.raises(DataError, match=r"keep: must leave trainer\.batch_size=8 rows"):
        session.measure_pass_rates()


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_killed_run_draws_by_the_same_counts(measured: SmallRun, tmp_path: Path) -> None:
    whole = elsewhere(measured, tmp_path / "whole", *DRAWN)
    with session_of(whole) as session:
        session.measure_pass_rates()
    run_to_the_end(whole)
    killed = elsewhere(measured, tmp_path / "killed", *DRAWN)
    kills = [{"at": at, "nth": nth, "signals": ["SIGKILL"]} for at, nth in (("pass-rates", 2), ("update_actor", 4))]
    found = disturb(killed, *kills, None)
    assert [one["code"] for one in found] == [-9, -9, 0], output_of(killed)
    assert table_of(killed).read_bytes() == table_of(whole).read_bytes()
    steps = steps_of(whole)
    assert steps_of(killed) == steps
    assert weights_of(killed) == weights_of(whole)
    assert steps[0]["pass_rates/rows_kept"] <= 48
    assert {"pass_rates/retired_share", "pass_rates/mean", "pass_rates/rows_revived"} <= steps[3].keys()


PROMPT = Prompt(7, (1, 2), "countdown", "{}", difficulty=3)
RIGHT = Response("a", 1.0, {"correct": 1.0, "format": 0.5}, num_tokens=4, finish_reason="stop")
WRONG = Response("b", 0.25, {"correct": 0.0}, num_tokens=9, finish_reason="length")
FAILED = Response("c", 1.0, {"odd": 1.0}, num_tokens=2, finish_reason="length", failure="the scorer failed")


def test_count_row_of_scored_and_failed_responses() -> None:
    assert pass_rates.count_row(PROMPT, [RIGHT, WRONG, FAILED]) == {
        "row_id": 7, "data_source": "countdown", "difficulty": 3, "samples": 2, "passes": 1, "unscored": 1,
        "mean_score": 0.625, "mean_parts": [("correct", 0.5), ("format", 0.5)], "mean_tokens": 5.0, "max_tokens": 9,
        "truncated": 2,
    }  # fmt: skip
    nothing = pass_rates.count_row(PROMPT, [FAILED, replace(FAILED, finish_reason="stop")])
    known = ("samples", "passes", "unscored", "mean_score", "mean_parts", "truncated")
    assert [nothing[name] for name in known] == [0, 0, 2, None, [], 1]


def line(digest: str, passes: int, samples: int) -> Mapping[str, object]:
    return {**pass_rates.count_row(PROMPT, [RIGHT]), "digest": digest, "passes": passes, "samples": samples}


def lines_table(*lines: Mapping[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(lines), schema=pass_rates.SCHEMA)


def test_row_digest_depends_on_prompt_and_truth(tmp_path: Path) -> None:
    def digests(*rows: tuple[list[int], str]) -> list[str]:
        ids, truths = pa.array([ids for ids, _ in rows]), [truth for _, truth in rows]
        pq.write_table(pa.table({"prompt_ids": ids, "ground_truth_json": truths}), tmp_path / "rows.parquet")
        return pass_rates.row_digests(tmp_path / "rows.parquet")

    rows = ([1, 2], "x"), ([1, 2], "x"), ([1, 2, 3], "x"), ([1, 2], "y"), ([2], "x")
    first, again, *_, cut = found = digests(*rows)
    assert first == again
    assert len(set(found)) == 4
    assert digests(([9], "z"), ([2], "x")) == [digests(([9], "z"))[0], cut], "at any position"
    assert first == blake2b(struct.pack("<2i", 1, 2) + b"\0x", digest_size=8).hexdigest(), "the format of tables"


def test_read_table_refuses_other_files(tmp_path: Path) -> None:
    file = tmp_path / "pass_rates.parquet"
    pq.write_table(lines_table(line("a", 1, 4)), file)
    assert pass_rates.read_table(file).num_rows == 1
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(DataError, match=rf"^{file}: must have the columns row_id, data_source, .* truncated, got a$"):
        pass_rates.read_table(file)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=rf"^{file}: cannot be read as a table of pass rates .*\. Delete its folder$"):
        pass_rates.read_table(file)


def filtered_rows(folder: Path, *truths: str) -> Path:
    folder.mkdir()
    table = {"prompt_ids": pa.array([[1]] * len(truths)), "ground_truth_json": list(truths)}
    pq.write_table(pa.table(table), folder / "train.parquet")
    return folder


def of_table(root: Path) -> RunConfig:
    return RunConfig(pass_rates={"samples": 4}, paths={"root": str(root)})


def test_damaged_table_of_the_run_is_set_aside(tmp_path: Path) -> None:
    filtered = filtered_rows(tmp_path / "f", "x", "y", "z")
    config, inputs = of_table(tmp_path), RunInputs(filtered, tmp_path / "t")
    assert pass_rates.find_pass_rates(config, inputs) is None
    directory = pass_rates.planned_pass_rates(config, filtered)
    digests = pass_rates.row_digests(filtered / "train.parquet")
    table = lines_table(*(line(digest, place, 4) for place, digest in enumerate(digests)))
    with published_directory(directory, {**pass_rates.facts_of(table, 4), "kind": "another"}) as folder:
        pq.write_table(table, folder / pass_rates.TABLE)
    found = pass_rates.find_pass_rates(config, inputs)
    assert (found.directory, found.part_sizes, found.settings) == (directory, (3,), config.pass_rates)
    assert (found.counts.passes.tolist(), found.counts.samples.tolist()) == ([0, 1, 2], [4, 4, 4])
    flip(directory / pass_rates.TABLE)
    assert pass_rates.find_pass_rates(config, inputs) is None
    assert not directory.exists()


def test_environment_settings_change_the_table(tmp_path: Path) -> None:
    plain = of_table(tmp_path)
    talking = plain.model_copy(update={"data": plain.data.model_copy(update={"environment": "some:Environment"})})
    names = []
    for config in (plain, talking):
        for episode in ({}, {"max_turns": 17}, {"deadline_s": 77.0}):
            changed = config.model_copy(update={"episode": config.episode.model_copy(update=episode)})
            names.append(pass_rates.planned_pass_rates(changed, Path("f")).name)
    one, turns, deadline, with_turns, other_turns, other_deadline = names
    assert one == turns == deadline, "without an environment they have no effect"
    assert with_turns == other_deadline, "a deadline changes no number"
    assert len({one, with_turns, other_turns}) == 3


class FakeWorkers:
    """Workers whose responses depend on the row's number. `fails`: rows on which the scorer fails."""

    def __init__(self, num_rows: int, fails: Collection[int] = ()) -> None:
        self.prompts = tuple(Prompt(row, (1,), "d", "") for row in range(num_rows))
        self.fails = fails
        self.calls: list[object] = []

    def training_prompts(self) -> Sequence[Prompt]:
        self.calls.append("start")
        return self.prompts

    def training_responses(self, prompts: Sequence[Prompt], num_samples: int, first_row: int) -> list[Response]:
        rows = [prompt.prompt_id for prompt in prompts]
        self.calls.append((rows, num_samples, first_row))
        failed = {row: "late" if row in self.fails else None for row in rows}
        places = [(row, sample) for row in rows for sample in range(num_samples)]
        return [Response("a", float(row % 2), {}, 3 + sample, "stop", failure=failed[row]) for row, sample in places]


def measuring(root: Path, workers: FakeWorkers, events: list[Mapping[str, object]]) -> pass_rates.PassRateMeasurement:
    config = RunConfig(
        pass_rates={"samples": 2, "rows_per_part": 2}, paths={"root": str(root)}, tracking={"enabled": False},
        trainer={"batch_size": 4, "mini_batch_size": 4}, checkpoint={"reserve_gb": 0},
    )  # fmt: skip
    layout = RunLayout(root, root / "run")
    layout.run_dir.mkdir(exist_ok=True)
    guard = Watchdog(config, layout, stop=StopFlag(lambda: None), report=events.append, abandon=lambda error: None)
    inputs = RunInputs(root / "f", root / "t")
    return pass_rates.PassRateMeasurement(config, inputs, guard, workers.training_prompts, workers.training_responses)


def test_table_is_measured_in_parts_with_progress(tmp_path: Path) -> None:
    filtered_rows(tmp_path / "f", *"abcde")
    workers, events = FakeWorkers(5, fails=[3]), list[Mapping[str, object]]()
    stage = measuring(tmp_path, workers, events)
    rates = stage.make()
    assert stage.make().counts.passes.tolist() == rates.counts.passes.tolist()
    assert workers.calls == ["start", ([0, 1], 2, 0), ([2, 3], 2, 2), ([4], 2, 4)]
    assert (rates.counts.passes.tolist(), rates.counts.samples.tolist()) == ([0, 2, 0, 0, 0], [2, 2, 2, 0, 2])
    progress = [event for event in events if event["event"] == "progress"]
    means = [(event["step"], event["metrics"]) for event in progress]
    assert means == [(step, {"critic/score/mean": mean}) for step, mean in ((2, 0.5), (4, 0.0), (5, 0.0))]
    named = {(event["stage"], event["to_step"], event["total_steps"]) for event in progress}
    assert named == {("pass-rates", 5, 5)}
    first, second, last = (float(str(event["eta_s"])) for event in progress)
    assert math.isnan(first)
    assert 0 == last <= second < 3600
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert notes == ["pass rates: data.countdown:score failed on 2 responses, which are left out"]
    directory = rates.directory
    assert not list(directory.parent.glob("measuring-*/rows-*"))
    facts = read_manifest(directory)
    assert (facts.values["rows"], facts.values["unscored"], facts.values["fingerprint"]) == (5, 2, directory.name)


def test_scorer_that_always_fails_makes_no_table(tmp_path: Path) -> None:
    filtered_rows(tmp_path / "f", *"abcde")
    stage = measuring(tmp_path, FakeWorkers(5, fails=range(5)), [])
    rule = r"^data\.countdown:score: failed on all 10 responses of the initial policy.*Repair it, and delete "
    with pytest.raises(DataError, match=f"{rule}{stage._parts_folder}$"):
        stage.make()
    assert not stage._directory.exists()


def rates_of(*rows: tuple[int, int], parts: tuple[int, ...], keep: Any = (0, 1)) -> pass_rates.PassRates:
    counts = PassCounts.of([passes for passes, _ in rows], [samples for _, samples in rows])
    return pass_rates.PassRates(Path("t"), counts, parts, PassRatesConfig(samples=4, keep=keep))


def test_pass_rate_metrics() -> None:
    rates = rates_of((0, 4), (1, 4), (0, 0), (4, 4), (3, 4), parts=(3, 2), keep=(0.25, 1))
    assert rates.metrics() == {
        "pass_rates/mean": 2 / 4, "pass_rates/never_share": 0.25, "pass_rates/always_share": 0.25,
        "pass_rates/rows_kept": 3.0, "pass_rates/kept_share": 0.6,
    }  # fmt: skip
    assert [part.tolist() for part in rates.selected] == [[False, True, False], [True, True]]
    kept = rates.selected_counts()
    assert (kept.passes.tolist(), kept.samples.tolist()) == ([1, 4, 3], [4, 4, 4])
    assert rates.spread() == "0 for 25% of the rows, 1 for 25%, between for 50%"
    assert [part.tolist() for part in rates_of((0, 0), (1, 4), parts=(2,)).selected] == [[True, True]], "all are wanted"
    assert rates_of((0, 0), parts=(1,)).spread() == "not known: no response has a score"


@pytest.mark.parametrize(("keep", "kept"), [((0, 1), 5), ((0, 0.5), 3), ((0.5, 1), 3), ((0.25, 0.25), 1)])
def test_both_ends_of_keep_are_selected(keep: tuple[float, float], kept: int) -> None:
    rates = rates_of((0, 4), (1, 4), (2, 4), (3, 4), (4, 4), parts=(5,), keep=keep)
    assert sum(int(part.sum()) for part in rates.selected) == kept
    rates.require_enough(kept)
    least, which = f"must leave trainer.batch_size={kept + 1} rows", f"which leaves {kept} of 5 training rows (table t)"
    rule = f"{least} or more, got [{keep[0]:g}, {keep[1]:g}], {which}. Widen pass_rates.keep; the pass rates are 0 for"
    with pytest.raises(DataError, match=rf"^pass_rates\.keep: {re.escape(rule)} 20% of "):
        rates.require_enough(kept + 1)


def test_part_without_a_selected_row_is_refused() -> None:
    rates = rates_of((4, 4), (1, 4), (4, 4), parts=(1, 1, 1), keep=(0.5, 1))
    rule = r"must leave rows of every part of a mixture, got \[0.5, 1\], which leaves none of entry 1 of data.parts"
    with pytest.raises(DataError, match=rf"^pass_rates.keep: {rule}. Widen pass_rates.keep.*, or leave that part out$"):
        rates.require_enough(1)
    with pytest.raises(DataError, match=r"rows or more, got .* which leaves 0 of 2"):
        rates_of((0, 4), (0, 4), parts=(1, 1), keep=(0.5, 1)).require_enough(1)


def test_planned_folder_of_a_table(tmp_path: Path) -> None:
    def planned(model: str | None = None) -> Path:
        config = RunConfig(pass_rates={"samples": 2}, model={"path": model}, paths={"root": str(tmp_path)})
        return pass_rates.planned_pass_rates(config, Path("filtered/0123"))

    names = [planned()]
    assert names[0].parent == tmp_path / "pass-rates"
    for model in (tmp_path / "a" / "m", tmp_path / "b" / "m"):
        names.append(planned(str(model)))
        model.mkdir(parents=True)
        names.append(planned(str(model)))
        (model / "model.safetensors").write_bytes(b"12345")
        names.append(planned(str(model)))
        (model / "manifest.json").touch()
        assert planned(str(model)) == names[-3]
    assert names[2:4] == names[5:7], "the same files elsewhere"
    assert len(set(names)) == len(names) - 2
