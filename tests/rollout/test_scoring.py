"""The scoring pool: order, deadlines, replaced processes, counts."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

import rlcore.score
from rlcore import user_code
from rlcore.config import RewardConfig
from rlcore.errors import ConfigError, EngineError
from rlcore.rollout import scoring, scoring_worker
from rlcore.rollout.environment import PLAY, Episode, Turn, turn_from_score
from rlcore.rollout.scoring import ScoringPool, require_scorer
from rlcore.score import Score
from tests.helpers.forked import ROOT, loaded_by

ODD = "tests.rollout.odd_scorers:score"
HANGS = ["spin", "hold the interpreter", "sleep"]
SLOW = {"environment": "tests.rollout.odd_environments:Slow", "options": {}, "row": {"seed": 0}}
JUST_BELOW_1 = sum([0.1] * 10)  # by rounding
FAILS = ["raise", "exit", "leave", "nan", "text"]
FAILURES = {
    "raise": "RuntimeError: no",
    "exit": "its process ended (EOFError: )",
    "leave": "SystemExit: 0",
    "nan": "ValueError: a score must be finite, got Score(total=nan, parts={}, said=None, failure=None)",
    "text": "TypeError: a scorer must return a number or rlcore.score.Score, got str",
    **dict.fromkeys(HANGS, "a response took longer than 1.5 s (reward.deadline_s)"),
}


def truths(count):
    return [json.dumps({"value": index}) for index in range(count)]


def expected(responses):
    return [
        Score(0.0, {}, failure=FAILURES[text])
        if text in FAILURES
        else Score(index + 0.1, {"length": float(len(text)), "correct": 1.0})
        for index, text in enumerate(responses)
    ]


def results(scores):
    return [score.result() for score in scores]


def worker_pids(pool):
    return {int(score.total) for score in pool.score(["pid"] * 64, truths(64))}


@pytest.mark.parametrize("num_processes", [0, 1, 2])
def test_scores_have_order_of_requests(num_processes):
    responses = [f"{'slow' if index % 7 == 0 else ''} answer {index}" for index in range(150)]
    with ScoringPool(ODD, RewardConfig(num_processes=num_processes)) as pool:
        assert pool.score(responses, truths(150)) == expected(responses)
        assert pool.score([], []) == []
        assert (pool.timeouts, pool.errors) == (0, 0)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_hostile_responses_fail_without_affecting_others(num_processes, caplog):
    responses = []
    for odd in [*FAILS, *HANGS, "print"]:
        responses += [f"good {odd}", odd, f"also good {odd}"]
    with ScoringPool(ODD, RewardConfig(num_processes=num_processes, deadline_s=1.5)) as pool:
        assert pool.score(responses, truths(len(responses))) == expected(responses)
        assert (pool.timeouts, pool.errors) == (len(HANGS), len(FAILS))
        late = f"scorer {ODD} overran reward.deadline_s=1.5, the response has no score: "
        assert sorted(line for line in caplog.messages if line.startswith(late)) == sorted(
            f"{late}{text!r}" for text in HANGS
        )
        again = ["after", "all", "this"]
        assert pool.score(again, truths(3)) == expected(again)


@pytest.mark.parametrize("num_processes", [0, 1])
def test_scorer_texts_are_printable(num_processes):
    """Stored responses are UTF-8, without lone surrogates, and an error is one line of a log."""
    with ScoringPool(ODD, RewardConfig(num_processes=num_processes)) as pool:
        said, failed = pool.score(["half a pair", "raise what it wrote"], truths(2))
        assert said == Score(1.0, {}, said="?")
        assert failed.failure == pool.unscored[1] == r"ValueError: no number: \x1b[2J\ud83d\nrun finished"


def of(total, parts=None, said=None):
    return lambda response, truth: Score(total, parts or {}, said)


@pytest.mark.parametrize(
    ("scorer", "weights", "score"),
    [
        (lambda response, truth: 3, {}, Score(3.0, {})),
        (lambda response, truth: truth["answer"], {}, Score(7.0, {})),
        (lambda response, truth: True, {}, Score(1.0, {})),
        (of(0.5, {1: 2}, said=5), {}, Score(0.5, {"1": 2.0}, "5")),
        (of(0.5, {"a": 2.0}), {"a": 0.25}, Score(0.5, {"a": 2.0, "total": 0.5, "correct": 0.0})),
        (of(1.0, {"a": 2.0}), {"a": 2, "total": -1}, Score(3.0, {"a": 2.0, "total": 1.0, "correct": 1.0})),
        (of(1.0, {"correct": 0.0}), {"correct": 4}, Score(0.0, {"total": 1.0, "correct": 0.0})),
        (of(JUST_BELOW_1, {"a": 2.0}), {"a": 1}, Score(2.0, {"a": 2.0, "total": JUST_BELOW_1, "correct": 1.0})),
    ],
)
def test_score_is_checked_and_weighted(scorer, weights, score):
    assert scoring_worker.score_one(scorer, "x", "7", weights) == score


@pytest.mark.parametrize(
    ("scorer", "weights", "message"),
    [
        (of(float("inf")), {}, "a score must be finite, got Score(total=inf"),
        (of(1e39), {}, "a score must be at most 3.403e+38 (float32), got Score(total=1e+39"),
        (of(1.0, {"a": float("nan")}), {}, "a score must be finite, got Score(total=1.0, parts={'a': nan}"),
        (of(0.999, {"a": 0.0}), {"correct": 4}, "reward.weights: must name parts of the score, got correct. Use the p"),
        (
            of(1.0, {"b": 1.0}),
            {"a": 1, "c": 1},
            "reward.weights: must name parts of the score, got a, c. Use the parts of this score: b, total",
        ),
        (of(1.0, {"b": 1e38}), {"b": 9}, "reward.weights: the weighted score must be at most 3.403e+38 (float32), got"),
    ],
)
def test_invalid_scores_are_rejected(scorer, weights, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        scoring_worker.score_one(scorer, "x", "{}", weights)


def test_describe_limits_length():
    assert scoring_worker.describe(ValueError("a\tb")) == r"ValueError: a\tb"
    assert scoring_worker.describe(ValueError("x" * 600)) == "ValueError: " + "x" * 488


def test_first_errors_are_logged_and_all_counted(caplog):
    with ScoringPool(ODD, RewardConfig()) as pool:
        responses = ["raise"] * 4 + ["text"] * 3 + ["fine"]
        assert pool.score(responses, truths(8)) == expected(responses)
        assert pool.unscored == (7, FAILURES["text"])
        words = f"scorer {ODD} failed, the response has no score:"
        no, text = f"{words} RuntimeError: no; response 'raise'", f"{words} {FAILURES['text']}; response 'text'"
        assert caplog.messages == [no] * 4 + [text]
        with pool.without_counting():
            assert pool.score(["leave"], truths(1)) == expected(["leave"])
            assert pool.unscored == (8, FAILURES["leave"])
        assert pool.unscored == (7, FAILURES["text"])


def test_path_object_in_sys_path_is_skipped(tmp_path, monkeypatch):
    """Notebooks may have one; an empty entry is the working directory."""
    (tmp_path / "here.py").write_text("def score(answer, truth):\n    return 0.5\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [Path("elsewhere"), *sys.path, ""])
    with ScoringPool("here:score", RewardConfig(num_processes=1)) as pool:
        assert pool.score(["any"], ["{}"]) == [Score(0.5, {})]


def test_kill_in_first_call_keeps_first_calls_enabled(tmp_path, monkeypatch):
    """Imports count in no response's deadline, also after a kill."""
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(2)\nRIGHT = 'yes'\n")
    (tmp_path / "killed_once.py").write_text(
        "import os\nfrom pathlib import Path\n\n\ndef score(text, truth):\n"
        f"    killed = Path({str(tmp_path / 'killed')!r})\n"
        "    if not killed.exists():\n        killed.touch()\n        os.kill(os.getpid(), 9)\n"
        "    from slow_to_load import RIGHT\n    return float(text == RIGHT)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ScoringPool("killed_once:score", RewardConfig(num_processes=1, deadline_s=1)) as pool:
        assert pool.score(["yes", "no"] * 2, ["{}"] * 4) == [Score(1.0, {}), Score(0.0, {})] * 2
        assert pool.unscored == (0, "")
    assert (tmp_path / "killed").exists()


def served(monkeypatch, scorer, messages, *, first_call, weights=None):
    """Return the messages that a scoring process sends."""
    monkeypatch.setattr(rlcore.score, "renew_deadline", None)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            for message in messages:
                ours.sendall(scoring_worker.encode_line(message))
            ours.shutdown(socket.SHUT_WR)
            scoring_worker.serve(theirs, scorer, first_call=first_call, weights=weights or {})
        return [json.loads(line) for line in ours.makefile()]


def test_results_are_sent_one_by_one(monkeypatch):
    def scorer(response, truth):
        if response == "bad":
            raise ValueError("no")
        return Score(float(len(response)), {"a": 2.0}, said="well")

    messages = [[["x", "{}"], ["bad", "{}"], ["xyz", "3"]], [["xy", "{}"]]]
    found = served(monkeypatch, scorer, messages, first_call=False)
    results = [[1.0, {"a": 2.0}, "well"], [None, "ValueError: no", None], [3.0, {"a": 2.0}, "well"]]
    assert found == [*results, [2.0, {"a": 2.0}, "well"]]
    found = served(monkeypatch, scorer, messages, first_call=True)
    assert found == [{"warm": False}, {"warm": True}, *results, [2.0, {"a": 2.0}, "well"]]
    weighed = served(monkeypatch, scorer, [[["x", "{}"]]], first_call=False, weights={"a": 3.0})
    assert weighed == [[6.0, {"a": 2.0, "total": 1.0, "correct": 1.0}, "well"]]


def test_repeated_turns_have_their_own_deadlines(monkeypatch):
    def scorer(response, truth):
        rlcore.score.renew_deadline()
        return 1.0

    found = served(monkeypatch, scorer, [[["x", "{}"], ["y", "{}"]]], first_call=False)
    assert found == [{"warm": True}, [1.0, {}, None]] * 2
    episode = Episode("e", json.dumps(SLOW), 9, ["x"] * 4, ["", "1 +", "2 +", "3 +"])
    with ScoringPool(PLAY, RewardConfig(num_processes=1, deadline_s=1.5), section="episode") as pool:
        [score] = pool.score([episode.to_json()], [episode.truth])  # its process has lost all of them
    assert turn_from_score(score) == Turn("4 +", True, 1.0, {"even": 1.0})


def test_parts_of_mixture_have_first_calls(monkeypatch):
    parts = [["x", json.dumps({"scorer": part})] for part in "aba"]
    found = served(monkeypatch, lambda *_: 1.0, [parts, parts[:1]], first_call=True)
    cold, warm, result = {"warm": False}, {"warm": True}, [1.0, {}, None]
    assert found == [cold, warm, result, cold, warm, result, result, result]


@pytest.mark.parametrize("how", ["hang", "exit"])
def test_scorer_may_fail_in_first_call(monkeypatch, how):
    monkeypatch.setattr(scoring, "START_DEADLINE_S", 10)
    name = "tests.rollout.odd_scorers:nothing_in_an_empty_answer"
    with ScoringPool(name, RewardConfig(num_processes=1, deadline_s=5)) as pool:
        assert pool.score(["one", "four"], [json.dumps({"value": how})] * 2) == [Score(3.0, {}), Score(4.0, {})]
        assert pool.unscored == (0, "")


def test_killed_process_is_replaced_without_loss():
    with ScoringPool(ODD, RewardConfig(num_processes=1)) as pool:
        [before] = worker_pids(pool)
        os.kill(before, signal.SIGKILL)
        [after] = worker_pids(pool)
        assert after != before
        assert not psutil.pid_exists(before)
        job = pool.submit(["slow"] * 50, truths(50))
        os.kill(after, signal.SIGKILL)
        assert results(job) == expected(["slow"] * 50)
        assert (pool.timeouts, pool.errors) == (0, 0)


def test_pause_of_the_job_causes_no_timeout(tmp_path, monkeypatch):
    """Simulate `docker pause` by a jump of the pool's clock."""
    paused, wait = [0.0], scoring.wait
    monkeypatch.setattr(scoring, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + paused[0]))

    def pausing(sources, timeout=None):
        ready = wait(sources, timeout)
        (worker,) = pool._workers
        if worker.responses and worker.warm and not ready and not paused[0]:
            paused[0] = 1_000.0
            (tmp_path / "continue").touch()
        return ready

    monkeypatch.setattr(scoring, "wait", pausing)
    name = "tests.rollout.odd_scorers:waits_for_a_file"
    with ScoringPool(name, RewardConfig(num_processes=1, deadline_s=30)) as pool:
        assert pool.score([str(tmp_path / "continue")], ["{}"]) == [Score(1.0, {})]
        assert pool.unscored == (0, "")
    assert paused[0]


