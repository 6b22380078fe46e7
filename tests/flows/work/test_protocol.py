"""Messages between a flow and its trainer process."""

import pytest

from flows.work.protocol import CheckpointSaved, Done, Failed, Note, Progress, Reply, RunEvent, Validated, parse_reply
from rlcore.errors import DataError, MillraceError


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        (b'{"event": "note", "text": "hello"}', Note("hello")),
        (b'{"event": "checkpoint", "step": 20, "path": "/x"}', CheckpointSaved(20, "/x")),
        (b'{"event": "validated", "name": "a", "step": 1, "summary": {"x": 1.5}}', Validated("a", 1, {"x": 1.5})),
        (b'{"event": "done", "command": "train", "result": {"step": 2}}', Done("train", {"step": 2})),
        (b'{"event": "error", "command": "c", "type": "T", "message": "m"}', Failed("c", "T", "m")),
        (b'{"event": "alarm", "step": 3, "text": "x"}', RunEvent("alarm", {"step": 3, "text": "x"})),
        (
            b'{"event": "progress", "stage": "train", "step": 1, "total_steps": 9, "metrics": {}}',
            Progress("train", 1, 9, {}, to_step=None, eta_s=None, tokens_per_s=None),
        ),
        (
            b'{"event": "progress", "stage": "s", "step": 1, "total_steps": 9, "metrics": {"a": 1}, "to_step": 5, '
            b'"eta_s": 2.5, "tokens_per_s": 7.5}',
            Progress("s", 1, 9, {"a": 1.0}, to_step=5, eta_s=2.5, tokens_per_s=7.5),
        ),
        (
            b'{"event": "progress", "stage": "s", "step": 1, "total_steps": 9, "metrics": {}, "eta_s": NaN}',
            Progress("s", 1, 9, {}),
        ),
    ],
)
def test_lines_are_parsed_as_replies(line: bytes, reply: Reply) -> None:
    assert parse_reply(line) == reply


@pytest.mark.parametrize("line", [b"hello", b"[1]", b"{}", b'{"event": 1}', b'{"event": "note"}'])
def test_invalid_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a reply|Expecting value|Field required|Missing required"):
        parse_reply(line)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("DataError", DataError),
        *((name, MillraceError) for name in ("KeyError", "annotations", "EXIT_RESUMABLE", "Path")),
    ],
)
def test_error_keeps_its_class(kind: str, expected: type[MillraceError]) -> None:
    error = Failed("train", kind, "row 7").error()
    assert (type(error), str(error)) == (expected, "row 7")
