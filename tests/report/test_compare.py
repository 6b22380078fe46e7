"""Comparisons of several runs: differences, groups of seeds, spreads, curves and costs."""

import json
import re
import shutil
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rlcore.config import ModelConfig, RunConfig
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult, compare
from rlcore.report.build import compare_runs, summary_markdown
from rlcore.report.compare import comparison_findings, differing_settings, groups_of, label_runs
from rlcore.report.document import signed_interval
from rlcore.report.panels import measure_table
from rlcore.report.plots import band_of, series_of, series_over
from rlcore.report.record import read_run
from rlcore.report.run_sections import describe_setting
from rlcore.tracking.journal import GPU_SECONDS, JOURNAL_FILE, Journal
from rlcore.tracking.lineage import Stage
from tests.helpers.reports import parse, record_of, table, with_stages, write_run

FEW = ("critic/score/mean", "perf/total_num_tokens", "timing_s/step")
STEPS = ("trainer.total_steps=40",)


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory):
    """Two learning rates with two seeds each, and an unfinished PPO run on other problems."""
    root = tmp_path_factory.mktemp("compare") / "runs"
    found = []
    for rate, gain in (("3e-4", 0.45), ("1e-5", 0.1)):
        for seed in (1, 2):
            found.append(root / f"lr{rate}-s{seed}")
            write_run(found[-1], overrides=(f"optim.lr={rate}", *STEPS), num_steps=40, seed=seed,
                      gain=gain + 0.02 * seed, num_problems=60, only=FEW)  # fmt: skip
    found.append(root / "ppo")
    write_run(found[-1], experiment="countdown_ppo_demo", num_steps=20, num_problems=30, only=FEW)
    return found


@pytest.fixture(scope="module")
def comparison(run_dirs):
    return compare_runs(run_dirs[:4])


@pytest.fixture(scope="module")
def two_seeds(run_dirs, tmp_path_factory):
    return compare_runs(run_dirs[:2], target=tmp_path_factory.mktemp("two_seeds"))


@pytest.fixture(scope="module")
def unlike(run_dirs, tmp_path_factory):
    """Return a comparison of two algorithms on different problems."""
    return compare_runs([run_dirs[0], run_dirs[4]], target=tmp_path_factory.mktemp("unlike"))


def finding(files, topic: str) -> dict:
    return next(found for found in json.loads(files.json.read_text())["findings"] if found["topic"] == topic)


def test_comparison_is_next_to_the_runs(run_dirs, comparison, two_seeds, unlike):
    assert comparison.html.parent.parent == run_dirs[0].parent.parent / "comparisons"
    again = compare_runs([*run_dirs[:4], run_dirs[0]])
    assert again == comparison
    assert comparison.summary.split("\n")[2] == "4 runs, 2 settings"
    titles = [json.loads(files.json.read_text())["title"] for files in (comparison, two_seeds, unlike)]
    assert titles == ["countdown_demo: 2 settings", "countdown_demo: 2 seeds", "countdown_demo and 1 more"]
    headings = re.findall(r"<(?:h2|h3|summary)>(.*?)</", comparison.html.read_text())
    assert not [title for title, following in pairwise(headings) if title == following], "a heading stands twice"


def test_only_differing_settings_are_shown(run_dirs, comparison):
    rows = {row["Setting"]: row for row in table(comparison, "settings")}
    assert set(rows) == {"seed", "optim.lr"}
    assert rows["optim.lr"]["lr3e-4-s1"] == 3e-4
    assert rows["optim.lr"]["lr1e-5-s2"] == 1e-5
    ppo = differing_settings([read_run(run_dirs[0]), read_run(run_dirs[4])])
    assert ppo["algo.advantage"] == ("grpo", "gae")
    assert ppo["critic.warmup_steps"] == (None, 5)
    assert not any(key.startswith(("name", "paths", "tags", "tracking")) for key in ppo)
    assert describe_setting("reward.weights.style.length") == describe_setting("reward.weights") != ""
    assert describe_setting("nothing.of.this") == ""


def test_runs_are_grouped_by_seed(run_dirs):
    groups = groups_of([read_run(folder) for folder in run_dirs])
    members = [" ".join(run.run_id for run in group) for group in groups.values()]
    assert members == ["lr3e-4-s1 lr3e-4-s2", "lr1e-5-s1 lr1e-5-s2", "ppo"]
    assert list(groups_of([read_run(folder) for folder in run_dirs[:4]])) == ["optim.lr=0.0003", "optim.lr=1e-05"]
    assert list(groups) == ["lr3e-4-s1", "lr1e-5-s1", "ppo"]  # three by too many settings


def test_settings_that_a_resume_may_change_do_not_group(run_dirs):
    first, second, other = (read_run(folder) for folder in run_dirs[:3])
    for section, key in (("trainer", "steps_per_chunk"), ("runtime", "stop_deadline_s")):
        changed = getattr(second.config, section).model_copy(update={key: 7})
        second = replace(second, config=second.config.model_copy(update={section: changed}))
    assert {"trainer.steps_per_chunk", "runtime.stop_deadline_s"} <= differing_settings([first, second]).keys()
    assert list(groups_of([first, second, other])) == ["optim.lr=0.0003", "optim.lr=1e-05"]
    for section, key in (("trainer", "total_steps"), ("validation", "samples_per_problem")):
        changed = getattr(second.config, section).model_copy(update={key: 9})
        longer = replace(second, config=second.config.model_copy(update={section: changed}))
        assert len(groups_of([first, longer])) == 2