def test_stopped_idle_process_does_not_block(monkeypatch):
    """Responses exceed the socket's buffer, so that sending blocks."""
    monkeypatch.setattr(scoring, "_SEND_DEADLINE_S", 0.5)
    responses = ["x" * 100_000 for _ in range(8)]
    with ScoringPool(ODD, RewardConfig(num_processes=1)) as pool:
        (before,) = worker_pids(pool)
        os.kill(before, signal.SIGSTOP)
        job = pool.submit(responses * 4, truths(32))
        assert [score.result(60) for score in job] == expected(responses * 4)
        assert (pool.errors, pool.timeouts) == (0, 0)
        assert not psutil.pid_exists(before)


def test_long_and_invalid_texts_are_complete():
    responses = ["\ud800 lone", "x" * 1_000_000, "\x00", "\u2028"]
    with ScoringPool(ODD, RewardConfig(num_processes=1)) as pool:
        *found, much, last = pool.score([*responses, "says much", "last"], truths(6))
        assert [*found, last] == [*expected(responses), Score(5.1, {"length": 4.0, "correct": 1.0})]
        assert much == Score(1.0, {}, said="two\nlines " * 30_000)


def test_close_ends_processes_and_cancels_jobs():
    pool = ScoringPool(ODD, RewardConfig(num_processes=2, deadline_s=60))
    pids = worker_pids(pool)
    hanging = pool.submit(["spin"] * 5, truths(5))
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(EngineError, match="closed before these responses"):
        results(hanging)
    with pytest.raises(EngineError, match="closed"):
        pool.submit(["late"], truths(1))


