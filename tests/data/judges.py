"""A local endpoint of a judge model.

The server sends its `replies` in order and repeats the last one. Without replies, a response with `case=NAME` gets the
reply of that case.
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

Reply = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


def message(text: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


GOOD = ("good", "tag", "flaky")
VERDICT = message('{"score": 0.75}')
REPLIES: dict[str, Reply] = {
    "good": (200, VERDICT, {}),
    "tag": (200, message("<score>0.75</score>"), {}),
    "not_a_number": (200, message('{"score": NaN}'), {}),
    "status_500": (500, b"{}", {}),
    "wrong_json": (200, b'{"choices": [', {}),
    "huge": (200, b" " * 3_000_000, {}),
    "redirect": (307, b"{}", {"Location": "/elsewhere"}),
    "bomb": (200, gzip.compress(b" " * 50_000_000), {"Content-Encoding": "gzip"}),
    "a_list": (200, b"[" * 200_000, {}),
}
HOSTILE = (*(case for case in REPLIES if case not in GOOD), "slow", "never_ends", "wrong_key", "closes", "cut_off")


class Judge(ThreadingHTTPServer):
    """The server. `requests` are (path, headers, body). `seen` counts the requests of each case."""

    daemon_threads, block_on_close = True, False

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.requests, self.seen = list(replies), list[tuple[str, dict[str, str], Any]](), Counter[str]()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *args: object) -> None:
        """Ignore clients that close the connection, as some cases make them."""


@contextmanager
def judge_server(*replies: Reply) -> Iterator[Judge]:
    with Judge(*replies) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Judge

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen, replies = self.server.seen, self.server.replies
        self.server.requests.append((self.path, dict(self.headers), request))
        if replies:
            return self.reply(*(replies.pop(0) if len(replies) > 1 else replies[0]))
        if self.path != "/v1/chat/completions":
            seen["elsewhere"] += 1
        found = re.search(r"case=(\w+)", request["messages"][0]["content"])
        case = found[1] if found else "good"
        seen[case] += 1
        match case:
            case "slow":
                time.sleep(30)
            case "never_ends":
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            case "wrong_key":
                self.reply(401, b"you sent " + self.headers.get("Authorization", "").encode(), {})
            case "closes":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            case "cut_off":
                self.reply(200, VERDICT, {"Content-Length": "100000"})
                self.close_connection = True
            case "flaky":
                self.reply(503 if seen[case] < 3 else 200, VERDICT, {})
            case _:
                self.reply(*REPLIES[case])