def test_runs_of_same_seed_count_once(run_dirs, tmp_path):
    again = [shutil.copytree(folder, tmp_path / "runs" / f"{folder.name}-again") for folder in run_dirs[:3:2]]
    files = compare_runs([run_dirs[0], again[0], run_dirs[2], again[1]])
    assert {row["Seeds"] for row in table(files, "seeds")} == {1}
    assert finding(files, "Best setting")["verdict"] == "one seed is too few"
    assert "2 seeds" not in files.html.read_text()
    one = compare_runs([run_dirs[0], again[0]], target=tmp_path / "one")
    assert json.loads(one.json.read_text())["title"] == "countdown_demo: 2 runs of one seed"


def test_runs_with_different_code_are_separate_groups(run_dirs, tmp_path):
    folders = [shutil.copytree(folder, tmp_path / "runs" / folder.name) for folder in run_dirs[:2]]
    for folder, fingerprint in zip(folders, ("c0ffee", "decade"), strict=True):
        with_stages(folder, Stage("code", fingerprint, "code"))
    assert list(groups_of([read_run(folder) for folder in folders])) == ["code=c0ffee", "code=decade"]
    (row,) = [row for row in table(compare_runs(folders), "settings") if row["Setting"] == "code"]
    assert (row["lr3e-4-s1"], row["lr3e-4-s2"]) == ("c0ffee", "decade")
    other = shutil.copytree(run_dirs[2], tmp_path / "runs" / "other")
    with_stages(other, Stage("code", "decade", "code"))
    assert list(groups_of([read_run(folders[0]), read_run(other)])) == ["optim.lr=0.0003", "optim.lr=1e-05"]
    with_stages(folders[1])
    assert [len(group) for group in groups_of([read_run(folder) for folder in folders]).values()] == [2]


def test_differing_settings_mask_passwords():
    models = [ModelConfig(path=f"http://me:SECRET@{host}") for host in "ab"]
    runs = [record_of({}, config=RunConfig(model=model)) for model in models]
    assert differing_settings(runs)["model.path"] == ("http://me:***@a", "http://me:***@b")


def test_seed_table_and_finding(run_dirs, comparison):
    last = [read_run(folder).held_out("reward/mean_at_4")[-1][1].value for folder in run_dirs[:2]]
    row = next(row for row in table(comparison, "seeds") if row["Metric"] == "reward/mean_at_4")
    assert row["Seeds"] == 2
    ends = f"{statistics.fmean(last):.3f}, seeds from {min(last):.3f} to {max(last):.3f}"
    statements = [found["statement"] for found in json.loads(comparison.json.read_text())["findings"]]
    assert statements[0] == f"optim.lr=0.0003: mean reward/mean_at_4 {ends}."
    assert row["Mean"]["value"] == pytest.approx(statistics.fmean(last))
    assert row["Deviation"] == pytest.approx(statistics.stdev(last))
    assert row["Mean"]["high"] - row["Mean"]["value"] == pytest.approx(
        12.7062 * statistics.stdev(last) / 2**0.5, rel=1e-5
    )
    assert (row["Lowest"], row["Highest"]) == (min(last), max(last))


def test_runs_on_other_problems_are_named(run_dirs, comparison):
    assert "Not evaluated on the same problems" not in finding(comparison, "Against the first run")["statement"]
    mixed = label_runs([read_run(folder) for folder in run_dirs[::2]])
    *_, found = comparison_findings(mixed, groups_of(list(mixed.values())))
    assert found.numbers.keys() == {"lr1e-5-s1"}
    assert found.statement.endswith(". Not evaluated on the same problems: ppo.")


def test_runs_are_paired_with_first_run(run_dirs, comparison):
    first, other = (
        ValidationResult.read(folder / "validation" / "after.json") for folder in (run_dirs[0], run_dirs[2])
    )
    wanted = compare(first, other)[0].paired
    row = next(
        row for row in table(comparison, "paired") if row["Run"] == "lr1e-5-s1" and row["Metric"] == "reward/mean_at_4"
    )
    assert row["Difference from lr3e-4-s1"]["value"] == wanted.difference.value
    assert (row["Better on"], row["Worse on"]) == (wanted.wins, wanted.losses)
    found = finding(comparison, "Against the first run")
    assert found["numbers"]["lr1e-5-s1"]["high"] < 0
    assert f"lr1e-5-s1 minus lr3e-4-s1: {signed_interval(wanted.difference)}; " in found["statement"]