def test_scoring_process_loads_no_torch():
    with ScoringPool(ODD, RewardConfig(num_processes=1)) as pool:
        assert pool.score(["torch"], truths(1)) == [Score(0.0, {})]
    assert not {"torch", "pyarrow", "pydantic", "numpy"} & loaded_by("import data.countdown")


@pytest.mark.parametrize("last", ["idle", "hold the interpreter"])
def test_processes_end_with_killed_parent(last):
    code = (
        "from rlcore.config import RewardConfig\n"
        "from rlcore.rollout.scoring import ScoringPool\n"
        f"pool = ScoringPool({ODD!r}, RewardConfig(num_processes=1))\n"
        "pid = int(pool.score(['pid'], ['{}'])[0].total)\n"
        f"pool.submit([{last!r}], {truths(1)!r})\n"
        "while pool._queue: pass\n"
        "print(pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 30
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "name", ["nowhere:score", "data.countdown:nothing", "tests.rollout.odd_scorers:NOT_A_FUNCTION"]
)
def test_missing_scorer_is_rejected(name):
    with pytest.raises(ConfigError, match=f"data.scorer: must name a function as module:function, got '{name}'"):
        ScoringPool(name, RewardConfig(num_processes=1))


def test_shadowed_module_is_reported(tmp_path, monkeypatch):
    own = tmp_path / "types.py"
    own.write_text("def score(response, ground_truth):\n    return 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    place = f"Another module types was loaded in place of {own}: {types.__file__}. Rename yours"
    with pytest.raises(ConfigError, match=re.escape(place)):
        require_scorer("types:score")


def test_failed_starts_are_reported(tmp_path, monkeypatch):
    module = tmp_path / "only_here.py"
    module.write_text(
        "import os\nif 'SCORING_TEST' in os.environ:\n    with open(os.environ['SCORING_TEST'], 'a') as file:\n"
        "        file.write('!')\n    raise ImportError('not in a child')\ndef score(*_): 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ScoringPool("only_here:score", RewardConfig()):
        pass
    monkeypatch.setenv("SCORING_TEST", str(tmp_path / "starts"))
    message = (
        r"^data\.scorer: the processes that score by only_here:score cannot be started \(EOFError: ImportError: not in "
        r"a child\)\. Try reward\.num_processes=0, which scores in the trainer's process$"
    )
    with (
        ScoringPool("only_here:score", RewardConfig(num_processes=1)) as pool,
        pytest.raises(EngineError, match=message),
    ):
        pool.score(["x"], ["{}"])
    assert (tmp_path / "starts").read_text() == "!!!", "a third start that fails is the last"


def test_failed_starts_of_environment_are_reported(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text("{")  # of the run's code, as each process reads it
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    message = r"^data\.environment: the processes that play episodes cannot be started \(.*JSONDecodeError: .*\)$"
    with (
        ScoringPool(PLAY, RewardConfig(num_processes=1), section="episode") as pool,
        pytest.raises(EngineError, match=message),
    ):
        pool.score(["{}"], ["{}"])
