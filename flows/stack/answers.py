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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.live import Followed, last_answers
from flows.work.runs import all_runs, named_run
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
    """The pages of the runs under a root. A mistake in a request is a sentence for whoever asked."""

    def told(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    runs = Runs(root)
    routes = {
        "": lambda _: _page("answers.html.j2"),
        "runs": lambda _: JSONResponse(runs.with_answers()),
        "find": runs.find,
        "one": runs.one,
        "live": lambda _: _page("live.html.j2"),
        "now": runs.now,
    }
    return Starlette(
        routes=[Route(PREFIX + path, answer) for path, answer in routes.items()],
        exception_handlers={MillraceError: told},
    )


def _page(template: str) -> Response:
    from rlcore.report.page import scripted_page

    return HTMLResponse(scripted_page(template))


@dataclass(slots=True)
class Opened:
    """A run of the root. Whoever holds the lock may search it or look at its journal; others wait."""

    layout: RunLayout
    answers: KeptAnswers
    lock: threading.Lock
    followed: Followed | None = None


class Runs:
    """The runs of a root, each opened once, and what is asked of them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: dict[str, Opened] = {}
        self._lock = threading.Lock()

    def begun(self) -> list[str]:
        """All runs, those that wrote last first."""
        newest: dict[str, float] = {}
        for folder in all_runs(self._root):
            for file in (folder / "metrics.jsonl", folder / "settings.json"):
                with suppress(OSError):
                    newest.setdefault(folder.name, file.stat().st_mtime)
        return sorted(newest, key=lambda name: -newest[name])

    def with_answers(self) -> list[str]:
        """Those that have answers on record, the newest first."""
        newest: dict[str, float] = {}
        for folder in (self._root / "runs").glob("*/answers"):
            with suppress(ValueError, OSError):  # no part yet, or one is deleted at this moment
                newest[folder.parent.name] = max(path.stat().st_mtime for path in parts_of(folder))
        return sorted(newest, key=lambda name: -newest[name])

    def _open(self, name: str, known: Sequence[str], problem: str) -> Opened:
        """A run of this name among the known ones."""
        if name not in known:
            raise DataError(f"run {name!r}: {problem}")
        with self._lock:
            if name not in self._opened:
                layout = RunLayout(self._root, self._root / "runs" / name)
                self._opened[name] = Opened(layout, KeptAnswers(layout.answers), threading.Lock())
            return self._opened[name]

    def _asked(self, request: Request) -> Opened:
        problem = "is none of this root, or has no answers on record"
        return self._open(request.query_params.get("run", ""), self.with_answers(), problem)

    def now(self, request: Request) -> Response:
        """State, curves and last answers of a run."""
        names = self.begun()
        name = request.query_params.get("run") or next(iter(names), "")
        if not name:
            return JSONResponse({"runs": []})
        run = self._open(name, names, "is none of this root")
        with run.lock:
            if run.followed is None:
                run.followed = Followed(named_run([name], self._root)[0], run.layout.journal)
            curves = run.followed.curves()
        found = {"runs": names[:MOST_RUNS], **status_of(run.layout.run_dir).to_json(), "curves": curves}
        return JSONResponse(finite(found | {"answers": [asdict(one) for one in last_answers(run.layout)]}))

    def find(self, request: Request) -> Response:
        """A page of the answers that a search finds."""
        given = request.query_params
        words = {name: given[name] for name in ("step", "score", "search", "kind", "sort") if given.get(name)}
        query = Query.read(prompt=_number("prompt", given.get("prompt")), **words)
        offset = _number("offset", given.get("offset")) or 0
        run = self._asked(request)
        with run.lock:
            numbers = run.answers.find(query)
            rows = run.answers.rows(numbers.slice(offset, ROWS).to_pylist(), LISTED)
        rows = [{**row, "answer": row["answer"][:SHOWN]} for row in rows]
        return JSONResponse(finite({"total": len(numbers), "rows": rows}))

    def one(self, request: Request) -> Response:
        """One answer with its tokens."""
        run = self._asked(request)
        with run.lock:
            row = run.answers.one(request.query_params.get("key", ""))
        decode = tokenizer_of(run.layout.inputs_json)
        texts = None if decode is None else pieces(decode, row["token_ids"])
        return JSONResponse(finite({**row, "pieces": texts}))


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name}: must be a whole number, got {text!r}")
    return int(text)
