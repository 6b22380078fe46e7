"""Requests as an attacker sends them, with any Host and any Origin, and the responses to them."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flows.stack.state import read_stack
from tests.flows.conftest import basic
from tests.helpers.chromium import Tab
from tests.helpers.stack import Stack


@dataclass(frozen=True)
class Attempt:
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    host: str = ""
    origin: str = ""
    login: str = ""
    fetched_for: str = ""
    status: int = 403

    def try_at(self, server: str) -> str:
        to = urlsplit(server).netloc
        headers = {
            "Host": self.host or to,
            "Content-Type": "application/json",
            "Authorization": basic(self.login) if self.login else "",
            "Origin": self.origin,
            "Sec-Fetch-Site": self.fetched_for,
        }
        connection = http.client.HTTPConnection(to)
        try:
            body = None if self.body is None else json.dumps(self.body)
            connection.request(self.method, self.path, body, {name: text for name, text in headers.items() if text})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            assert answer.status == self.status, (self, answer.status, text[:500])
            if self.status != 200:
                assert answer.headers["Access-Control-Allow-Origin"] is None
            return text
        finally:
            connection.close()


ATTACK = """
(async () => {
    const reported = [], given = %s;
    for (const {url, method, body, login} of given)
        for (const mode of ["cors", "no-cors"])
            try {
                const headers = {"Content-Type": mode === "cors" ? "application/json" : "text/plain"};
                if (login) headers.Authorization = login;
                const options = {method, mode, headers, body: body && JSON.stringify(body), credentials: "include"};
                const answer = await fetch(url, options);
                reported.push(`${answer.type} ${answer.status}`);
            } catch (error) {
                reported.push("refused");
            }
    const socket = new WebSocket(given[0].socket, "prefect");
    reported.push(await new Promise((done) => {
        socket.onopen = () => done("open");
        socket.onerror = () => done("refused");
    }));
    return reported;
})()
"""  # the requests of a hostile page; the result of each


def responses_to_page(tab: Tab, stack: Stack, command: str, *, through: str = "127.0.0.1") -> list[str]:
    record = read_stack(stack.root)
    prefect, mlflow = (url.replace("127.0.0.1", through) for url in (stack.url, record.mlflow_url))
    start = f"{prefect}/deployments/{stack.deployment('pipeline/debug')['id']}/create_flow_run"
    given = [
        {
            "url": start,
            "method": "POST",
            "body": {"job_variables": {"command": command}},
            "socket": f"{prefect.replace('http', 'ws', 1)}/events/in",
        },
        {"url": start, "method": "POST", "body": {}, "login": basic(stack.login)},
        {"url": f"{prefect}/deployments/name/pipeline/debug", "method": "GET"},
        {"url": f"{mlflow}/api/2.0/mlflow/experiments/create", "method": "POST", "body": {"name": "evil"}},
        {"url": f"{mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default", "method": "GET"},
    ]
    script = ATTACK % json.dumps(given)
    found = tab.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    answers: list[str] = found["result"]["value"]
    return answers
