"""The pages of a root's kept answers and of a run that goes on: beside MLflow's on its server, behind the same guard
and login.

    GET /answers/                     the page
    GET /answers/runs                 names of the runs that have answers on record
    GET /answers/find?run=&...        50 answers of a search (`Query.read`), and how many it has found
    GET /answers/one?run=&key=        one answer with its tokens
    GET /answers/live                 the page of a run that goes on
    GET /answers/now?run=             its state, curves and last answers; without `run`: of the one that wrote last

The pages ask for what they show; nothing is written. What a model wrote goes out as JSON and into the page as text.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.commands.settings import named_run
from flows.live import Followed, last_answers
from flows.work.runs import all_runs
from flows.work.status import status_of
from rlcore.answers.query import KeptAnswers, Query, finite
from rlcore.answers.store import LIGHT, parts_of
from rlcore.answers.tokens import pieces, tokenizer_of
from rlcore.errors import ConfigError, DataError, MillraceError
from rlcore.run.layout import RunLayout

PREFIX = "/answers/"
ROWS = 50
"""Answers that the page asks for at a time."""
SHOWN = 400
"""Characters of an answer in the list."""
MOST_RUNS = 200
"""Runs that the page of a run offers."""
LISTED = [*LIGHT.names, "answer"]


class WithAnswers:
    """An ASGI application that answers below `/answers/` and hands everything else to another one."""

    def __init__(self, root: Path, app: ASGIApp) -> None:
        self._app = app
        self._answers = answers_app(root)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        ours = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        await (self._answers if ours else self._app)(scope, receive, send)


def answers_app(root: Path) -> Starlette:
    """The page of the runs under a root."""
    runs = Runs(root)
    routes: dict[str, Callable[[Request], Response]] = {
        "": _page,
        "runs": partial(_runs, runs),
        "find": partial(_find, runs),
        "one": partial(_one, runs),
        "live": _live_page,
        "now": partial(_now, runs),
    }
    return Starlette(routes=[Route(PREFIX + path, _told(answer)) for path, answer in routes.items()])


class Runs:
    """The runs of a root, each opened once. A search of one run holds up other searches of that run alone."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[str, tuple[threading.Lock, RunLayout, KeptAnswers]] = {}
        self._followed: dict[str, tuple[threading.Lock, RunLayout, Followed]] = {}
        self._lock = threading.Lock()

    def begun(self) -> list[str]:
        """All runs, those that wrote last first."""
        newest: dict[str, float] = {}
        for folder in all_runs(self._root):
            for file in (folder / "metrics.jsonl", folder / "settings.json"):
                with suppress(OSError):
                    newest.setdefault(folder.name, file.stat().st_mtime)
        return sorted(newest, key=lambda name: -newest[name])

    def follow(self, name: str) -> tuple[threading.Lock, RunLayout, Followed]:
        """One of them.

        Raises:
            DataError: there is no such run, or its settings cannot be read.
        """
        with self._lock:
            if name not in self._followed:
                if name not in self.begun():
                    raise DataError(f"run {name!r}: is none of this root")
                config, layout = named_run([name], self._root)
                self._followed[name] = (threading.Lock(), layout, Followed(config, layout.journal))
            return self._followed[name]

    def names(self) -> list[str]:
        """Those that have answers on record, the newest first."""
        newest: dict[str, float] = {}
        for folder in (self._root / "runs").glob("*/answers"):
            with suppress(ValueError, OSError):  # no part yet, or one is deleted at this moment
                newest[folder.parent.name] = max(path.stat().st_mtime for path in parts_of(folder))
        return sorted(newest, key=lambda name: -newest[name])

    def open(self, name: str) -> tuple[threading.Lock, RunLayout, KeptAnswers]:
        """One of them.

        Raises:
            DataError: there is no such run.
        """
        with self._lock:
            if name not in self._open:
                if name not in self.names():
                    raise DataError(f"run {name!r}: is none of this root, or has no answers on record")
                layout = RunLayout(self._root, self._root / "runs" / name)
                self._open[name] = (threading.Lock(), layout, KeptAnswers(layout.answers))
            return self._open[name]


def _told(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """A mistake in a request is a sentence for whoever asked."""

    def told(request: Request) -> Response:
        try:
            return answer(request)
        except MillraceError as error:
            return JSONResponse({"error": str(error)}, 400)

    return told


def _page(request: Request) -> Response:
    return HTMLResponse(_html())


@cache
def _html() -> str:
    from rlcore.report.page import scripted_page

    return scripted_page("answers.html.j2")


def _live_page(request: Request) -> Response:
    from rlcore.report.page import scripted_page

    return HTMLResponse(scripted_page("live.html.j2"))


def _now(runs: Runs, request: Request) -> Response:
    names = runs.begun()[:MOST_RUNS]
    name = request.query_params.get("run") or next(iter(names), "")
    if not name:
        return JSONResponse({"runs": []})
    lock, layout, followed = runs.follow(name)
    with lock:
        curves = followed.curves()
    found = {"runs": names, **status_of(layout.run_dir).to_json(), "curves": curves}
    return JSONResponse(finite(found | {"answers": [asdict(one) for one in last_answers(layout)]}))


def _runs(runs: Runs, request: Request) -> Response:
    return JSONResponse(runs.names())


def _find(runs: Runs, request: Request) -> Response:
    given = request.query_params
    words = {name: given[name] for name in ("step", "score", "search", "kind", "sort") if given.get(name)}
    query = Query.read(prompt=_number("prompt", given.get("prompt")), **words)
    offset = _number("offset", given.get("offset")) or 0
    lock, _, answers = runs.open(given.get("run", ""))
    with lock:
        numbers = answers.find(query)
        rows = answers.rows(numbers.slice(offset, ROWS).to_pylist(), LISTED)
    for row in rows:
        row["answer"] = row["answer"][:SHOWN]
    return JSONResponse(finite({"total": len(numbers), "rows": rows}))


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name}: must be a whole number, got {text!r}")
    return int(text)


def _one(runs: Runs, request: Request) -> Response:
    lock, layout, answers = runs.open(request.query_params.get("run", ""))
    with lock:
        row: dict[str, Any] = answers.one(request.query_params.get("key", ""))
    decode = tokenizer_of(layout.inputs_json)
    texts = None if decode is None else pieces(decode, row["token_ids"])
    return JSONResponse(finite({**row, "pieces": texts}))
