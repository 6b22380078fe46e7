"""Programs of a model: their output, their ends, their tests' score, and 300 hostile programs."""

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from data import code
from data.code import run_python as tool
from data.tasks import build_dataset
from flows.work.checks import check_before_plan
from rlcore import sandbox
from rlcore.config import RewardConfig, SandboxConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.sandbox import require_sandbox, run_python, set_limits
from rlcore.score import Score
from tests.sandbox.hostile import programs

TIME_S = 3.0
ADDS = "import sys\ndef add(a, b):\n    return a + b\n"
SUMS = "print(sum(map(int, sys.stdin.read().split())))"
HANGS = "import time\ntime.sleep(600)"
UNSAFE_IF_WEAK = {"the host's file", "the host's accounts", "socket", "the way up"}
shut_in = pytest.mark.program("bwrap")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SANDBOX", "{}")
    set_limits(SandboxConfig(time_s=TIME_S, memory_mb=256, file_mb=8, output_kb=16))


@shut_in
def test_program_reads_prints_and_ends() -> None:
    ran = run_python("import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)", "abc\u00e9")
    assert (ran.stdout, ran.stderr, ran.code, ran.stop_reason) == ("\u00e9cba\n", "oh\n", 3, "")
    assert run_python("while True: pass", time_s=1.0).stop_reason == "time"
    flood = run_python("print('x' * 10**6)")
    assert (len(flood.stdout), flood.stop_reason) == (16 * 1024, "output")
    assert "MemoryError" in run_python("x = 'x' * 2**30").stderr
    thread = "import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()"
    assert run_python(thread).stdout == "1\n"


def require_ended(programs: Callable[[], set[psutil.Process]]) -> None:
    """Wait until all processes of a set have ended. Those of other tests end by themselves."""
    left, deadline = programs(), time.monotonic() + 20
    while left:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
        left &= programs()


def running_programs() -> set[psutil.Process]:
    """Return all sandboxed programs on this machine."""
    return {p for p in psutil.process_iter(["cmdline"]) if "/program/main.py" in (p.info["cmdline"] or ())}


@shut_in
@pytest.mark.parametrize("of_each_kind", [3, pytest.param(10, marks=pytest.mark.lengthy)])
def test_hostile_programs_do_not_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_each_kind: int) -> None:
    secret, writable = tmp_path / "secret", Path("/var/tmp")
    secret.write_text("mine")
    monkeypatch.setenv("TOKEN_OF_MINE", "1")
    before = names(writable) | names(Path("/dev/shm"))
    source, taken = Path(os.__file__).stat().st_mtime_ns, []
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"secret": secret, "writable": writable, "port": server.getsockname()[1], "pid": os.getpid()}
        every = list(programs(places))
        assert len(every) == 300
        chosen = [one for number, one in enumerate(every) if number % 10 < of_each_kind]
        if chosen != every:
            chosen = list(dict.fromkeys(chosen))  # the lengthy case repeats those that have no variants

        def try_program(one: tuple[str, str]) -> tuple[str, str]:
            start = time.monotonic()
            ran = run_python(one[1])
            taken.append((time.monotonic() - start, one[0]))
            return one[0], ran.stdout + ran.stderr if "ESCAPED" in ran.stdout else ""

        with ThreadPoolExecutor(4) as pool:
            found = [one for one in pool.map(try_program, chosen) if one[1]]
        assert found == []
        reason = "nothing, but the programs are to show that they can escape"
        monkeypatch.setattr(sandbox, "_missing_requirement", lambda: reason)
        set_limits(SandboxConfig(time_s=TIME_S, allow_weak=True))
        harmless = [one for one in every if one[0] in UNSAFE_IF_WEAK][9::10]
        assert {kind for kind, output in map(try_program, harmless) if output} == UNSAFE_IF_WEAK
    assert (secret.read_text(), Path(os.__file__).stat().st_mtime_ns) == ("mine", source)
    require_ended(running_programs)
    assert not (names(writable) | names(Path("/dev/shm"))) - before
    print(f"{len(chosen)} programs, longest {max(taken)[0]:.1f} s ({max(taken)[1]})")


def problem_with(num_tests: int) -> str:
    return json.dumps({"tests": json.dumps([{"stdin": "", "stdout": "1"}] * num_tests)})


@shut_in
def test_killed_scorer_ends_its_program() -> None:
    set_limits(SandboxConfig(time_s=1.5))
    with ScoringPool("data.code:score", RewardConfig(num_processes=1, deadline_s=5.0)) as pool:
        [hung] = pool.score([f"```python\n{HANGS}\n```"], [problem_with(50)])
    assert (hung.failure, hung.total, hung.parts["passed"]) == (None, 0.0, 0.0), "the model's fault, and no failure"
    set_limits(SandboxConfig(time_s=60))
    with ScoringPool("data.code:score", RewardConfig(num_processes=1, deadline_s=2.0)) as pool:
        [hung, right] = pool.score([f"```python\n{HANGS}\n```", "```python\nprint(1)\n```"], [problem_with(1)] * 2)
    assert "reward.deadline_s" in str(hung.failure)
    assert right.total == 1.0
    require_ended(running_programs)


