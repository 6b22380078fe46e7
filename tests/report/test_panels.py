"""Pictures and tables of metrics."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from rlcore.config.compose import load_config
from rlcore.report import document
from rlcore.report.panels import LEARNING, ONE_UPDATE, charts_of
from rlcore.report.plots import Chart, gallery_of
from rlcore.report.record import RunRecord, read_run
from rlcore.tracking.journal import JOURNAL_FILE, Journal, load_journal
from rlcore.tracking.lineage import Stage
from tests.helpers.reports import FEW, page_of, record_of, series, table, with_stages, write_run

pytestmark = pytest.mark.slow


def learning_charts(record: RunRecord) -> list[Chart]:
    return charts_of({"run": [record]}, LEARNING)


def test_last_values_match_last_step(grpo_run, grpo_report):
    last = load_journal(grpo_run / JOURNAL_FILE).steps[-1]
    rows = table(grpo_report, "metrics")
    assert {row["Metric"]: row["Value"] for row in rows} == dict(last.metrics)
    shown = {row[0]: row[1] for row in page_of(grpo_report).tables["metrics"][1:]}
    assert shown == {name: document.compact(value) for name, value in last.metrics.items()}
    undefined = [row["Metric"] for row in rows if not row["Definition"]]
    assert undefined == []


def test_measures_match_journal(grpo_run, grpo_report):
    measures = [*table(grpo_report, "convergence"), *table(grpo_report, "performance")]
    assert all(row["Definition"] for row in measures)
    rows = {row["Measure"]: row["Value"] for row in measures}
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
    assert rows["Seconds per step"] == pytest.approx(mean)
    assert f"{document.duration(mean)} per step" in page_of(grpo_report).words
    assert rows["Tokens trained on"] == pytest.approx(sum(series(grpo_run, "perf/total_num_tokens")))
    assert rows["Throughput, median"] == pytest.approx(np.median(series(grpo_run, "perf/throughput")))
    lengths = series(grpo_run, "response_length/mean")[-20:]
    assert rows["Response length, last third"] == pytest.approx(np.mean(lengths))
    peaks = {row["Metric"]: row["Value"] for row in table(grpo_report, "memory_peak")}
    assert peaks
    assert all(value == max(series(grpo_run, metric)) for metric, value in peaks.items())


def test_chart_of_zeros_is_named(tmp_path):
    curves = {"actor/ppo_kl": [0.0, 0.0], "actor/entropy": [0.0, 0.1], "response_length/clip_ratio": [0.0, 0.0]}
    config = load_config([], experiment="debug")
    assert config.trainer.mini_batch_size == config.trainer.batch_size
    found = gallery_of(learning_charts(record_of(curves, config=config)), tmp_path)
    assert [picture.name for picture in found.pictures] == ["entropy"]
    assert found.flat == (f"KL ({ONE_UPDATE})", "Responses truncated at the limit")
    assert "Response length" in found.absent


def test_supervised_stage_has_curve(tmp_path):
    run_dir = tmp_path / "runs" / "begun"
    write_run(run_dir, num_steps=2, num_problems=4, only=FEW)
    with_stages(run_dir, Stage("filtered", "0a", "x"), Stage("initial policy", "1b", "y"))
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
    bare = load_config(["warm_start.enabled=false"], experiment="countdown_demo")
    assert "supervised" not in [one.name for one in learning_charts(record_of({}, config=bare))]
