"""Sample answers: a table in the report, and the page of answers as a file, clicked through in a real browser."""

import dataclasses
import json
import re
import shutil

import pytest

from rlcore.errors import DataError
from rlcore.evaluation.result import Response, ValidationResult
from rlcore.report.page import build_sample_browser, sample_table, validations_by_step
from rlcore.report.record import read_run
from tests.helpers.chromium import open_tab
from tests.helpers.reports import parse, validation, write_run

HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror="document.title=1"> & \u2028 \x00'
NUM_PROBLEMS = 40
EPISODE = "4\n[environment] reward -0.1\n[environment] <b>+\n6\n[environment] reward 1"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """40 problems at steps 0, 20 and 40; problem 3 is hostile, 5 is not validated at step 20, 7 is an episode."""
    folder = tmp_path_factory.mktemp("runs") / "browsed"
    config = write_run(folder, num_steps=1, num_problems=4, validate=False, only=("critic/score/mean",))
    for step in (0, 20, 40):
        result = validation(config, f"step-{step:06d}", step, 0.5, NUM_PROBLEMS)
        problems = list(result.problems)
        problems[3] = dataclasses.replace(
            problems[3], prompt_text=HOSTILE, greedy=Response(HOSTILE, 0.1, {}, 9, "length")
        )
        problems[7] = dataclasses.replace(problems[7], greedy=Response(EPISODE, 1.0, {"turns": 2.0}, 9, "stop"))
        if step == 20:
            del problems[5]
        dataclasses.replace(result, problems=tuple(problems)).write(folder / "validation" / f"step-{step:06d}.json")
    return folder


@pytest.fixture(scope="module")
def page(run_dir):
    return build_sample_browser(run_dir)


def data_of(page) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])


def result_at(run_dir, step: int) -> ValidationResult:
    return ValidationResult.read(run_dir / "validation" / f"step-{step:06d}.json")


def test_page_has_every_response_of_every_step(run_dir, page):
    data = data_of(page)
    assert [validation["step"] for validation in data["validations"]] == [0, 20, 40]
    assert len(data["problems"]) == NUM_PROBLEMS
    assert len(set(data["texts"])) == len(data["texts"])
    for index, step in enumerate((0, 20, 40)):
        shown = {problem["id"]: problem["at"][index] for problem in data["problems"]}
        for problem in result_at(run_dir, step).problems:
            validated = shown.pop(problem.prompt_id)
            assert validated["score"] == problem.mean_score
            assert [given["greedy"] for given in validated["answers"]] == [True] + [False] * len(problem.samples)
            for given, answer in zip(validated["answers"], [problem.greedy, *problem.samples], strict=True):
                assert data["texts"][given["text"]] == answer.text
                for name in ("score", "parts", "num_tokens", "finish_reason", "solved", "logprob"):
                    assert given[name] == getattr(answer, name)
        assert list(shown.values()) == ([None] if step == 20 else [])


