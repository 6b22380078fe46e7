"""A run that goes on, as its page and its artifact show it: curves and last answers, in a real browser too."""

import base64
import re
from pathlib import Path

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from flows.live import MOST_ANSWERS, MOST_CHARACTERS, WIDTH, Followed, curve_svg, last_answers, picture
from flows.server.guard import Guard
from flows.stack.answers import with_answers
from rlcore.answers.store import SCHEMA, AnswerWriter
from rlcore.config import AnswersConfig, RunConfig
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import Journal
from tests.answers.made import Made
from tests.flows.test_answers_page import HOSTILE, elsewhere, served
from tests.report.chromium import open_tab

RUN = "made-s1"


def add_steps(layout: RunLayout, *steps: int, reward: float = 0.5) -> None:
    journal = Journal(layout.journal)
    for step in steps:
        journal.append_step(step, {"critic/score/mean": reward, "actor/entropy": 1.0 / (1 + step), "other": 1.0})
    journal.close()


def add_answers(layout: RunLayout, step: int, **more: str) -> None:
    writer = AnswerWriter(layout.answers, AnswersConfig())
    rows = [row | more for row in Made(step, groups=8).of_step(step).to_pylist()]
    writer.add(pa.Table.from_pylist(rows, schema=SCHEMA))
    writer.begin_part()
    writer.settle()


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path, tmp_path / "runs" / RUN)
    layout.run_dir.mkdir(parents=True)
    layout.settings_json.write_text(RunConfig(name="made", tags={"token": "hf_secret"}).model_dump_json())
    return layout


def points(curves: list[tuple[str, str]], title: str) -> int:
    """Points of a curve's line."""
    svg = base64.b64decode(dict(curves)[title].partition("base64,")[2]).decode()
    (line,) = re.findall(r'<polyline points="([^"]*)"', svg)
    return len(line.split())


def test_each_look_adds_what_the_journal_has_got_and_a_journal_that_was_cut_is_read_anew(layout: RunLayout) -> None:
    followed = Followed(RunConfig(), layout.journal)
    assert followed.curves() == []
    add_steps(layout, 1, 2, 3)
    assert [title for title, _ in followed.curves()] == ["reward", "entropy, nats a token"]
    assert points(followed.curves(), "reward") == 3
    with layout.journal.open("ab") as file:
        file.write(b'{"step": 4, "time"')  # half a line
    assert points(followed.curves(), "reward") == 3
    lines = layout.journal.read_bytes().splitlines(keepends=True)
    layout.journal.write_bytes(b"".join(lines[:1]))
    assert points(followed.curves(), "reward") == 1
    add_steps(layout, 2)
    assert points(followed.curves(), "reward") == 2
    layout.journal.write_bytes(b"".join(lines[:1]))
    add_steps(layout, *range(2, 32), reward=0.7)  # it is longer already than at the last look
    assert followed.curves() == Followed(RunConfig(), layout.journal).curves()


def test_of_several_sources_the_curve_of_held_out_problems_is_that_of_all_of_them(layout: RunLayout) -> None:
    followed, curves = Followed(RunConfig(), layout.journal), []
    for step, of_all in ((1, {}), (2, {"val-core/all/reward/mean@4": 0.75})):
        with Journal(layout.journal) as journal:
            journal.append_step(step, {"val-core/a/reward/mean@4": 0.25, "val-core/b/reward/mean@4": 1.0, **of_all})
        curves.append(followed.curves())
    drawn = [[("on held-out problems", [(1, 0.25)])], [("on held-out problems", [(2, 0.75)])]]
    assert curves == [[("reward", picture(lines))] for lines in drawn]


def test_a_long_run_has_small_pictures(layout: RunLayout) -> None:
    add_steps(layout, *range(1, 5_001))
    curves = Followed(RunConfig(), layout.journal).curves()
    assert points(curves, "reward") <= 301
    assert all(len(address) < 10_000 for _, address in curves)


def test_large_figures_at_the_axis_are_short() -> None:
    found = curve_svg([("tokens a second", [(1, 9_800.0), (2, 16_900.0)])])
    assert ">16.9k<" in found
    assert ">9800<" in found


@pytest.mark.program("chromium")
def test_no_figure_at_the_axis_is_cut(tmp_path: Path) -> None:
    pairs = [(-123_456.0, 1_234_567.0), (-0.123456, -0.0123456), (-9_876.5, 9_876.5), (2.34e-4, 1.0), (1.0, 16_934.0)]
    with open_tab(tmp_path / "profile") as tab:
        for number, (low, high) in enumerate(pairs):
            file = tmp_path / f"{number}.svg"
            file.write_text(curve_svg([("in training", [(1, low), (2, high)]), ("on held-out problems", [(1, low)])]))
            tab.open(file)
            boxes = tab.value(
                "[...document.querySelectorAll('text')].map((each) => each.getBBox()).map((b) => [b.x, b.y, b.width])"
            )
            assert all(x >= 0 and y >= 0 and x + width <= WIDTH for x, y, width in boxes), boxes


