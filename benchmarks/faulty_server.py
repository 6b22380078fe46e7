"""A server in front of another one, which answers late or with errors until it is healed by SIGUSR1.

python -m benchmarks.faulty_server PORT TARGET_PORT [--delay-s=10] [--error=500]
"""

import argparse
import http.client
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASSED_ON = ("content-type", "authorization", "accept")
healed = threading.Event()


def handler_for(target_port: int, delay_s: float, error: int) -> type[BaseHTTPRequestHandler]:
    """What answers a request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if error and not healed.is_set():
                self.reply(error, "text/plain", b"out of order")
                return
            healed.wait(delay_s)
            target = http.client.HTTPConnection("127.0.0.1", target_port)
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            target.request(self.command, self.path, body, headers)
            answer = target.getresponse()
            self.reply(answer.status, answer.headers.get("content-type", "text/plain"), answer.read())
            target.close()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

        def reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("target_port", type=int)
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--error", type=int, default=0, help="status of each answer; 0: that of the target")
    arguments = parser.parse_args()
    signal.signal(signal.SIGUSR1, lambda *_: healed.set())
    handler = handler_for(arguments.target_port, arguments.delay_s, arguments.error)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), handler).serve_forever()


if __name__ == "__main__":
    main()
