"""A model hub on this machine, which speaks the hub's protocol, also for uploads.

Large files are answered by an absolute redirect to another host, all others by a relative one.
"""

import hashlib
import json
import shutil
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.helpers.serving import serving as serve

HUB_ID = "somebody/tiny-countdown"
LARGE = (".parquet", ".safetensors")
# The hub sends a thousand entries a page.
TREE_PAGE = 2

Answer = tuple[int, Mapping[str, str], bytes]


@dataclass
class Repository:
    """The files of each commit, and the commit of each branch and tag. Files need the `token`, if one is set."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    """`repositories` by `datasets/owner/name` or `owner/name`. `writers`: the owner whose repositories a token may
    write.
    """

    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)
    port: int = 0
    writers: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    created: list[dict[str, object]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, url: str, token: str | None) -> Answer:
        path, query = unquote(urlsplit(url).path).strip("/"), parse_qs(urlsplit(url).query)
        first, _, rest = path.partition("/")
        if path == "":
            return 200, {}, b"a hub"
        if first == "blobs":
            return 200, {"ETag": f'"{rest}"'}, self._blob(rest)
        if first == "api" and rest.startswith("resolve-cache/"):
            return self._file(rest.removeprefix("resolve-cache/"), token, redirect=False)
        if first == "api":
            return self._about(rest.removeprefix("models/"), query)
        return self._file(path, token, redirect=True)

    def change(self, url: str, token: str | None, body: bytes) -> Answer:
        """Answer a POST or PUT. A large file is known by its digest until a commit names it."""
        path = unquote(urlsplit(url).path).strip("/")
        if path.startswith("uploads/"):
            self.uploads[path.removeprefix("uploads/")] = body
            return 200, {}, b""
        owner = self.writers.get((token or "").removeprefix("Bearer "))
        if owner is None:
            return _missing("Unauthorized", 401)
        if path == "api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if path == "api/repos/create":
            return self._create(owner, json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{"upload": {"href": f"{self.endpoint}/uploads/{one['oid']}"}} for one in objects]
            return _json({"objects": [{**one, "actions": do} for one, do in zip(objects, uploads, strict=True)]})
        name, repository, rest = self._find(path.removeprefix("api/models/"))
        if repository is None or not name.startswith(f"{owner}/"):
            return _missing("RepoNotFound", 404)
        if rest.startswith("preupload/"):
            modes = {
                one["path"]: "lfs" if one["path"].endswith(LARGE) else "regular" for one in json.loads(body)["files"]
            }
            return _json(
                {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}
            )
        commit = hashlib.sha1(body).hexdigest()
        repository.commits[commit] = dict(repository.commits[repository.refs["main"]])
        for line in map(json.loads, body.splitlines()):
            if line["key"] in ("file", "lfsFile"):
                value = line["value"]
                content = b64decode(value["content"]) if line["key"] == "file" else self.uploads[value["oid"]]
                repository.commits[commit][value["path"]] = content
        repository.refs["main"] = commit
        return _json({"commitUrl": f"{self.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    def _create(self, owner: str, asked: dict[str, object]) -> Answer:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != owner:
            return _missing("You don't have the rights to create a model under this namespace", 403)
        if name in self.repositories:
            return _missing("You already created this model repo", 409)
        self.repositories[name] = Repository({"0" * 40: {".gitattributes": b""}}, {"main": "0" * 40})
        self.created.append(asked)
        return _json({"url": f"{self.endpoint}/{name}", "name": name})

    def _blob(self, digest: str) -> bytes:
        commits = [files for one in self.repositories.values() for files in one.commits.values()]
        every = (content for files in commits for content in files.values())
        return next(content for content in every if hashlib.sha256(content).hexdigest() == digest)

    def _about(self, path: str, query: Mapping[str, list[str]]) -> Answer:
        name, found, rest = self._find(path)
        if found is None:
            return _missing("RepoNotFound", 401)
        verb, revision, folder = (*rest.split("/", 2), "", "", "")[:3]
        commit = found.commit_of(revision or "main")
        if commit is None:
            return _missing("RevisionNotFound", 404)
        files = {path: content for path, content in found.commits[commit].items() if path.startswith(folder)}
        if folder and not files:
            return _missing("EntryNotFound", 404)
        if verb != "tree":
            siblings = [{"rfilename": path} for path in files]
            return _json({"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings})
        start = int(query.get("cursor", ["0"])[0])
        page = [_entry(path, content) for path, content in sorted(files.items())[start : start + TREE_PAGE]]
        after = f"{self.endpoint}/api/{path}?recursive=True&cursor={start + TREE_PAGE}"
        status, headers, body = _json(page)
        return status, headers | ({"Link": f'<{after}>; rel="next"'} if start + TREE_PAGE < len(files) else {}), body

    def _file(self, path: str, token: str | None, *, redirect: bool) -> Answer:
        _, found, rest = self._find(path)
        if found is None:
            return _missing("RepoNotFound", 401)
        _, revision, file = rest.split("/", 2)
        commit = found.commit_of(revision)
        if commit is None:
            return _missing("RevisionNotFound", 404)
        headers = {"X-Repo-Commit": commit}
        if found.token is not None and token != f"Bearer {found.token}":
            return _missing("GatedRepo", 401)
        content = found.commits[commit].get(file)
        if content is None:
            status, missing, body = _missing("EntryNotFound", 404)
            return status, {**missing, **headers}, body
        if file.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            return 302, {**headers, "Location": f"http://localhost:{self.port}/blobs/{digest}"}, b""
        headers["ETag"] = f'"{_blob_id(content)}"'
        if redirect:
            return 307, {**headers, "Location": f"/api/resolve-cache/{path}"}, b""
        return 200, headers, content

    def _find(self, path: str) -> tuple[str, Repository | None, str]:
        for name, repository in self.repositories.items():
            if path == name or path.startswith(f"{name}/"):
                return name, repository, path[len(name) + 1 :]
        return path, None, ""


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 132}
    return entry


def _json(value: object) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _missing(code: str, status: int) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b""


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            self._send(hub.answer(self.path, self.headers["Authorization"]))

        def do_POST(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(hub.change(self.path, self.headers["Authorization"], body))

        def _send(self, answer: Answer) -> None:
            status, headers, body = answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            if self.headers["Authorization"] is None:
                self.send_header("X-HF-Warning", "unauthenticated; You are sending unauthenticated requests")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815
        do_PUT = do_POST  # noqa: N815

    with serve(Handler) as address:
        hub.port = int(address.rpartition(":")[2])
        yield hub


def use_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, port: int) -> None:
    """Point the hub's client at a port of the loopback, with its cache in a folder and without the user's token."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    endpoint = f"http://127.0.0.1:{port}"
    # Read from the environment when the client is imported, so a changed environment would say nothing.
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    }.items():
        monkeypatch.setattr(constants, name, value)


def cache_of(model: Path, home: Path) -> None:
    """Write a model into a hub's cache on disk."""
    repository = home / "hub" / ("models--" + HUB_ID.replace("/", "--"))
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(model, snapshot)
    (snapshot / "manifest.json").unlink()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