def test_the_last_answers_are_few_and_short(layout: RunLayout) -> None:
    assert last_answers(layout) == []
    add_answers(layout, 1, answer="early")
    add_answers(layout, 2, answer="x" * 10_000, prompt="y" * 10_000)
    found = last_answers(layout)
    assert len(found) == MOST_ANSWERS
    assert {one["step"] for one in found} == {2}
    add_answers(layout, 3)
    assert len({one["prompt"] for one in last_answers(layout)}) > 1
    assert all(len(text) == MOST_CHARACTERS + 2 for one in found for text in (one["prompt"], one["answer"]))


@pytest.fixture
def client(layout: RunLayout) -> TestClient:
    return TestClient(Guard(with_answers(layout.root, elsewhere)), base_url="http://127.0.0.1:5000")


def test_the_page_is_told_state_curves_and_answers_and_no_setting(client: TestClient, layout: RunLayout) -> None:
    add_steps(layout, 1, 2)
    add_answers(layout, 2)
    told = client.get("/answers/now")
    found = told.json()
    assert (found["runs"], found["run_id"], found["step"], found["state"]) == ([RUN], RUN, 2, "not begun")
    assert found["reward"] == 0.5
    assert [title for title, _ in found["curves"]] == ["reward", "entropy, nats a token"]
    assert len(found["answers"]) == MOST_ANSWERS
    assert "hf_secret" not in told.text
    assert client.get("/answers/now", params={"run": "made"}).json()["run_id"] == RUN
    (layout.run_dir.parent / "made-s2").mkdir()
    for name, why in {"../made-s1": "is none of this root", "made": "is the beginning of several runs"}.items():
        refused = client.get("/answers/now", params={"run": name})
        assert refused.status_code == 400
        assert refused.json() == {"error": f"run {name!r}: {why}", "runs": [RUN]}
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        assert client.get("/answers/now", headers=headers).status_code == 403
        assert client.get("/answers/live", headers=headers).status_code == 403
    old = layout.run_dir.with_name("old")
    old.mkdir()
    (old / "settings.json").write_text('{"format": 0}')
    refused = client.get("/answers/now", params={"run": "old"})
    assert refused.status_code == 400
    assert "settings of this version" in refused.json()["error"]
    assert set(refused.json()["runs"]) == {"old", RUN}


def test_a_root_without_runs(tmp_path: Path) -> None:
    client = TestClient(with_answers(tmp_path, elsewhere), base_url="http://127.0.0.1")
    assert client.get("/answers/now").json() == {"runs": []}


@pytest.mark.program("chromium")
def test_the_page_of_an_unknown_run_offers_those_that_there_are(layout: RunLayout, tmp_path: Path) -> None:
    add_steps(layout, 1)
    with served(layout.root) as url, open_tab(tmp_path / "profile") as tab:
        tab.call("Page.navigate", url=f"{url}live?run=mine-s7")
        tab.wait("document.querySelector('#asked')?.innerText === 'choose one'")
        assert tab.texts("#state") == ["run 'mine-s7': is none of this root"]
        assert tab.value("document.querySelector('#run').selectedIndex") == -1
        tab.choose("#run", RUN)
        tab.wait("document.querySelector('#state')?.innerText.includes('step 1 of')")


@pytest.mark.program("chromium")
def test_the_page_follows_the_run_without_a_reload(layout: RunLayout, tmp_path: Path) -> None:
    add_steps(layout, 1)
    with served(layout.root) as url, open_tab(tmp_path / "profile") as tab:
        tab.call("Page.navigate", url=f"{url}live")
        tab.wait("document.querySelector('#state')?.innerText.includes('step 1 of')")
        tab.value("window.stays = true")
        assert tab.value("document.querySelector('#none').hidden") is False
        before = tab.value("document.querySelector('#curves img').src")

        add_steps(layout, 2, 3, reward=0.75)
        add_answers(layout, 3, answer=HOSTILE)
        tab.wait("document.querySelector('#state')?.innerText.includes('step 3 of')")
        assert "reward 0.75" in tab.texts("#state")[0]
        tab.wait("document.querySelectorAll('.answer').length === 6")
        assert tab.texts(".answer .verbatim")[1] == HOSTILE
        assert tab.value("document.title") == "Live · Millrace", "what a model wrote is text"
        assert tab.value("document.querySelector('#curves img').src") != before
        assert tab.value("document.querySelector('#curves img').naturalWidth") > 0, "the picture is drawn"
        assert tab.value("window.stays") is True
        own = (f"asks for {url}", "asks for data:image/svg+xml;base64,")
        assert [problem for problem in tab.problems if not problem.startswith(own)] == []
