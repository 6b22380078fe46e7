"""The report of a run: what it says is what the files say, it loads nothing, and it renders whatever is missing."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from matplotlib import rc_context
from matplotlib.figure import Figure

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult, compare
from rlcore.evaluation.stats import Interval
from rlcore.report import numbers
from rlcore.report.build import build_report, report_of, summary_markdown
from rlcore.report.document import Finding, Gallery, Report, Tile
from rlcore.report.figures import LEARNING, ONE_UPDATE, charts_of
from rlcore.report.held_out import section_of
from rlcore.report.page import markdown_of
from rlcore.report.performance import phase_table
from rlcore.report.plots import SETTINGS, Chart, gallery_of, legend
from rlcore.report.record import RunRecord, read_run
from rlcore.report.samples import sample_table
from rlcore.report.settings import defaults_of, settings_of, settings_tables
from rlcore.storage.publish import published_directory
from rlcore.tracking.catalog import metric_docs
from rlcore.tracking.journal import JOURNAL_FILE, WORKERS, Journal, load_journal
from rlcore.tracking.lineage import Origin, Stage
from tests.report.pages import Page, parse, table
from tests.report.records import record_of
from tests.report.runs import validation, with_stages, write_run

pytestmark = pytest.mark.slow

SECTIONS = ["learned", "curves", "held_out", "answers", "convergence", "performance", "memory", "configuration",
            "reproduce", "lineage", "journal"]  # fmt: skip

FEW = ("critic/score/mean",)
"""Metrics of a run whose report is drawn quickly."""


def page_of(files) -> Page:
    return parse(files.html.read_text())


def learning_charts(record: RunRecord) -> list[Chart]:
    return charts_of({"run": [record]}, LEARNING)


def series(run_dir, name: str) -> list[float]:
    steps = load_journal(run_dir / JOURNAL_FILE).steps
    return [record.metrics[name] for record in steps if name in record.metrics]


# ---------------------------------------------------------------- numbers


def test_the_last_step_is_told_value_for_value(grpo_run, grpo_report):
    last = load_journal(grpo_run / JOURNAL_FILE).steps[-1]
    rows = table(grpo_report, "metrics")
    assert {row["Metric"]: row["Value"] for row in rows} == dict(last.metrics)
    shown = {row[0]: row[1] for row in page_of(grpo_report).tables["metrics"][1:]}
    assert shown == {name: numbers.compact(value) for name, value in last.metrics.items()}
    undefined = [row["Metric"] for row in rows if not row["Definition"]]
    assert undefined == []


def test_held_out_figures_are_those_of_the_validation_files(grpo_run, grpo_report):
    before, after = (ValidationResult.read(grpo_run / "validation" / f"{name}.json") for name in ("before", "after"))
    rows = table(grpo_report, "held_out")
    shown = page_of(grpo_report).tables["held_out"][1:]
    for row, cells, found in zip(rows, shown, compare(before, after), strict=True):
        name = f"val-core/countdown/{found.statistic}"
        for column, result in (("Before", before), ("After", after)):
            summary = result.summary()
            value = {"value": summary[name], "low": summary[f"{name}/ci_low"], "high": summary[f"{name}/ci_high"]}
            assert row[column] == value
            assert numbers.interval(Interval(**value)) in cells
        assert row["Paired difference"]["value"] == found.paired.difference.value
        assert (row["Better on"], row["Worse on"]) == (found.paired.wins, found.paired.losses)


def test_convergence_and_performance_are_those_of_the_journal(grpo_run, grpo_report):
    rows = {row["Measure"]: row["Value"] for name in ("convergence", "performance", "efficiency")
            for row in table(grpo_report, name)}  # fmt: skip
    rewards, entropy = series(grpo_run, "critic/score/mean"), series(grpo_run, "actor/entropy")
    assert rows["Training reward, first tenth"] == pytest.approx(np.mean(rewards[:6]))
    assert rows["Training reward, last tenth"] == pytest.approx(np.mean(rewards[-6:]))
    assert rows["Entropy, first → last tenth"] == pytest.approx(
        {"first": np.mean(entropy[:6]), "last": np.mean(entropy[-6:])}
    )
    norms = series(grpo_run, "actor/grad_norm")
    assert rows["Gradient norm, median / largest"] == pytest.approx({"median": np.median(norms), "max": max(norms)})
    assert rows["Seconds of training steps"] == pytest.approx(sum(series(grpo_run, "timing_s/step")))
    mean = np.mean(series(grpo_run, "timing_s/step")[1:])
    assert rows["Seconds a step"] == pytest.approx(mean)
    assert f"{numbers.duration(mean)} a step" in page_of(grpo_report).words
    assert rows["Tokens trained on"] == pytest.approx(sum(series(grpo_run, "perf/total_num_tokens")))
    assert rows["Throughput, median"] == pytest.approx(np.median(series(grpo_run, "perf/throughput")))
    assert rows["Answers cut at the limit, last third"] == pytest.approx(
        np.mean(series(grpo_run, "response_length/clip_ratio")[-20:])
    )


def test_every_measure_is_defined(grpo_report, ppo_report):
    for files in (grpo_report, ppo_report):
        for name in ("convergence", "performance", "efficiency"):
            rows = table(files, name)
            assert rows
            assert all(row["Definition"] for row in rows), name


def test_phases_are_the_means_without_the_first_step(grpo_run, grpo_report):
    rows = {row["Phase"]: row for row in table(grpo_report, "phases")}
    assert rows["Generation"]["Mean"] == pytest.approx(np.mean(series(grpo_run, "timing_s/gen")[1:]))
    assert rows["Step"]["Mean"] == pytest.approx(np.mean(series(grpo_run, "timing_s/step")[1:]))
    assert sum(row["Share"] for name, row in rows.items() if name != "Step") == pytest.approx(1.0)


def test_settings_that_differ_come_first_and_are_all_there(grpo_run, grpo_report):
    config = load_config(["trainer.total_steps=60"], experiment="countdown_demo")
    changed = {row["Setting"]: row for row in table(grpo_report, "settings_changed")}
    same = {row["Setting"]: row for row in table(grpo_report, "settings_default")}
    assert changed["data.train_size"]["Value"] == 4_767
    assert changed["data.train_size"]["Default"] == 327_680
    assert "Rows of the training split" in changed["data.train_size"]["Meaning"]
    assert "data.target_low" in same
    assert list(changed) == [
        key for key, value in settings_of(config).items() if defaults_of(config).get(key, ...) != value
    ]
    keys = page_of(grpo_report).words
    assert keys.index("data.train_size") < keys.index("data.target_low")


def test_pass_at_k_and_difficulty_are_there_before_and_after(grpo_run, grpo_report):
    after = ValidationResult.read(grpo_run / "validation" / "after.json")
    curve = table(grpo_report, "pass_at_k")
    assert [row["k"] for row in curve] == [1, 2, 4]
    assert curve[-1]["pass@k, after"]["value"] == after.summary()["val-core/countdown/reward/pass@4"]
    levels = table(grpo_report, "difficulty")
    assert [row["Difficulty"] for row in levels] == [2, 3]
    assert "By difficulty" in page_of(grpo_report).words
    assert sum(row["Problems"] for row in levels) == len(after.problems)
    means = sum(row["mean@4, after"]["value"] * row["Problems"] for row in levels) / len(after.problems)
    assert means == pytest.approx(after.summary()["val-core/countdown/reward/mean@4"])


def test_the_head_says_the_gain(grpo_report):
    found = table(grpo_report, "held_out")[0]
    head = f"{found['Before']['value']:.3f} → {found['After']['value']:.3f}"
    assert head in page_of(grpo_report).words
    assert head in grpo_report.summary


def test_samples_are_answers_to_the_same_problem(grpo_run, grpo_report):
    before, after = (ValidationResult.read(grpo_run / "validation" / f"{name}.json") for name in ("before", "after"))
    words = page_of(grpo_report).words
    pair = next(
        (a, b)
        for a, b in zip(before.problems, after.problems, strict=True)
        if a.greedy and b.greedy and not a.greedy.solved and b.greedy.solved
    )
    at = words.index(pair[0].prompt_text)
    assert words.index(pair[0].greedy.text, at) < words.index(pair[1].greedy.text, at)


def test_the_same_folder_gives_the_same_bytes(grpo_run, grpo_report, tmp_path):
    again = build_report(grpo_run, target=tmp_path)
    assert grpo_report.summary == again.summary
    for first, second in ((grpo_report.html, again.html), (grpo_report.json, again.json)):
        assert first.read_bytes() == second.read_bytes()


# ---------------------------------------------------------------- pages


def test_pages_load_nothing(grpo_report, ppo_report):
    for files in (grpo_report, ppo_report):
        html = files.html.read_text()
        page = parse(html)
        assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
        loading = [(tag, name, value) for tag, name, value in page.attributes
                   if name in ("src", "href", "action", "srcset", "data") and not value.startswith("#")]  # fmt: skip
        assert loading == []
        assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
        assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes


def test_every_section_is_there_and_linked(grpo_report, ppo_report):
    for files in (grpo_report, ppo_report):
        page = page_of(files)
        assert [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")] == SECTIONS
        targets = {value for _, name, value in page.attributes if name == "id"}
        links = [value[1:] for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
        assert links == SECTIONS
        assert set(links) <= targets


def test_ids_are_unique(ppo_report):
    ids = [value for _, name, value in page_of(ppo_report).attributes if name == "id"]
    assert sorted(ids) == sorted(set(ids))


def test_references_inside_pictures_are_kept(ppo_report):
    page = page_of(ppo_report)
    ids = {value for _, name, value in page.attributes if name == "id"}
    used = {value[1:] for tag, name, value in page.attributes if tag == "use" and name == "href"}
    clips = {match for _, _, value in page.attributes for match in re.findall(r"url\(#([^)]+)\)", value)}
    assert used
    assert clips
    assert used | clips <= ids


def test_pictures_take_the_colours_of_the_page(grpo_report):
    html = grpo_report.html.read_text()
    svgs = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(svgs) >= 10
    for svg in svgs:
        assert "var(--" in svg
        assert not re.search(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b", svg), "a colour that no dark page can change"
    assert "prefers-color-scheme: dark" in html


def test_pictures_lie_beside_as_files(grpo_report):
    folder = grpo_report.html.parent / "figures"
    names = re.findall(r'id="f-(\w+)"', grpo_report.html.read_text())
    assert {"reward", "validation", "entropy", "ppo_kl", "grad_norm", "lengths", "phases", "throughput"} <= set(names)
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_algorithms_show_what_is_theirs(grpo_report, ppo_report):
    grpo, ppo = (files.html.read_text() for files in (grpo_report, ppo_report))
    for html, present, absent in ((grpo, "f-groups", "f-critic"), (ppo, "f-critic", "no-such")):
        assert f'id="{present}"' in html
        assert f'id="{absent}"' not in html
    assert "Critic explains returns" in ppo
    assert "Critic explains returns" not in grpo
    assert "kl in the reward" in ppo
    assert "PPO · countdown" in ppo
    assert "GRPO · countdown" in grpo


def test_a_run_still_going_says_so(ppo_report):
    words = page_of(ppo_report).words
    assert "step 30 of 100" in words
    assert "The run has 30 of 100 steps" in words


# ---------------------------------------------------------------- markdown

HOSTILE = (
    "</td></table></script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>",
    '"><svg onload=alert(1)> ![x](http://evil.example/y) | a | `b` \n# head\n<!-- {{ 7*7 }} {% raw %} $x$ \x00',
)


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "hostile"
    config = write_run(run_dir, experiment="debug", num_steps=2, num_problems=8, only=FEW)
    for name, step in (("before", 0), ("after", 2)):
        validation(config, name, step, 0.5, 8, texts=HOSTILE).write(run_dir / "validation" / f"{name}.json")
    with Journal(run_dir / JOURNAL_FILE) as journal:
        journal.append_event("<b>odd</b>", 2, {"message": HOSTILE[0] + HOSTILE[1]})
    Origin(config, command=("millrace", "run", HOSTILE[0]), environment={"<i>": HOSTILE[1]}).write(run_dir)
    return build_report(run_dir)


def test_hostile_text_is_text_in_a_page(hostile_report):
    html = hostile_report.html.read_text()
    page = parse(html)
    assert not {"script", "img", "b", "i"} & (set(page.tags) - {"b"})
    assert page.tags.count("b") == html.count("</b>") == len(re.findall(r'class="label">[^<]*</span><b>', html))
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for text in HOSTILE:
        assert text.replace("\x00", "\ufffd") in page.words.replace("\x00", "\ufffd")
    assert "{{ 7*7 }}" in page.words


def test_hostile_text_is_text_in_markdown():
    """The summary goes into Prefect's and MLflow's pages, which render Markdown."""
    tile = Tile(HOSTILE[1], HOSTILE[0], HOSTILE[1])
    finding = Finding(HOSTILE[0], HOSTILE[1], "", HOSTILE[0], HOSTILE[1])
    report = Report("run report", HOSTILE[0], HOSTILE[1], HOSTILE[0], "", (), tiles=(tile,), findings=(finding,),
                    missing=HOSTILE, facts=HOSTILE, failure=HOSTILE[1])  # fmt: skip
    text = markdown_of(report)
    page = parse(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert set(page.tags) <= {"h1", "h2", "p", "strong", "ul", "li"}
    assert page.attributes == []
    assert HOSTILE[0] in page.words
    assert r"http\://evil" in text, "readers that make links of bare addresses find none"
    assert "http://" not in text
    assert "&#" not in text, "Prefect's page shows such an entity as it is written"


# ---------------------------------------------------------------- missing parts


def test_one_step_and_no_validation(tmp_path):
    run_dir = tmp_path / "young"
    write_run(run_dir, experiment="debug", num_steps=1, validate=False, only=FEW)
    files = build_report(run_dir)
    words = page_of(files).words
    assert "No validation on held-out problems yet" in words
    assert "The run has 1 of 2 steps" in words
    assert "Training reward" in words
    verdicts = {found["topic"]: found["verdict"] for found in json.loads(files.json.read_text())["findings"]}
    assert verdicts["Learned"] == verdicts["Converged"] == verdicts["Stable"] == "not known"
    assert table(files, "samples") == []


def test_nothing_but_settings(tmp_path):
    config = load_config([], experiment="debug")
    Origin(config).write(tmp_path)
    files = build_report(tmp_path)
    words = page_of(files).words
    assert "metrics.jsonl is not there" in words
    assert "run.json has no stages" in words
    assert "Not measured: Reward" in words
    assert "step 0 of 2" in words


def test_only_one_validation(tmp_path):
    run_dir = tmp_path / "half"
    config = write_run(run_dir, experiment="debug", num_steps=2, validate=False, only=FEW)
    validation(config, "before", 0, 0.3, 10).write(run_dir / "validation" / "before.json")
    files = build_report(run_dir)
    assert "No validation after training with its answers" in page_of(files).words
    assert {row["Figure"] for row in table(files, "held_out")} >= {"reward/mean@2", "reward/greedy"}


def test_figures_of_the_journal_serve_where_the_files_are_gone(tmp_path):
    run_dir = tmp_path / "pruned"
    write_run(run_dir, num_steps=40, overrides=("trainer.total_steps=40",), only=FEW)
    shutil.rmtree(run_dir / "validation")
    files, found = build_report(run_dir), read_run(run_dir).held_out("reward/mean@4")
    assert [step for step, _ in found] == [0, 20, 40]
    last = load_journal(run_dir / JOURNAL_FILE).steps[-1].metrics
    name = "val-core/countdown/reward/mean@4"
    assert found[-1][1] == Interval(last[name], last[f"{name}/ci_low"], last[f"{name}/ci_high"])
    assert f"{last[name]:.3f}" in files.summary.split("## ")[0]


def test_a_validation_that_the_journal_has_not_is_on_the_curve(tmp_path):
    """As where total_steps was lowered to the step that was saved: only after.json has that step."""
    config = write_run(tmp_path, num_steps=30, num_problems=6, validate=False, only=FEW)
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_step(20, {"val-core/countdown/reward/mean@4": 0.5})
    for name, step in (("before", 0), ("step-000020", 20), ("after", 30), ("step-000040", 40)):
        validation(config, name, step, 0.3, 6).write(tmp_path / "validation" / f"{name}.json")
    found = dict(read_run(tmp_path).held_out("reward/mean@4"))
    assert list(found) == [0, 20, 30], "the run has gone back before step 40"
    assert found[20].value == 0.5
    assert found[30] == validation(config, "after", 30, 0.3, 6).intervals["reward/mean@4"]


def test_after_training_is_the_newest_validation():
    """As where a finished run was given more steps."""
    config = load_config([], experiment="countdown_demo")
    found = {
        name: validation(config, name, step, 0.3, 6)
        for name, step in (("after", 20), ("before", 0), ("step-000020", 20))
    }
    assert record_of({}, validations=found).after is found["after"]
    found["step-000040"] = validation(config, "step-000040", 40, 0.3, 6)
    assert record_of({}, validations=found).after is found["step-000040"]


@pytest.mark.parametrize("with_files", [True, False])
def test_the_held_out_reward_is_of_the_newest_number_of_samples(tmp_path, with_files):
    """As where validation.samples_per_problem was changed, and changed back."""
    write_run(tmp_path, num_steps=0, validate=False)
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        for step, samples in ((0, 2), (10, 4), (20, 8), (30, 2), (40, 4)):
            changed = [f"validation.samples_per_problem={samples}"]
            config = load_config(changed, experiment="countdown_demo")
            result = validation(config, f"step-{step:06d}", step, 0.3, 6)
            journal.append_step(step, result.summary())
            if with_files:
                result.write(tmp_path / "validation" / f"{result.name}.json")
    record = read_run(tmp_path)
    assert record.reward_statistic == "reward/mean@4"
    assert [step for step, _ in record.held_out(record.reward_statistic)] == [10, 40]


def test_the_head_says_on_what_it_ran_and_when(tmp_path):
    write_run(tmp_path, experiment="debug", num_steps=2, validate=False, only=FEW)
    found = {"num_workers": 2, "device_name": "NVIDIA H200", "num_parameters": 1_234_567}
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_event(WORKERS, 0, {**found, "device_name": "of the first attempt"})
        journal.append_event(WORKERS, 2, found)
    steps = load_journal(tmp_path / JOURNAL_FILE).steps
    facts = report_of({"run": read_run(tmp_path)}, lambda charts: Gallery(())).facts
    assert facts[:2] == ("2 × NVIDIA H200", "1,234,567 parameters")
    assert facts[2] == f"begun {datetime.fromtimestamp(steps[0].time, UTC):%Y-%m-%d %H:%M} UTC"
    assert facts[3] == f"{numbers.duration(steps[-1].time - steps[0].time)} by the clock"
    assert " · ".join(facts) in page_of(build_report(tmp_path)).words


def test_a_picture_of_zeros_is_words(tmp_path):
    curves = {"actor/ppo_kl": [0.0, 0.0], "actor/entropy": [0.0, 0.1], "response_length/clip_ratio": [0.0, 0.0]}
    config = load_config([], experiment="debug")
    assert config.trainer.mini_batch_size == config.trainer.batch_size
    found = gallery_of(learning_charts(record_of(curves, config=config)), tmp_path)
    assert [picture.name for picture in found.pictures] == ["entropy"]
    assert found.flat == (f"KL ({ONE_UPDATE})", "Answers cut at the limit")
    assert "Answer length" in found.absent


def test_legends_are_whole():
    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.4, 2.7), layout="constrained")
        axes = figure.subplots()
        for place in range(3):
            axes.plot([0, 1], [0, place], label=f"algo.setting={'x' * 40 * (place + 1)}, optim.lr=0.0003 (3 seeds)")
        legend(axes)
        figure.draw_without_rendering()
    box = axes.get_legend().get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1


def test_no_definition_has_a_placeholder():
    assert [row.name for row in metric_docs() if "<" in row.definition] == []


def test_damaged_parts_are_named_and_the_rest_is_shown(tmp_path):
    run_dir = tmp_path / "damaged"
    write_run(run_dir, experiment="debug", num_steps=2, only=FEW)
    (run_dir / "validation" / "after.json").write_text("{")
    (run_dir / "checkpoints" / "step-000002").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-000002" / "manifest.json").write_text("no")
    with (run_dir / JOURNAL_FILE).open("a") as journal:
        journal.write("not json\n")
    words = page_of(build_report(run_dir)).words
    for part in (
        "validation/after.json is left out",
        "step-000002/manifest.json",
        "1 unreadable lines",
    ):
        assert part in words


def test_a_validation_is_read_once_and_again_when_it_has_changed(tmp_path):
    write_run(tmp_path / "run", num_steps=10, num_problems=4)
    first, second = (read_run(tmp_path / "run").validations["after"] for _ in range(2))
    assert first is second
    replace(first, step=first.step + 1).write(tmp_path / "run" / "validation" / "after.json")
    assert read_run(tmp_path / "run").validations["after"].step == first.step + 1


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"run\.json: cannot be read .*name the folder of a run"):
        build_report(tmp_path)
    (tmp_path / "run.json").write_text('{"settings": {"trainer": {"totl_steps": 3}}}')
    with pytest.raises(DataError, match=r"trainer\.totl_steps"):
        build_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_values_that_were_not_finite_do_not_break_it(tmp_path):
    run_dir = tmp_path / "nan"
    write_run(run_dir, experiment="debug", num_steps=2, validate=False, only=FEW)
    with Journal(run_dir / JOURNAL_FILE) as journal:
        journal.append_step(2, {"actor/pg_loss": float("nan"), "actor/grad_norm": float("inf")})
    files = build_report(run_dir)
    (check,) = [row for row in table(files, "checks") if row["Check"] == "Numbers are finite"]
    assert (check["Result"], check["Measured"]) == (False, 1.0)
    assert "actor/grad_norm, actor/pg_loss at 1 steps, first 2" in page_of(files).words
    shown = {row["Metric"] for row in table(files, "metrics")}
    assert shown
    assert not shown & {"actor/pg_loss", "actor/grad_norm"}


# ---------------------------------------------------------------- lineage and reproduction


def test_lineage_is_shown(tmp_path):
    run_dir = tmp_path / "run"
    config = write_run(run_dir, experiment="debug", num_steps=2, validate=False, only=FEW)
    stages = (Stage("dataset", "0123456789abcdef", "artifacts/datasets/0123456789abcdef", {"train rows": 64}),)
    command = ("millrace", "run", "experiment=debug")
    Origin(config, {}, stages, command, "c0ffee", True, {"torch": "2.13.0"}).write(run_dir)
    facts = {"kind": "checkpoint", "step": 2, "created": "", "settings_fingerprint": "", "metrics": {}}
    with published_directory(run_dir / "checkpoints" / "step-000002", facts) as folder:
        (folder / "weights").write_bytes(b"12345678")
    files = build_report(run_dir)
    words = page_of(files).words
    for part in ("0123456789abcdef", "train rows 64", "millrace run experiment=debug", "c0ffee + changes", "2.13.0"):
        assert part in words
    assert "is not recorded" not in words
    assert table(files, "checkpoints") == [{"Name": "step-000002", "Size": 8e-06}]


def test_a_report_holds_no_password_of_an_address(tmp_path):
    config = load_config(["experiment=debug", "tracking.uri=http://me:SECRET@host"])
    tables = repr(settings_tables(config))
    assert "http://me:***@host" in tables
    assert "SECRET" not in tables
    write_run(tmp_path, experiment="debug", num_steps=1, validate=False, only=FEW)
    typed = ("millrace", "run", "tracking.uri=http://me:SECRET@host", "tags.why=two words")
    Origin(RunConfig(), command=typed).write(tmp_path)
    assert "SECRET" not in (tmp_path / "run.json").read_text()
    words = page_of(build_report(tmp_path)).words
    assert "'tracking.uri=http://me:***@host' 'tags.why=two words'" in words
    assert "SECRET" not in words


# ---------------------------------------------------------------- short forms


def test_the_summary_is_the_head(grpo_run, grpo_report):
    text = summary_markdown(grpo_run)
    assert text.startswith("# countdown\\_demo-s1-0a1b2c3d\n")
    assert "## What was learned" in text
    assert len(text) < 6_000
    assert text == grpo_report.summary


def test_the_memory_plan_stands_beside_the_peaks(tmp_path, grpo_report):
    assert "No memory plan was made for this run" in page_of(grpo_report).words
    write_run(tmp_path / "run", num_steps=3, validate=False, only=(*FEW, "perf/cpu_memory_used_gb"))
    plan = {"parts": {"weights": 2_000_000_000, "optimizer": 6_000_000_000}, "capacity_bytes": 80_000_000_000,
            "device": "a GPU", "notes": ["Activations are of the longest answer."]}  # fmt: skip
    (tmp_path / "run" / "memory_plan.json").write_text(json.dumps(plan))
    files = build_report(tmp_path / "run")
    planned = {row["Part"]: row["Planned"] for row in table(files, "memory_plan")}
    assert planned == {"weights": 2e9, "optimizer": 6e9, "Sum": 8e9, "The device has": 80e9}
    peaks = {row["Metric"]: row for row in table(files, "memory_peak")}
    record = read_run(tmp_path / "run")
    assert peaks
    for metric, row in peaks.items():
        assert row["Value"] == max(step.metrics[metric] for step in record.training_steps)
    (tmp_path / "run" / "memory_plan.json").write_text("[]")
    assert "the report goes on without this memory plan" in page_of(build_report(tmp_path / "run")).words


def test_validations_and_checkpoints_are_timed_next_to_the_step():
    record = record_of(
        {"timing_s/step": [4.0, 5.0], "timing_s/testing": [2.0], "timing_s/save_checkpoint": [0.0, 1.5]},
    )
    rows = {row[0].text: row[1].value for row in phase_table(record).rows}
    assert rows["Checkpoint (mean over 2 steps, not in the step)"] == 0.75
    assert rows["Validation (once, not in the step)"] == 2.0


def test_text_between_backticks_is_code_and_a_task_of_one_difficulty_has_no_picture_of_it(tmp_path):
    write_run(tmp_path / "run", num_steps=2, num_problems=4)
    for file in (tmp_path / "run" / "validation").iterdir():
        text = re.sub(r'"difficulty": ?\d+', '"difficulty":2', file.read_text())
        file.write_text(text)
    page = build_report(tmp_path / "run").html.read_text()
    assert "<code>val-core/all</code>" in page
    assert "`" not in re.sub(r"<(script|style|svg|pre)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert "Reward by difficulty" not in page


def test_answers_without_a_score_are_neither_right_nor_wrong(tmp_path):
    config = write_run(tmp_path, num_steps=2, num_problems=12, only=FEW)
    file = tmp_path / "validation" / "after.json"
    result = ValidationResult.read(file)
    failed = [
        replace(problem, greedy=unscored(problem.greedy), samples=tuple(map(unscored, problem.samples)))
        for problem in result.problems[:8]
    ]
    replace(result, problems=(*failed, *result.problems[8:])).write(file)
    record = read_run(tmp_path)
    wanted = {problem.prompt_text for problem in result.problems[8:]}
    shown = {row[1].text for row in sample_table(record).rows}
    assert shown
    assert shown <= wanted
    alone = record_of({}, validations={"after": record.after}, config=config)
    (held_out,) = [
        found for found in section_of({"alone": alone}, lambda charts: None).blocks if found.name == "held_out"
    ]
    assert held_out.note.startswith("4 held-out problems;")


def unscored(answer):
    return replace(answer, score=0.0, parts={}, failure="the judge was away")


# ---------------------------------------------------------------- the supervised stage


def test_the_supervised_stage_has_its_curve(tmp_path):
    run_dir = tmp_path / "runs" / "begun"
    write_run(run_dir, num_steps=2, num_problems=4, only=FEW)
    with_stages(run_dir, Stage("filtered", "0a", "x"), Stage("start model", "1b", "y"))
    stage = tmp_path / "warm-starts" / "warm-start-1b"
    chart = next(one for one in learning_charts(read_run(run_dir)) if one.name == "supervised")
    assert gallery_of([chart], tmp_path).absent == ("Supervised stage",), "its folder is gone"
    stage.mkdir(parents=True)
    losses = [4.0, 2.5, 1.25]
    with Journal(stage / JOURNAL_FILE) as journal:
        journal.append_step(0, {"sft/held_out_loss": 4.5})
        for step, loss in enumerate(losses, start=1):
            journal.append_step(step, {"sft/loss": loss})
        journal.append_step(4, {"sft/held_out_loss": 1.5})
    figure = Figure()
    next(one for one in learning_charts(read_run(run_dir)) if one.name == "supervised").draw(figure)
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].get_lines()}
    assert drawn == {"training": ([1, 2, 3], losses), "held out": ([0, 4], [4.5, 1.5])}


def test_a_run_may_be_named_by_a_relative_folder_and_its_stage_be_unreadable(tmp_path, monkeypatch):
    write_run(tmp_path / "begun", num_steps=2, num_problems=4, only=FEW)
    with_stages(tmp_path / "begun", Stage("start model", "1b", "y"))
    (tmp_path.parent / "warm-starts" / "warm-start-1b").mkdir(parents=True)
    (tmp_path.parent / "warm-starts" / "warm-start-1b" / JOURNAL_FILE).write_bytes(b"\x00no journal\n")
    monkeypatch.chdir(tmp_path)
    assert read_run(Path("begun")).supervised_steps == ()


def test_a_run_without_a_supervised_stage_is_not_said_to_lack_its_curve(tmp_path):
    write_run(
        tmp_path / "runs" / "bare", num_steps=2, num_problems=4, only=FEW, overrides=("warm_start.enabled=false",)
    )
    assert "supervised" not in [one.name for one in learning_charts(read_run(tmp_path / "runs" / "bare"))]