def test_killed_scorer_ends_its_program_without_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    set_limits(SandboxConfig(time_s=60, allow_weak=True))
    program = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{HANGS}"
    with ScoringPool("data.code:score", RewardConfig(num_processes=1, deadline_s=5.0)) as pool:
        [hung] = pool.score([f"```python\n{program}\n```"], [problem_with(1)])
    assert "reward.deadline_s" in str(hung.failure)
    pid = int((tmp_path / "pid").read_text())
    require_ended(lambda: {process for process in psutil.process_iter() if process.pid == pid})


@shut_in
@pytest.mark.parametrize(("answer", "total", "parts"), [
    (f"```python\n{ADDS}{SUMS}\n```", 1.0, (1.0, 1.0)), (f"```python\n{ADDS}print(7)\n```", 2 / 3, (0.0, 1.0)),
    ("```python\ndef add(a, b) return\n```", 0.0, (0.0, 0.0)),
    ("```python\nimport sys\nprint(7)\nsys.exit(0)\n```", 1 / 3, (0.0, 1.0)), ("the answer is 7", 0.0, (0.0, 0.0)),
    ("", 0.0, (0.0, 1.0)),
    (f"```python\nif input() == '3 4':\n    print(7)\nelse:\n    exec({HANGS!r})\n```", 1 / 3, (0.0, 1.0)),
])  # fmt: skip
def test_score_is_share_of_passed_tests(answer: str, total: float, parts: tuple[float, float]) -> None:
    tests = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "1 1\n", "stdout": "2  \n"}, "assert add(2, 2) == 4"]
    found = code.score(answer, {"tests": json.dumps(tests)})
    assert (pytest.approx(found.total), found.parts["passed"], found.parts["compiles"]) == (total, *parts)
    tests = [{"stdin": text, "stdout": "9"} for text in ("08+1", "8+1", "+")]
    for order in (tests, tests[::-1]):  # a syntax error in eval fails one test
        found = code.score("```python\nprint(eval(input()))\n```", {"tests": json.dumps(order)})
        assert found == Score(1 / 3, {"passed": 0.0, "compiles": 1.0})


@shut_in
def test_tool_shows_output_and_error() -> None:
    assert tool("print(6 * 7)") == "42"
    assert tool("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero"
    assert tool(HANGS).endswith("error: the program was ended after its time")


def test_problem_files_and_bad_line(tmp_path: Path, artifacts_root: Path) -> None:
    problem = {"question": "Add two numbers.", "tests": [{"stdin": "1 2", "stdout": "3"}], "solution": "print(3)"}
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**problem, "question": name}) + "\n")
    words = ["experiment=debug", "data=code", f"data.options=[{tmp_path}]", f"paths.root={artifacts_root}"]
    data = load_config(words).data
    assert build_dataset(data, seed=1, root=artifacts_root).counts == {"train": 1, "validation": 1}
    (tmp_path / "train.jsonl").write_text(json.dumps({**problem, "tests": [{"stdin": "1"}]}))
    with pytest.raises(DataError, match=r'train\.jsonl: line 1: tests: must be a list of .* got \[{"stdin": "1"}\]'):
        build_dataset(data, seed=1, root=artifacts_root)


def test_missing_sandbox_is_refused_unless_weak(tmp_path, monkeypatch, artifacts_root):
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("PATH", str(broken.parent))
    sandbox._missing_requirement.cache_clear()
    try:
        # A machine without libseccomp reports that first.
        why = "(uid map: Permission denied|libseccomp)"
        with pytest.raises(ConfigError, match=rf"sandbox\.allow_weak: .* cannot be shut in .*{why}"):
            require_sandbox(SandboxConfig())
        words = ["experiment=debug", "warm_start.enabled=false", f"paths.root={artifacts_root}"]
        for more in (
            ["data.environment=rlcore.rollout.tools:Tools", "episode.tools=[data.code:run_python]"],
            ["data=code", f"data.options=[{tmp_path}]", "reward.deadline_s=10"],
        ):
            with pytest.raises(ConfigError, match=r"sandbox\.allow_weak: programs of a model cannot be shut in"):
                check_before_plan(load_config([*words, *more]))
        set_limits(SandboxConfig(time_s=TIME_S, allow_weak=True))
        assert run_python("print(1)").stdout == "1\n"
        assert run_python("while True: pass", time_s=1.0).stop_reason == "time"
    finally:
        sandbox._missing_requirement.cache_clear()
