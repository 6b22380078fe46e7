"""An endpoint of a judge on this machine.

It gives the `replies` of its server in order, the last one again and again. Without replies, an answer that holds
`case=NAME` gets the case of that name.
"""

import gzip
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

GOOD = ("good", "tag", "flaky", "words_first")
HOSTILE = (
    "slow", "status_500", "wrong_json", "never_ends", "wrong_key", "closes", "huge", "redirect", "not_a_number",
    "out_of_range", "below_range", "no_choices", "content_type", "two_scores", "no_text", "bomb", "cut_off", "a_list",
)  # fmt: skip
TEXTS = {
    "good": '{"score": 0.75}',
    "tag": "<score>0.75</score>",
    "words_first": 'Nearly right.\n```json\n{"score": 0.75}\n```',
    "not_a_number": '{"score": NaN}',
    "out_of_range": '{"score": 11}',
    "below_range": '{"score": -1}',
    "two_scores": 'It says {"score": 1}, but: {"score": 0.5}',
}
Reply = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


class Judge(ThreadingHTTPServer):
    """The server: requests as (path, headers, body), and their number by case."""

    daemon_threads, block_on_close = True, False

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.asked, self.seen = list(replies), list[tuple[str, dict[str, str], Any]](), Counter[str]()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients break off: some cases are made for that."""


@contextmanager
def judging(*replies: Reply) -> Iterator[Judge]:
    """A judge that serves inside the block."""
    with Judge(*replies) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Judge

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, body: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **given}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen, replies = self.server.seen, self.server.replies
        self.server.asked.append((self.path, dict(self.headers), asked))
        if replies:
            status, body, headers = replies.pop(0) if len(replies) > 1 else replies[0]
            self.reply(body, status, **{name.replace("-", "_"): value for name, value in headers.items()})
            return
        if self.path != "/v1/chat/completions":
            seen["elsewhere"] += 1
        found = re.search(r"case=(\w+)", asked["messages"][0]["content"])
        case = found[1] if found else "good"
        seen[case] += 1
        said = self.headers.get("Authorization", "").encode()
        match case:
            case "slow":
                time.sleep(30)
            case "status_500":
                self.reply(b"{}", 500)
            case "wrong_json":
                self.reply(b'{"choices": [')
            case "never_ends":
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            case "wrong_key":
                self.reply(b"you sent " + said, 401)
            case "closes":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            case "huge":
                self.reply(b" " * 3_000_000)
            case "redirect":
                self.reply(b"{}", 307, Location="/elsewhere")
            case "no_choices":
                self.reply(b'{"choices": []}')
            case "content_type":
                self.reply(told(TEXTS["good"]), kind="text/html")
            case "no_text":
                self.reply(b'{"choices": [{"message": {"content": null}}]}')
            case "bomb":
                self.reply(gzip.compress(b" " * 50_000_000), Content_Encoding="gzip")
            case "cut_off":
                self.reply(told(TEXTS["good"]), Content_Length="100000")
                self.close_connection = True
            case "a_list":
                self.reply(b"[" * 200_000)
            case "flaky":
                self.reply(told(TEXTS["good"]), 503 if seen[case] < 3 else 200)
            case "form":  # the second of the scores that the request allows
                form = asked["response_format"]["json_schema"]["schema"]
                self.reply(told(json.dumps({"score": form["properties"]["score"]["enum"][1]})))
            case _:
                self.reply(told(TEXTS[case]))


def told(text: object) -> bytes:
    """A reply with this text."""
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()
