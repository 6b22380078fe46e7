"""The page with the recorded responses of a workspace. MLflow's server serves the page and requires its login.

    GET /answers/                     the page
    GET /answers/runs                 the names of the runs with recorded responses
    GET /answers/find?run=&...        50 responses of a search (`Query.parse`), and their total number
    GET /answers/together?run=&key=   the responses to the same prompt at the same step, with their tokens

A run may be named by a prefix of its id. Requests write nothing. Responses are sent as JSON and shown as plain text.
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
from rlcore.report.page import responses_page, truth_text
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
PAGE_ROWS = 50  # largest number of responses in one reply
MAX_LISTED_CHARACTERS = 400  # of a prompt or response in the list
LISTED_COLUMNS = [*LIGHT.names, "change", "prompt", "answer"]


def with_responses(root: Path, app: ASGIApp) -> ASGIApp:
    """Return an application that serves `/answers/` and passes every other request to `app`.

    An invalid request to `/answers/` gets status 400 and a JSON object with the error's message.
    """
    runs = _Runs(root)
    routes = {
        "": lambda _: HTMLResponse(responses_page()),
        "runs": lambda _: JSONResponse(runs.newest_first()),
        "find": runs.find,
        "together": runs.same_prompt,
    }
    responses = Starlette(
        routes=[Route(URL_PREFIX + path, answer) for path, answer in routes.items()],
        exception_handlers={MillraceError: lambda _, error: JSONResponse({"error": str(error)}, 400)},
    )

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(URL_PREFIX)  # `/answers` is redirected
        await (responses if ours else app)(scope, receive, send)

    return dispatch


class _Runs:
    """The runs of a workspace, with a method for each request about their responses."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def newest_first(self) -> list[str]:
        """Return the names of the runs that have recorded responses, most recently written run first."""
        newest: dict[str, float] = {}
        for file in (self._root / "runs").glob("*/answers/*.parquet"):
            name = file.relative_to(self._root / "runs").parts[0]
            with suppress(OSError):  # deleted since the search
                newest[name] = max(newest.get(name, 0.0), file.stat().st_mtime)
        return sorted(newest, key=lambda name: -newest[name])

    def _layout(self, name: str) -> RunLayout:
        folders = sorted((self._root / "runs").glob("*"))
        found = [folder for folder in folders if folder.name == name]
        found = found or [folder for folder in folders if name and folder.name.startswith(name)]
        if len(found) == 1:
            return RunLayout(self._root, found[0])
        why = "is a prefix of several runs" if found else "is none of this workspace"
        raise DataError(f"run {name!r}: {why}")

    def find(self, request: Request) -> Response:
        """Return up to 50 of the responses that match the request's search, and their total number, as JSON."""
        given = request.query_params
        words: dict[str, Any] = {
            name: given[name] for name in ("step", "score", "search", "kind", "sort", "each") if given.get(name)
        }
        query = Query.parse(prompt=_number("prompt", given.get("prompt")), in_prompts=True, **words)
        offset = _number("offset", given.get("offset")) or 0
        folder = self._layout(given.get("run", "")).answers
        found = find_responses(folder, query)
        if not found:
            count_responses(folder)  # raises an error for a run without responses
        rows = found.rows(range(len(found))[offset : offset + PAGE_ROWS], LISTED_COLUMNS)
        rows = [{**row, **{name: row[name][:MAX_LISTED_CHARACTERS] for name in ("prompt", "answer")}} for row in rows]
        return JSONResponse(to_finite_json({"total": len(found), "rows": rows}))

    def same_prompt(self, request: Request) -> Response:
        """Return all responses to a prompt at one step, including their tokens.

        The JSON object also has the prompt's mean score at each step.
        """
        layout = self._layout(request.query_params.get("run", ""))
        found, visits = responses_to_same_prompt(layout.answers, request.query_params.get("key", ""))
        decode = load_decoder(layout.run_json)
        responses = [
            {
                **row,
                "parts": (parts := dict(row["parts"])),
                "solved": row["score"] is not None and Score(row["score"], parts).solved,
                "ground_truth": truth_text(row["ground_truth"]),
                "pieces": None if decode is None else token_texts(decode, row["token_ids"]),
            }
            for row in found
        ]
        return JSONResponse(to_finite_json({"answers": responses, "visits": visits}))


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ConfigError(f"{name}: must be a whole number of at most {MAX_DIGITS} digits, got {format_value(text)}")
    return int(text)
