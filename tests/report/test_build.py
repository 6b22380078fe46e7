"""The report of a run: its head and sections, and the parts that are missing."""

import json
import re
import shutil
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from rlcore.config.compose import load_config
from rlcore.evaluation.stats import Interval
from rlcore.report import document
from rlcore.report.build import build_report, report_of, summary_markdown
from rlcore.report.document import Gallery
from rlcore.report.record import read_run
from rlcore.tracking.journal import JOURNAL_FILE, WORKERS, Journal, load_journal
from rlcore.tracking.lineage import Origin
from tests.helpers.reports import FEW, HOSTILE, page_of, parse, table, validation, write_run

pytestmark = pytest.mark.slow
SECTIONS = ["learned", "curves", "held_out", "answers", "convergence", "performance", "configuration", "origin",
            "journal"]  # fmt: skip


def test_summary_has_head_and_gain(grpo_run, grpo_report):
    text = summary_markdown(grpo_run)
    assert text.startswith("# countdown\\_demo-s1-0a1b2c3d\n")
    assert "## Findings" in text
    assert len(text) < 6_000
    assert text == grpo_report.summary
    found = table(grpo_report, "held_out")[0]
    gain = f"{found['Before']['value']:.3f} → {found['After']['value']:.3f}"
    assert gain in page_of(grpo_report).words
    assert gain in text


def test_report_of_same_folder_has_same_bytes(grpo_run, grpo_report, tmp_path):
    again = build_report(grpo_run, target=tmp_path)
    assert grpo_report.summary == again.summary
    for first, second in ((grpo_report.html, again.html), (grpo_report.json, again.json)):
        assert first.read_bytes() == second.read_bytes()


def test_pages_load_no_resources(grpo_report, ppo_report):
    for files in (grpo_report, ppo_report):
        html = files.html.read_text()
        page = parse(html)
        assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
        loading = [(tag, name, value) for tag, name, value in page.attributes
                   if name in ("src", "href", "action", "srcset", "data") and not value.startswith("#")]  # fmt: skip
        assert loading == []
        assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
        assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes


