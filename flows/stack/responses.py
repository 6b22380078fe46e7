"""The page of a root's kept answers: beside MLflow's on its server, behind the same guard and login.

    GET /answers/                     the page
    GET /answers/runs                 names of the runs that have answers on record
    GET /answers/find?run=&...        50 answers of a search (`Query.read`), and how many it has found
    GET /answers/together?run=&key=   the answers to the same prompt at the same step, with their tokens

A run may be named by the beginning of its id. The page asks for what it shows; nothing is written. What a
model wrote goes out as JSON and into the page as text.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlcore.config.problems import format_value
from rlcore.errors import ConfigError, DataError, MillraceError
from rlcore.responses.query import (
    MAX_DIGITS,
    Query,
    count_responses,
    find_responses,
    load_decoder,
    responses_to_same_prompt,
    to_finite_json,
    token_texts,
)
from rlcore.responses.store import LIGHT
from rlcore.run.layout import RunLayout
from rlcore.score import Score

URL_PREFIX = "/answers/"
PAGE_ROWS = 50
"""Answers that the page asks for at a time."""
MAX_LISTED_CHARACTERS = 400
"""Characters of a prompt or an answer in the list."""
LISTED_COLUMNS = [*LIGHT.names, "change", "prompt", "answer"]


def with_responses(root: Path, app: ASGIApp) -> ASGIApp:
    """An application that answers below `/answers/` and hands everything else to another one."""
    answers = responses_app(root)

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(URL_PREFIX)  # the bare name is redirected
        await (answers if ours else app)(scope, receive, send)

    return answered


def responses_app(root: Path) -> Starlette:
    """The page of the runs under a root. A mistake in a request is a sentence for whoever asked."""

    def told(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    runs = Runs(root)
    routes = {
        "": _page,
        "runs": lambda _: JSONResponse(runs.newest_first()),
        "find": runs.find,
        "together": runs.same_prompt,
    }
    return Starlette(
        routes=[Route(URL_PREFIX + path, answer) for path, answer in routes.items()],
        exception_handlers={MillraceError: told},
    )


def _page(request: Request) -> Response:
    from rlcore.report.page import responses_page

    return HTMLResponse(responses_page())


class Runs:
    """The runs of a root and what is asked of them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def newest_first(self) -> list[str]:
        """The runs that have answers on record, those that wrote some last first."""
        newest: dict[str, float] = {}
        for file in (self._root / "runs").glob("*/answers/*.parquet"):
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

    def find(self, request: Request) -> Response:
        """A page of the answers that a search finds."""
        given = request.query_params
        words: dict[str, Any] = {
            name: given[name] for name in ("step", "score", "search", "kind", "sort", "each") if given.get(name)
        }
        query = Query.parse(prompt=_number("prompt", given.get("prompt")), in_prompts=True, **words)
        offset = _number("offset", given.get("offset")) or 0
        folder = self._layout(given.get("run", "")).answers
        found = find_responses(folder, query)
        if not found:
            count_responses(folder)  # raises where the run has kept none
        rows = found.rows(range(len(found))[offset : offset + PAGE_ROWS], LISTED_COLUMNS)
        rows = [{**row, **{name: row[name][:MAX_LISTED_CHARACTERS] for name in ("prompt", "answer")}} for row in rows]
        return JSONResponse(to_finite_json({"total": len(found), "rows": rows}))

    def same_prompt(self, request: Request) -> Response:
        """The answers to the prompt of one answer at its step, with their tokens, and the other steps with answers."""
        from rlcore.report.page import truth_text

        layout = self._layout(request.query_params.get("run", ""))
        found = responses_to_same_prompt(layout.answers, request.query_params.get("key", ""))
        decode = load_decoder(layout.run_json)
        answers = [
            {
                **row,
                "parts": (parts := dict(row["parts"])),
                "solved": row["score"] is not None and Score(row["score"], parts).solved,
                "ground_truth": truth_text(row["ground_truth"]),
                "pieces": None if decode is None else token_texts(decode, row["token_ids"]),
            }
            for row in found.answers
        ]
        return JSONResponse(to_finite_json({"answers": answers, "visits": found.visits}))


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ConfigError(f"{name}: must be a whole number of at most {MAX_DIGITS} digits, got {format_value(text)}")
    return int(text)
