"""The pages of a root's kept answers and of a run that goes on: beside MLflow's on its server, behind the same guard
and login.

    GET /answers/                     the page
    GET /answers/runs                 names of the runs that have answers on record
    GET /answers/find?run=&...        50 answers of a search (`Query.read`), and how many it has found
    GET /answers/one?run=&key=        one answer with its tokens
    GET /answers/live                 the page of a run that goes on
    GET /answers/now?run=             its state, curves and last answers; without `run`: of the one that wrote last

A run may be named by the beginning of its id. The pages ask for what they show; nothing is written. What a
model wrote goes out as JSON and into the page as text.
"""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.live import Followed, last_answers
from flows.work.runs import named_run
from flows.work.status import status_of
from rlcore.answers.query import MOST_DIGITS, Query, find_answers, finite, num_answers, one_answer
from rlcore.answers.store import LIGHT
from rlcore.answers.tokens import pieces, tokenizer_of
from rlcore.config.problems import shown
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


def with_answers(root: Path, app: ASGIApp) -> ASGIApp:
    """An application that answers below `/answers/` and hands everything else to another one."""
    answers = answers_app(root)

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(PREFIX)  # the bare name is redirected
        await (answers if ours else app)(scope, receive, send)

    return answered


def answers_app(root: Path) -> Starlette:
    """The pages of the runs under a root. A mistake in a request is a sentence for whoever asked."""

    def told(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    runs = Runs(root)
    routes = {
        "": lambda _: _page("answers.html.j2"),
        "runs": lambda _: JSONResponse(runs.newest_first("*/answers/*.parquet")),
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


class Runs:
    """The runs of a root and what is asked of them, by several threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._followed: dict[str, Followed] = {}
        self._lock = threading.Lock()

    def newest_first(self, *patterns: str) -> list[str]:
        """The runs that have such files, those that wrote one last first."""
        newest: dict[str, float] = {}
        for pattern in patterns:
            for file in (self._root / "runs").glob(pattern):
                name = file.relative_to(self._root / "runs").parts[0]
                with suppress(OSError):  # it is deleted at this moment
                    newest[name] = max(newest.get(name, 0.0), file.stat().st_mtime)
        return sorted(newest, key=lambda name: -newest[name])

    def _layout(self, name: str) -> RunLayout:
        """A run by its name, or by a beginning that is no other's, which may lead nowhere else."""
        folders = sorted((self._root / "runs").glob("*"))
        found = [folder for folder in folders if folder.name == name]
        found = found or [folder for folder in folders if name and folder.name.startswith(name)]
        if len(found) == 1:
            return RunLayout(self._root, found[0])
        why = "is the beginning of several runs" if found else "is none of this root"
        raise DataError(f"run {name!r}: {why}")

    def now(self, request: Request) -> Response:
        """State, curves and last answers of a run; where there is none of the name, the runs to choose from."""
        names = self.newest_first("*/settings.json", "*/metrics.jsonl")
        name = request.query_params.get("run") or next(iter(names), "")
        if not name:
            return JSONResponse({"runs": []})
        try:
            layout = self._layout(name)
            name = layout.run_dir.name
            with self._lock:
                if name not in self._followed:
                    self._followed[name] = Followed(named_run([name], self._root)[0], layout.journal)
                curves = self._followed[name].curves()
        except DataError as error:
            return JSONResponse({"error": str(error), "runs": names[:MOST_RUNS]}, 400)
        found = {"runs": names[:MOST_RUNS], **status_of(layout.run_dir).to_json(), "curves": curves}
        return JSONResponse(finite(found | {"answers": last_answers(layout)}))

    def find(self, request: Request) -> Response:
        """A page of the answers that a search finds."""
        given = request.query_params
        words: dict[str, Any] = {
            name: given[name] for name in ("step", "score", "search", "kind", "sort") if given.get(name)
        }
        query = Query.read(prompt=_number("prompt", given.get("prompt")), **words)
        offset = _number("offset", given.get("offset")) or 0
        folder = self._layout(given.get("run", "")).answers
        found = find_answers(folder, query)
        if not found:
            num_answers(folder)  # raises where the run has kept none
        rows = found.rows(range(len(found))[offset : offset + ROWS], LISTED)
        rows = [{**row, "answer": row["answer"][:SHOWN]} for row in rows]
        return JSONResponse(finite({"total": len(found), "rows": rows}))

    def one(self, request: Request) -> Response:
        """One answer with its tokens."""
        layout = self._layout(request.query_params.get("run", ""))
        row = one_answer(layout.answers, request.query_params.get("key", ""))
        decode = tokenizer_of(layout.inputs_json)
        texts = None if decode is None else pieces(decode, row["token_ids"])
        return JSONResponse(finite({**row, "pieces": texts}))


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise ConfigError(f"{name}: must be a whole number of at most {MOST_DIGITS} digits, got {shown(text)}")
    return int(text)
