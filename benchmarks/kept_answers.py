"""What it costs a step to keep its answers, and how long a click takes on a page of 100,000 of them.

    python -m benchmarks.kept_answers cost                          # 640 answers of 300 tokens: ms a step, MB a step
    python -m benchmarks.kept_answers cost --step-s=6.3 --check     # exit code 1 if over 1% of such a step
    python -m benchmarks.kept_answers page                          # in Chromium, from the click to what it shows
    python -m benchmarks.kept_answers page --check                  # exit code 1 if a click takes a second

cost: the trainer's thread builds the columns and hands them on; at a chunk's end it waits for what is not written yet,
hidden behind the copy of the checkpoint on a GPU. Both count here; processor_ms is that thread's own work, without what
other programs take of a busy machine. `--gpu-work` keeps a GPU busy meanwhile, so that the figures are those of a
thread that also starts kernels. page: each click is made with the page's own code and ends when list, number and answer
are those asked for; the median and the worst of five.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import uvicorn

from flows.server.guard import Guard
from flows.stack.answers import answers_app
from rlcore.answers.store import AnswerWriter
from rlcore.answers.table import answer_table
from rlcore.batching.pack import pack
from rlcore.config import AnswersConfig
from rlcore.types import Prompt, Rollout, Score, TrainBatch
from tests.report.chromium import Tab, open_tab

GROUP = 8
STEPS_PER_CHUNK = 20
MAX_SHARE, MAX_CLICK_S = 0.01, 1.0
TEXT = "so we take the sum of both and then add two less than seven which makes it right again"
WORDS = TEXT.split()
RUN = "synthetic-s1"


def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
    """A word a token."""
    return [" ".join(WORDS[token % len(WORDS)] for token in ids) for ids in token_ids]


class Synthetic:
    """Steps of random answers, as a trainer has them."""

    def __init__(self, num_answers: int, num_tokens: int) -> None:
        self._rng = np.random.default_rng(1)
        self._num_answers, self._num_tokens = num_answers, num_tokens

    def step(self) -> Callable[[int], pa.Table]:
        """One step's answers; the function makes columns of them."""
        rng, rollouts = self._rng, []
        for index in range(self._num_answers):
            length = int(rng.integers(self._num_tokens // 2, 3 * self._num_tokens // 2))
            group = index // GROUP
            prompt = Prompt(group, tuple((np.arange(100) + group).tolist()), "synthetic", '{"is": 1}')
            ids = rng.integers(0, 150_000, size=length, dtype=np.int32)
            drawn = -rng.exponential(0.5, size=length).astype(np.float32)
            rollouts.append(Rollout(prompt, index % GROUP, ids, drawn, "stop", 0))
        scores = [Score(float(rng.integers(0, 2)), {"format": 1.0}) for _ in rollouts]
        packed = pack(rollouts, scores, [index // GROUP for index in range(len(rollouts))])
        near = packed.behavior_logprobs + 0.01 * torch.randn(packed.num_tokens) * packed.loss_mask
        batch = TrainBatch(packed, None, None, None, packed.loss_mask.float(), None, packed.loss_mask.float())
        texts = decode([rollout.response_ids for rollout in rollouts])
        return lambda number: answer_table(number, rollouts, scores, texts, decode, batch=batch, policy_logprobs=near)


@contextmanager
def gpu_work(wanted: bool) -> Iterator[None]:
    """A GPU kept busy by another thread inside the block."""
    ended = threading.Event()

    def work() -> None:
        matrix = torch.randn(4096, 4096, device="cuda")
        while not ended.is_set():
            matrix = torch.nn.functional.normalize(matrix @ matrix)
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if wanted:
            thread.join()


def cost(arguments: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of the trainer's thread for each step of two chunks."""
    made = Synthetic(arguments.answers, arguments.tokens).step()
    spent: list[float] = []
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as folder, gpu_work(arguments.gpu_work):
        writer = AnswerWriter(Path(folder), AnswersConfig())
        for step in range(1, 2 * STEPS_PER_CHUNK + 1):
            begun, busy_before = time.perf_counter(), time.thread_time()
            writer.add(made(step))
            if writer.is_full or step % STEPS_PER_CHUNK == 0:
                writer.begin_part()
            if step % STEPS_PER_CHUNK == 0:
                writer.settle()
            spent.append(1e3 * (time.perf_counter() - begun))
            busy.append(1e3 * (time.thread_time() - busy_before))
            time.sleep(arguments.between_s)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    mean = statistics.fmean(spent)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "answers": arguments.answers, "tokens": arguments.tokens,
        "mean_ms": mean, "median_ms": statistics.median(spent), "worst_ms": max(spent),
        "processor_ms": statistics.fmean(busy),
        "mb_a_step": size / len(spent) / 1e6,
        "bytes_a_token": size / len(spent) / arguments.answers / arguments.tokens,
        "share_of_step": mean / 1e3 / arguments.step_s, "step_s": arguments.step_s,
        "ok": mean / 1e3 / arguments.step_s <= MAX_SHARE,
    }  # fmt: skip


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The page of a root, on a free port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(Guard(answers_app(root)), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/answers/"
        finally:
            server.should_exit = True
            thread.join()


CLICKS = {
    "next answer": ("nth(AT).click()", "nth(AT).getAttribute('aria-current') === 'true'"),
    "highest score": ("pick('sort', '-score')", "true"),
    "trainer differs most": ("pick('sort', '-gap')", "true"),
    "newest": ("pick('sort', '-step')", "true"),
    "search a word": ("pick('search', 'both and AT')", "true"),
    "search gone": ("pick('search', '')", "true"),
    "a prompt across steps": ("one('#across').click()", "one('#prompt').value !== ''"),
    "and back": ("one('#across').click()", "one('#prompt').value === ''"),
    "50 more": ("one('.more').click()", "document.querySelectorAll('.item').length === 100"),
}
"""What is clicked, and what is true of the page after it; besides, nothing that was asked for may be on its way."""
HELPERS = """
window.onWay = 0;
const asked = window.fetch;
window.fetch = (...words) => { onWay++; return asked(...words).finally(() => setTimeout(() => onWay--, 0)); };
window.one = (selector) => document.querySelector(selector);
window.nth = (number) => document.querySelectorAll(".item")[number];
window.pick = (name, value) => {
  const place = document.getElementById(name);
  place.value = value;
  place.dispatchEvent(new Event(place instanceof HTMLSelectElement ? "change" : "input"));
};
window.timed = async (click, after) => {
  const begun = performance.now();
  let quiet = 0;
  click();
  await new Promise((done) => setTimeout(done, 130));
  while (quiet < 3) {
    await new Promise((done) => setTimeout(done, 5));
    quiet = onWay === 0 && after() ? quiet + 1 : 0;
  }
  return performance.now() - begun;
};
"""


def click(tab: Tab, what: str, after: str, number: int) -> float:
    """Seconds from a click to what it shows."""
    script = f"timed(() => {what}, () => {after})".replace("AT", str(number))
    found = tab.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in found, found
    return float(found["result"]["value"]) / 1e3


def page(arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds of each kind of click."""
    steps = -(-arguments.total // arguments.answers)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        writer = AnswerWriter(root / "runs" / RUN / "answers", AnswersConfig())
        synthetic = Synthetic(arguments.answers, arguments.tokens)
        for step in range(1, steps + 1):
            writer.add(synthetic.step()(step))
            if writer.is_full:
                writer.begin_part()
        writer.begin_part()
        writer.settle()
        with served(root) as url, open_tab(root / "profile") as tab:
            begun = time.perf_counter()
            tab.call("Page.navigate", url=url)
            tab.wait("document.querySelectorAll('.item').length === 50 && document.querySelector('#tokens') !== null")
            opened = time.perf_counter() - begun
            tab.value(f"(0, eval)({json.dumps(HELPERS)})")
            times: dict[str, list[float]] = {name: [] for name in CLICKS}
            for number in range(1, 6):
                for name, (what, after) in CLICKS.items():
                    times[name].append(click(tab, what, after, number))
            count = tab.texts("#count")[0]
    worst = max(max(each) for each in times.values())
    return {
        "answers": count, "tokens": arguments.tokens, "load": os.getloadavg()[0], "opened_s": opened, "worst_s": worst,
        "clicks": {name: {"median_s": statistics.median(each), "worst_s": max(each)} for name, each in times.items()},
        "ok": worst < MAX_CLICK_S,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "page"))
    parser.add_argument("--answers", type=int, default=640, help="answers of a step")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of an answer, on average")
    parser.add_argument("--total", type=int, default=100_000, help="page: answers on record")
    parser.add_argument("--step-s", type=float, default=6.0, help="cost: seconds of the step that it is a share of")
    parser.add_argument("--between-s", type=float, default=0.2, help="cost: seconds between two steps")
    parser.add_argument("--gpu-work", action="store_true", help="cost: keep a GPU busy")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--check", action="store_true", help="fail if over the limit")
    arguments = parser.parse_args()
    found = cost(arguments) if arguments.what == "cost" else page(arguments)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    if arguments.check and not found["ok"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