def test_sections_are_present_and_linked(grpo_report, ppo_report):
    for files in (grpo_report, ppo_report):
        page = page_of(files)
        assert [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")] == SECTIONS
        targets = {value for _, name, value in page.attributes if name == "id"}
        links = [value[1:] for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
        assert links == SECTIONS
        assert set(links) <= targets
        titles = re.findall(r"<(?:h2|h3|summary)>(.*?)</", files.html.read_text())
        assert not [title for title, following in pairwise(titles) if title == following], "a heading stands twice"
    grpo, ppo = (files.html.read_text() for files in (grpo_report, ppo_report))
    assert ['id="f-critic"' in html for html in (grpo, ppo)] == [False, True]
    assert ["Critic explains the returns" in html for html in (grpo, ppo)] == [False, True]
    assert 'id="f-groups"' in grpo
    assert "GRPO · countdown" in grpo
    words = page_of(ppo_report).words
    for part in ("kl in the reward", "PPO · countdown", "step 30 of 100", "The run has 30 of 100 steps"):
        assert part in words


def test_hostile_text_stays_text_in_page(tmp_path):
    config = write_run(tmp_path, experiment="debug", num_steps=2, num_problems=8, only=FEW)
    for name, step in (("before", 0), ("after", 2)):
        validation(config, name, step, 0.5, 8, texts=HOSTILE).write(tmp_path / "validation" / f"{name}.json")
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_event("<b>odd</b>", 2, {"message": HOSTILE[0] + HOSTILE[1]})
    Origin(config, command=("millrace", "run", HOSTILE[0]), environment={"<i>": HOSTILE[1]}).write(tmp_path)
    html = build_report(tmp_path).html.read_text()
    page = parse(html)
    assert not {"script", "img", "b", "i"} & (set(page.tags) - {"b"})
    assert page.tags.count("b") == html.count("</b>") == len(re.findall(r'class="label">[^<]*</span><b>', html))
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for text in HOSTILE:
        assert text.replace("\x00", "\ufffd") in page.words.replace("\x00", "\ufffd")
    assert "{{ 7*7 }}" in page.words


def test_report_of_one_step_without_validation(tmp_path):
    write_run(tmp_path, experiment="debug", num_steps=1, validate=False, only=FEW)
    files = build_report(tmp_path)
    words = page_of(files).words
    assert "No validation on held-out problems yet" in words
    assert "The run has 1 of 2 steps" in words
    assert "Training reward" in words
    verdicts = {found["topic"]: found["verdict"] for found in json.loads(files.json.read_text())["findings"]}
    assert verdicts["Learned"] == verdicts["Converged"] == verdicts["Stable"] == "not known"
    assert table(files, "samples") == []


def test_report_of_settings_only(tmp_path):
    config = load_config([], experiment="debug")
    Origin(config).write(tmp_path)
    files = build_report(tmp_path)
    words = page_of(files).words
    assert "metrics.jsonl does not exist" in words
    assert "run.json has no stages" in words
    assert "Not measured: Reward" in words
    assert "step 0 of 2" in words


def test_report_with_one_validation(tmp_path):
    config = write_run(tmp_path, experiment="debug", num_steps=2, validate=False, only=FEW)
    validation(config, "before", 0, 0.3, 10).write(tmp_path / "validation" / "before.json")
    files = build_report(tmp_path)
    assert "No validation after training with responses" in page_of(files).words
    assert {row["Metric"] for row in table(files, "held_out")} >= {"reward/mean_at_2", "reward/greedy"}


def test_held_out_metrics_come_from_journal_without_files(tmp_path):
    write_run(tmp_path, num_steps=40, overrides=("trainer.total_steps=40",), only=FEW)
    shutil.rmtree(tmp_path / "validation")
    files, found = build_report(tmp_path), read_run(tmp_path).held_out("reward/mean_at_4")
    assert [step for step, _ in found] == [0, 20, 40]
    last = load_journal(tmp_path / JOURNAL_FILE).steps[-1].metrics
    name = "val-core/countdown/reward/mean_at_4"
    assert found[-1][1] == Interval(last[name], last[f"{name}/ci_low"], last[f"{name}/ci_high"])
    assert f"{last[name]:.3f}" in files.summary.split("## ")[0]


def test_head_has_devices_and_times(tmp_path):
    write_run(tmp_path, experiment="debug", num_steps=2, validate=False, only=FEW)
    found = {"num_workers": 2, "device_name": "NVIDIA H200", "num_parameters": 1_234_567}
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_event(WORKERS, 0, {**found, "device_name": "of the first attempt"})
        journal.append_event(WORKERS, 2, found)
    steps = load_journal(tmp_path / JOURNAL_FILE).steps
    facts = report_of({"run": read_run(tmp_path)}, lambda charts: Gallery(())).facts
    assert facts[:2] == ("2 × NVIDIA H200", "1,234,567 parameters")
    assert facts[2] == f"started {datetime.fromtimestamp(steps[0].time, UTC):%Y-%m-%d %H:%M} UTC"
    assert facts[3] == f"{document.duration(steps[-1].time - steps[0].time)} from the first to the last step"
    assert " · ".join(facts) in page_of(build_report(tmp_path)).words


def test_damaged_parts_are_reported(tmp_path):
    write_run(tmp_path, experiment="debug", num_steps=2, only=FEW)
    (tmp_path / "validation" / "after.json").write_text("{")
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000002" / "manifest.json").write_text("no")
    with (tmp_path / JOURNAL_FILE).open("a") as journal:
        journal.write("not json\n")
    words = page_of(build_report(tmp_path)).words
    for part in ("validation/after.json is omitted", "step-000002/manifest.json", "1 unreadable lines"):
        assert part in words


def test_nonfinite_values_are_reported(tmp_path):
    write_run(tmp_path, experiment="debug", num_steps=2, validate=False, only=FEW)
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_step(2, {"actor/pg_loss": float("nan"), "actor/grad_norm": float("inf")})
    files = build_report(tmp_path)
    (check,) = [row for row in table(files, "checks") if row["Check"] == "Finite numbers"]
    assert (check["Result"], check["Measured"]) == (False, 1.0)
    assert "actor/grad_norm, actor/pg_loss at 1 steps, first 2" in page_of(files).words
    shown = {row["Metric"] for row in table(files, "metrics")}
    assert shown
    assert not shown & {"actor/pg_loss", "actor/grad_norm"}