def test_page_loads_nothing_and_runs_own_script(page):
    html = page.read_text()
    found = parse(re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", html, flags=re.DOTALL))
    assert found.tags.count("script") == 2
    assert not [name for _, name, _ in found.attributes if name in ("src", "href") or name.startswith("on")]
    policy = next(
        value for tag, name, value in found.attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    assert re.fullmatch(
        r"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-[\w+/=]+'", policy
    )


def test_larger_validation_of_a_step_is_shown(run_dir):
    small = result_at(run_dir, 20)
    large = dataclasses.replace(result_at(run_dir, 40), step=20, name="after")
    assert validations_by_step({"a": small, "b": large}) == [large]
    assert [result.step for result in validations_by_step({"z": result_at(run_dir, 40), "y": small})] == [20, 40]


def test_problems_with_smallest_change_are_omitted(run_dir, tmp_path):
    page = build_sample_browser(run_dir, target=tmp_path / "some.html", max_problems=10)
    kept = data_of(page)["problems"]
    assert len(kept) == 10
    assert "30 problems with the smallest change are omitted" in page.read_text()
    first, last = (result_at(run_dir, step) for step in (0, 40))
    changes = sorted(
        (abs(b.mean_score - a.mean_score) for a, b in zip(first.problems, last.problems, strict=True)), reverse=True
    )
    assert sorted((abs(each["change"]) for each in kept), reverse=True) == changes[:10]


def test_run_without_responses_is_rejected(tmp_path):
    write_run(tmp_path / "young", experiment="debug", num_steps=1, validate=False, only=("critic/score/mean",))
    with pytest.raises(DataError, match="no readable validation"):
        build_sample_browser(tmp_path / "young")


def test_embedded_json_cannot_end_its_element(page):
    (text,) = re.findall(r'id="data">(.*)', page.read_text())
    assert text.endswith("</script>")
    assert not set("<>&\u2028") & set(text.removesuffix("</script>"))
    assert HOSTILE in data_of(page)["texts"]


@pytest.mark.program("chromium")
def test_browser_walk_through_responses(run_dir, page, tmp_path):
    first, last = result_at(run_dir, 0), result_at(run_dir, 40)
    gains = {a.prompt_id: b.mean_score - a.mean_score for a, b in zip(first.problems, last.problems, strict=True)}
    with open_tab(tmp_path / "profile") as tab:
        tab.open(page)

        def ids() -> list[int]:
            return tab.value(
                "[...document.querySelectorAll('.item')].map((each) => Number(each.dataset.key.split(':')[0]))"
            )

        def shows(title: str) -> None:
            tab.wait(f"document.querySelector('#detail h2')?.innerText.startsWith({json.dumps(title)})")

        def counts(text: str) -> None:
            tab.wait(f"document.querySelector('#count').innerText === {json.dumps(text)}")

        # One entry a problem, sorted by change, and the first one is open at the last step.
        counts(f"{NUM_PROBLEMS} prompts")
        assert ids() == sorted(gains, key=lambda number: (-gains[number], number))
        shows(f"Prompt {ids()[0]} · step 40")
        assert tab.texts(".step[aria-pressed=true]")[0].startswith("step 40")

        # A click on a problem, then on a step, shows that step's answers.
        chosen = next(problem for problem in first.problems if problem.prompt_id == 12)
        tab.click('.item[data-key^="12:"]')
        shows("Prompt 12 · step 40")
        assert chosen.prompt_text in tab.texts("#detail .card")[0]
        tab.click('.step[data-step="0"]')
        shows("Prompt 12 · step 0")
        assert tab.texts("#answers .verbatim") == [answer.text for answer in (chosen.greedy, *chosen.samples)]
        assert "log-probability -1.50" in tab.texts("#answers .note")[0]
        assert tab.texts("#answers .mark") == [
            "correct" if answer.solved else "wrong" for answer in (chosen.greedy, *chosen.samples)
        ]

        # What an environment said is set apart from what the model wrote.
        tab.click('.item[data-key^="7:"]')
        shows("Prompt 7 ")
        assert tab.texts("#answers .verbatim")[0] == EPISODE
        marked = tab.texts("#answers .verbatim:first-child .muted")
        assert [line.strip() for line in marked] == [
            "[environment] reward -0.1",
            "[environment] <b>+",
            "[environment] reward 1",
        ]

        # A problem that was not validated at a step has no button of it.
        tab.click('.item[data-key^="5:"]')
        shows("Prompt 5 · step 40")
        assert tab.value("[...document.querySelectorAll('.step')].map((each) => each.dataset.step)") == ["0", "40"]

        # Sorting, and every answer in place of one of each problem.
        tab.choose("#sort", "prompt_id")
        tab.wait("document.querySelector('.item').dataset.key.startsWith('0:')")
        assert ids() == list(range(NUM_PROBLEMS))
        tab.choose("#each", "answer")
        num_answers = sum(
            len(problem.samples) + 1 for step in (0, 20, 40) for problem in result_at(run_dir, step).problems
        )
        counts(f"{num_answers} responses")
        tab.click("#step")
        tab.type("0..20")
        counts(f"{num_answers - NUM_PROBLEMS * (len(chosen.samples) + 1)} responses")
        tab.choose("#each", "prompt")
        tab.click("#score")
        tab.type("high")
        tab.wait("document.querySelector('#count').innerText.startsWith('score: must be a number')")
        for name in ("step", "score"):
            tab.value(f"document.querySelector('#{name}').value = ''")

        # Searching a prompt; what a model wrote stays text.
        tab.click("#search")
        tab.type("onerror")
        counts("1 prompt")
        assert ids() == [3]
        assert '<img src=x onerror="document.title=1">' in tab.texts("#answers .verbatim")[0]
        assert "9 tokens, truncated" in tab.texts("#answers .note")[0]
        assert tab.value("document.querySelectorAll('img').length") == 0
        assert tab.value("document.title") == "Responses of browsed · Millrace"
        assert tab.problems == []


def test_unscored_responses_have_no_change(run_dir, tmp_path):
    """The scorer fails on all answers to problem 9 at step 40, and on those to problem 8 at every step."""
    folder = shutil.copytree(run_dir, tmp_path / "unscored")
    unscored = {"score": 0.0, "parts": {}, "failure": "the judge was away"}
    for step, failed in ((0, (8,)), (20, (8,)), (40, (8, 9))):
        result = result_at(folder, step)
        problems = [
            dataclasses.replace(
                problem,
                greedy=dataclasses.replace(problem.greedy, **unscored),
                samples=tuple(dataclasses.replace(answer, **unscored) for answer in problem.samples),
            )
            if problem.prompt_id in failed
            else problem
            for problem in result.problems
        ]
        dataclasses.replace(result, problems=tuple(problems)).write(folder / "validation" / f"step-{step:06d}.json")
    problems = {problem["id"]: problem for problem in data_of(build_sample_browser(folder))["problems"]}
    first, last = (result_at(run_dir, step).problems[9 - (step == 20)].mean_score for step in (0, 20))
    assert (problems[9]["change"], problems[8]["change"]) == (last - first, None)
    assert problems[9]["at"][2]["score"] is None
    assert {answer["score"] for answer in problems[9]["at"][2]["answers"]} == {None}


@pytest.mark.program("chromium")
def test_report_opens_without_browser_errors(grpo_report, tmp_path):
    with open_tab(tmp_path / "profile") as tab:
        tab.open(grpo_report.html)
        tab.click('nav a[href="#configuration"]')
        tab.wait("location.hash === '#configuration'")
        assert tab.value("document.documentElement.scrollWidth <= window.innerWidth")
        drawn = tab.value(
            "[...document.querySelectorAll('svg.chart')].map((svg) => svg.getBoundingClientRect().height)"
        )
        assert len(drawn) >= 10
        assert min(drawn) > 100
        tab.click("#t-settings_default summary")
        assert tab.value("document.querySelector('#t-settings_default').open")
        light = tab.value("getComputedStyle(document.querySelector('svg.chart text')).fill")
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert tab.value("getComputedStyle(document.querySelector('svg.chart text')).fill") != light
        assert tab.problems == []


def test_samples_answer_the_same_problem(grpo_run):
    before, after = (ValidationResult.read(grpo_run / "validation" / f"{name}.json") for name in ("before", "after"))
    first, *_ = sample_table(read_run(grpo_run)).rows
    was, became = next(
        (a, b) for a, b in zip(before.problems, after.problems, strict=True) if not a.greedy.solved and b.greedy.solved
    )
    assert [cell.text.partition("\n")[0] for cell in first] == [
        "newly solved", was.prompt_text, first[2].text, was.greedy.text, became.greedy.text
    ]  # fmt: skip