def test_best_setting_needs_validations_and_seeds_that_do_not_overlap(run_dirs):
    high, other_high, low, other_low, elsewhere = map(read_run, run_dirs)

    def best(*groups):
        findings = comparison_findings({}, dict(zip("ab", groups, strict=True)))
        return next(found for found in findings if found.topic == "Best setting")

    assert best([low, other_low], [high, other_high]).verdict == "b"
    assert best([low, other_high], [high, other_low]).verdict == "no clear difference"
    assert best([low, other_low], [record_of({})]).verdict == "not known"
    found = best([high, other_high], [elsewhere])
    assert found.verdict == "not known"
    assert found.statement.endswith(", but on different held-out problems."), found
    without = replace(high, validations={"before": high.validations["before"]})
    assert best([without], [low, other_low]).verdict == "one seed is too few", "its problems may be the same"


def test_best_setting_needs_several_settings(comparison, two_seeds):
    assert finding(comparison, "Best setting")["verdict"] == "optim.lr=0.0003"
    assert finding(two_seeds, "Over seeds")["verdict"] == "2 seeds"
    assert "Best setting" not in two_seeds.html.read_text(), "there is one"


def test_last_values_match_journals(run_dirs, comparison):
    rows = {row["Metric"]: row for row in table(comparison, "metrics")}
    for folder in run_dirs[:4]:
        record = read_run(folder)
        assert rows["critic/score/mean"][folder.name] == record.series("critic/score/mean").iloc[-1]
        assert rows["val-core/countdown/reward/greedy"][folder.name] == record.held_out("reward/greedy")[-1][1].value


def test_series_over_running_totals():
    series = series_of([(1, 0.1), (3, 0.3), (4, 0.4)])
    totals = series_of([(1, 10.0), (2, 25.0), (3, 45.0), (4, 70.0)])
    assert series_over(series, totals).index.tolist() == [10.0, 45.0, 70.0]
    assert series_over(series, None).index.tolist() == [1.0, 3.0, 4.0]
    held_out = series_of([(0, 0.2), (2, 0.5)])
    assert series_over(held_out, totals).index.tolist() == [0.0, 25.0]


def test_bands_cover_common_range():
    x = series_of((step, float(step)) for step in range(5))
    band = band_of([x, 3 * x.iloc[:4], 2 * x])
    assert (band.index[0], band.index[-1]) == (0.0, 3.0)
    assert band["mean"].to_numpy() == pytest.approx(2 * band.index.to_numpy())
    assert band["min"].to_numpy() == pytest.approx(band.index.to_numpy())
    assert band["max"].to_numpy() == pytest.approx(3 * band.index.to_numpy())


def test_curves_over_steps_tokens_and_seconds(comparison):
    html = comparison.html.read_text()
    for name in ("held_out", "training"):
        for axis in ("step", "tokens", "seconds"):
            assert f'id="f-{name}_by_{axis}"' in html
            assert (comparison.html.parent / "figures" / f"{name}_by_{axis}.png").is_file()
    assert "Not measured: " in html  # entropy and others are not in these journals
    assert not re.search(r"https?:|src=|@import", html)
    parse(html)


def test_gpu_time_per_run_and_point(run_dirs, tmp_path):
    copies = [tmp_path / "runs" / folder.name for folder in run_dirs[:2]]
    for place, (folder, copy) in enumerate(zip(run_dirs, copies, strict=False)):
        shutil.copytree(folder, copy)
        with Journal(copy / JOURNAL_FILE) as journal:
            journal.append_step(40, {GPU_SECONDS: 1_200.0 * (place + 1)})
    runs = label_runs([read_run(copy) for copy in copies])
    rows = {row[0].text: [cell.value for cell in row[1:3]] for row in measure_table("performance", runs).rows}
    gains = [100 * run.reward_gain for run in runs.values()]
    assert rows["GPU time, all attempts"] == [1_200, 2_400]
    assert rows["GPU time per point gained"] == pytest.approx([1_200 / gains[0], 2_400 / gains[1]])
    assert "GPU time: **20 min**" in summary_markdown(copies[0])


def test_unpaired_runs_are_compared(unlike):
    row = table(unlike, "paired")[0]
    assert row["Run"] == "ppo"
    words = parse(unlike.html.read_text()).words
    assert "some runs are not finished" in words
    assert "ppo: The run has 20 of 100 steps" in words


def test_run_without_steps_is_compared(run_dirs, tmp_path):
    bare = shutil.copytree(run_dirs[0], tmp_path / "runs" / "bare")
    (bare / "metrics.jsonl").write_bytes(b"")
    files = compare_runs([run_dirs[0], bare], target=tmp_path)
    assert {row["bare"] for row in table(files, "metrics")} == {None}


def test_runs_with_same_name_are_labeled_by_folder():
    runs = [replace(record_of({}), run_dir=Path(place) / "runs" / "same") for place in "ab"]
    assert list(label_runs(runs)) == ["a/runs/same", "b/runs/same"]


def test_comparison_needs_two_runs(run_dirs, tmp_path):
    with pytest.raises(DataError, match="needs 2 different runs, got 1"):
        compare_runs([run_dirs[0], run_dirs[0]], target=tmp_path)
    with pytest.raises(DataError, match=r"run\.json"):
        compare_runs([run_dirs[0], tmp_path / "nowhere"], target=tmp_path / "out")
    assert not (tmp_path / "out").exists()
