"""The page of stored responses, one of them hostile, in a real browser, and requests that the server refuses."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import uvicorn
from starlette.responses import Response
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flows.stack.responses import with_responses
from flows.stack.serve import Guard
from rlcore.config import AnswersConfig, RunConfig
from rlcore.responses.store import SCHEMA, ResponseWriter
from rlcore.tracking.lineage import Origin, Stage
from tests.helpers.answers import Made
from tests.helpers.chromium import open_tab

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
COUNT = "document.querySelector('#count').innerText"
RUN = "made-s1"
ELSEWHERE = Response(status_code=204)  # the other application
WITH_TOKENIZER = "told-s2"  # A run whose tokenizer is there: token 3 is the hostile text


def hostile_tokens(table: pa.Table) -> pa.Table:
    rows = [row | {"token_ids": [3, *row["token_ids"][1:]] if row["token_ids"] else []} for row in table.to_pylist()]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    (root / "runs" / "bare").mkdir(parents=True)
    words = {HOSTILE if token == 3 else f"w{token}": token for token in range(60)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(root / "tokenizer.json"))
    reported = ResponseWriter(root / "runs" / WITH_TOKENIZER / "answers", AnswersConfig())
    reported.add(hostile_tokens(Made(1).of_step(1)))
    reported.start_part()
    reported.wait()
    Origin(RunConfig(), stages=(Stage("tokenizer", "t", str(root)),)).write(root / "runs" / WITH_TOKENIZER)
    writer = ResponseWriter(root / "runs" / RUN / "answers", AnswersConfig())
    for step in range(1, 21):
        writer.add(Made(step, turns=True).of_step(step))
    row = Made(1).of_step(21).to_pylist()[0] | {"answer": HOSTILE, "prompt": HOSTILE, "score": 99.0}
    writer.add(pa.Table.from_pylist([row], schema=SCHEMA))
    writer.start_part()
    writer.wait()
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> TestClient:
    return TestClient(Guard(with_responses(root, ELSEWHERE)), base_url="http://127.0.0.1:5000")


def test_a_page_of_answers_and_one_with_its_tokens(client):
    assert client.get("/answers/runs").json() == [RUN, WITH_TOKENIZER]

    def get(name: str, run: str = RUN, **params: object) -> Any:
        return client.get(f"/answers/{name}", params={"run": run, **params}).json()

    found = get("find", sort="-score")
    assert (found["total"], len(found["rows"]), found["rows"][0]["answer"]) == (161, 50, HOSTILE)
    assert len(get("find", sort="-score", offset=150)["rows"]) == 11
    assert sorted(row["prompt_id"] for row in get("find", each="prompt")["rows"]) == [0, 1, 2, 3]
    together = get("together", key=found["rows"][1]["key"])
    wanted = (found["rows"][1]["step"], found["rows"][1]["prompt_id"])
    assert [(one["step"], one["prompt_id"]) for one in together["answers"]] == [wanted] * 2
    for one in together["answers"]:
        assert len(one["token_ids"]) == len(one["behavior_logprobs"]) == one["num_tokens"]
        assert one["pieces"] is None, "a run without a tokenizer's file"
        assert one["ground_truth"] == "is 1"
    assert {visit["step"] for visit in together["visits"]} >= set(range(1, 21))
    reported = get("find", WITH_TOKENIZER)["rows"][0]
    (answer, _) = get("together", WITH_TOKENIZER, key=reported["key"])["answers"]
    assert answer["pieces"][0] == HOSTILE
    assert [piece.strip() for piece in answer["pieces"][1:]] == [f"w{token}" for token in answer["token_ids"][1:]]
    bare = client.get("/answers", follow_redirects=False)
    assert (bare.is_redirect, bare.headers["location"][-9:]) == (True, "/answers/")
    others = [client.get(path).status_code for path in ("/answersheet", "/2.0/mlflow")]
    assert others == [204, 204], "the rest is the other application's"


@pytest.mark.parametrize(
    ("path", "params", "words"),
    [
        ("find", {"run": "../../etc"}, "is none of this workspace"),
        ("find", {"run": RUN, "step": "x"}, "step: must be a number"),
        ("find", {"run": RUN, "offset": "-1"}, "offset: must be a whole number"),
        ("find", {"run": RUN, "offset": "9" * 5_000}, "offset: must be a whole number of at most 19 digits"),
        ("find", {"run": "bare"}, "run bare has no stored responses"),
        ("find", {"run": RUN, "each": "x"}, "each: must be answer or prompt"),
        ("together", {"run": RUN, "key": "../../settings.json:0"}, "no such response"),
    ],
)
def test_a_wrong_request_is_refused(client, path, params, words):
    answer = client.get(f"/answers/{path}", params=params)
    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text


@contextmanager
def served(root: Path) -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(Guard(with_responses(root, ELSEWHERE)), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/answers/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.program("chromium")
def test_clicking_through_it(root, tmp_path):
    with served(root) as url, open_tab(tmp_path / "profile") as tab:
        tab.call("Page.navigate", url=url)
        tab.wait("document.querySelectorAll('.item').length === 50 && document.querySelector('#answers') !== null")
        assert tab.texts("#count") == ["161 responses"]
        # The newest is the hostile one: its text is shown, and nothing of it is done.
        assert tab.texts("#answers .verbatim") == [HOSTILE]
        assert tab.value("document.title") == "Responses · Millrace"
        assert tab.value("document.querySelectorAll('#detail img, #detail script').length") == 0

        tab.press("ArrowDown")
        tab.wait("document.querySelector('#detail h2').innerText.endsWith('step 20')")
        prompt = tab.texts("#detail h2")[0].split(" · ")[0]
        assert len(tab.texts("#answers .answer")) == 2, "both answers to the prompt"
        steps = tab.value("[...document.querySelectorAll('.step')].map((each) => Number(each.dataset.step))")
        assert steps[:20] == list(range(1, 21)), "the prompt across steps"
        tab.press("ArrowLeft")
        tab.wait("document.querySelector('#detail h2').innerText.endsWith('step 19')")
        assert tab.texts("#detail h2")[0].startswith(prompt)

        # An answer without a score says so in the list.
        assert "no score" in tab.texts(".item .figure")

        # Tokens are colored by one of several values, each in its own element as text.
        tab.choose("#run", WITH_TOKENIZER)
        tab.wait(f"{COUNT} === '8 responses' && document.querySelector('#color') !== null")
        assert tab.texts("#answers .tokens span")[0] == HOSTILE
        assert tab.value("document.querySelectorAll('#detail img, #detail script').length") == 0
        assert tab.value("document.querySelector('#color').value") == "log-probability"
        tab.press("c")
        assert tab.value("document.querySelector('#color').value") == "trainer minus engine"
        assert tab.value("document.querySelector('#answers .tokens span').title").startswith("trainer minus engine ")
        assert "color-mix" in tab.value("document.querySelector('#answers .tokens span').getAttribute('style')")
        tab.choose("#run", RUN)
        tab.wait(f"{COUNT} === '161 responses'")

        tab.click("#search")
        tab.type("ONERROR")
        tab.wait(f"{COUNT} === '1 response'")
        tab.click("#step")
        tab.type("many")
        tab.wait(f"{COUNT}.startsWith('step: must be a number')")
        asked = [problem for problem in tab.problems if not problem.startswith(f"asks for {url}")]
        assert [problem for problem in asked if "400 (Bad Request)" not in problem] == []
        assert json.dumps(HOSTILE) not in tab.problems

        tab.call("Page.navigate", url=url.replace("http://", "http://millrace:login@"))
        tab.wait("document.querySelectorAll('.item').length === 50")
