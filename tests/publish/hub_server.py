"""Stand-in for the Hub on loopback, with injected faults: the endpoints that publishing calls.

It has repositories with branches, tags and large files. Each request may be rejected, stalled, or reset before or
after it takes effect.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]
ROUTES = (
    ("GET", "whoami", r"/api/whoami-v2"),
    ("POST", "create", r"/api/repos/create"),
    ("POST", "yaml", r"/api/validate-yaml"),
    ("GET", "auth", r"/api/models/(?P<repo>[^/]+/[^/]+)/auth-check/write"),
    ("GET", "tree", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)"),
    ("GET", "commits", r"/api/models/(?P<repo>[^/]+/[^/]+)/commits/(?P<rev>[^/]+)"),
    ("GET", "info", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<rev>[^/]+))?"),
    ("POST", "preupload", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)"),
    ("POST", "commit", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)"),
    ("POST", "tag", r"/api/models/(?P<repo>[^/]+/[^/]+)/tag/(?P<rev>[^/]+)"),
    ("DELETE", "untag", r"/api/models/(?P<repo>[^/]+/[^/]+)/tag/(?P<rev>[^/]+)"),
    ("POST", "branch", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<rev>[^/]+)"),
    ("POST", "batch", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("PUT", "upload", r"/large/(?P<oid>\w+)(/(?P<part>\d+))?"),
    ("POST", "join", r"/large/(?P<oid>\w+)"),
    ("POST", "verify", r"/verify"),
    ("HEAD", "file", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)"),
    ("GET", "file", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)"),
)
PART_BYTES = 1 << 16
"""Size above which files are uploaded in parts."""


@dataclass(frozen=True)
class Fault:
    """Fault of a request.

    Attributes:
        status: HTTP status of the response; 0 for none.
        headers: Headers of the response.
        body: Body of the response.
        cut: The connection is reset ``before`` or ``after`` the request takes effect.
        stalls: There is no response until the server stops.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    cut: str = ""
    stalls: bool = False


@dataclass
class Commit:
    oid: str
    message: str
    files: Files


@dataclass
class Repository:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Commit:
        commits = {commit.oid: commit for branch in self.branches.values() for commit in branch}
        if revision in self.branches:
            return self.branches[revision][-1]
        return commits[self.tags.get(revision, revision)]


@dataclass(frozen=True)
class Download:
    content: bytes
    headers: dict[str, str]


class Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **answer: str) -> None:
        super().__init__(status)
        self.answer = Fault(status, {"X-Error-Code": code, "X-Error-Message": message}, json.dumps(answer).encode())


class Hub:
    """State of the server, and its faults.

    Attributes:
        faults: Kind of request -> faults of its next requests, in order.
        sabotage: Returns the fault of each other request of a kind.
        requests: Kinds of all requests, in order.
        large: Hash -> content of a large file.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.sabotage: Callable[[str], Fault | None] = lambda kind: None
        self.requests: list[str] = []
        self.num_faults = 0
        self.large: Files = {}
        self.role = "write"
        self.orgs: list[dict[str, str]] = []
        self.may_write = True
        self.endpoint = ""
        self._parts: dict[str, dict[int, bytes]] = defaultdict(dict)
        self.closing = threading.Event()
        self.lock = threading.RLock()

    @property
    def num_requests(self) -> Counter[str]:
        return Counter(self.requests)

    def add(self, name: str, *, private: bool, files: Files | None = None) -> Repository:
        repository = Repository(private)
        self.repositories[name] = repository
        self._commit(repository, "main", "initial commit", files or {".gitattributes": b""})
        return repository

    def find_fault(self, kind: str) -> Fault | None:
        with self.lock:
            self.requests.append(kind)
            fault = self.faults[kind].pop(0) if self.faults[kind] else self.sabotage(kind)
            self.num_faults += fault is not None
            return fault

    def answer(self, kind: str, path: dict[str, str], query: str, body: bytes) -> Any:
        with self.lock:
            return getattr(self, f"_{kind}")(path, body)

    def _repository(self, path: dict[str, str]) -> Repository:
        if path["repo"] not in self.repositories:
            raise Refusal(404, "RepoNotFound")
        return self.repositories[path["repo"]]

    def _at(self, path: dict[str, str]) -> Commit:
        try:
            return self._repository(path).find(path.get("rev") or "main")
        except KeyError:
            raise Refusal(404, "RevisionNotFound") from None

    def _commit(self, repository: Repository, branch: str, message: str, files: Files) -> Commit:
        history = repository.branches.setdefault(branch, [])
        identity = f"{len(history)} {branch} {message} {sorted(files)}".encode()
        commit = Commit(hashlib.sha1(identity + b"".join(files.values())).hexdigest(), message, files)
        history.append(commit)
        return commit

    def _whoami(self, path, body):
        return {"name": "me", "orgs": self.orgs, "auth": {"accessToken": {"role": self.role}}}

    def _create(self, path, body):
        keys = json.loads(body)
        name = f"{keys['organization'] or 'me'}/{keys['name']}"
        if name in self.repositories:
            raise Refusal(409, url=f"{self.endpoint}/{name}")
        self.add(name, private=keys.get("visibility") == "private")
        return {"url": f"{self.endpoint}/{name}"}

    def _yaml(self, path, body):
        return {"warnings": [], "errors": []}

    def _auth(self, path, body):
        self._repository(path)
        if not self.may_write:
            raise Refusal(403, message="you may not write here")
        return {}

    def _info(self, path, body):
        commit = self._at(path)
        siblings = [{"rfilename": name} for name in sorted(commit.files)]
        return {"id": path["repo"], "sha": commit.oid, "private": self._repository(path).private, "siblings": siblings}

    def _tree(self, path, body):
        return [describe_file(name, content) for name, content in self._at(path).files.items()]

    def _commits(self, path, body):
        self._at(path)
        fields = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "message": ""}
        history = self._repository(path).branches[path["rev"]]
        return [{"id": commit.oid, "title": commit.message} | fields for commit in reversed(history)]

    def _file(self, path, body):
        commit = self._at(path)
        if path["path"] not in commit.files:
            raise Refusal(404, "EntryNotFound")
        content = commit.files[path["path"]]
        return Download(content, {"X-Repo-Commit": commit.oid, "ETag": f'"{hash_blob(content)}"'})

    def _preupload(self, path, body):
        there = self._at(path).files
        answers = []
        for file in json.loads(body)["files"]:
            is_large = is_stored_large(file["path"], file["size"])
            content = there.get(file["path"])
            hash_content = hash_large if is_large else hash_blob
            oid = None if content is None else hash_content(content)
            mode = "lfs" if is_large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def _batch(self, path, body):
        return {"objects": [self._plan_upload(requested) for requested in json.loads(body)["objects"]]}

    def _plan_upload(self, requested: dict[str, Any]) -> dict[str, Any]:
        oid, size = requested["oid"], requested["size"]
        if oid in self.large:
            return requested
        href, header = f"{self.endpoint}/large/{oid}", {}
        if size > PART_BYTES:
            parts = range(1, -(-size // PART_BYTES) + 1)
            header = {"chunk_size": str(PART_BYTES)} | {str(part): f"{href}/{part}" for part in parts}
        actions = {"upload": {"href": href, "header": header}, "verify": {"href": f"{self.endpoint}/verify"}}
        return requested | {"actions": actions}

    def _upload(self, path, body):
        if path.get("part"):
            self._parts[path["oid"]][int(path["part"])] = body
        else:
            self._keep(path["oid"], body)
        return {}

    def _join(self, path, body):
        parts = self._parts[path["oid"]]
        self._keep(path["oid"], b"".join(parts[number] for number in sorted(parts)))
        return {}

    def _keep(self, oid: str, content: bytes) -> None:
        if hash_large(content) != oid:
            raise Refusal(422, message="these are other bytes")
        self.large[oid] = content

    def _verify(self, path, body):
        if json.loads(body)["oid"] not in self.large:
            raise Refusal(404)
        return {}

    def _commit_(self, path, body):
        repository, files = self._repository(path), dict(self._at(path).files)
        header, *lines = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, self._at(path).oid):
            raise Refusal(412, message="a commit has happened since")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.large:
                    raise Refusal(400, message="a large file was not uploaded")
                files[value["path"]] = self.large[value["oid"]]
            else:
                del files[value["path"]]
        commit = self._commit(repository, path["rev"], header["value"]["summary"], files)
        return {"commitOid": commit.oid, "commitUrl": f"{self.endpoint}/{path['repo']}/commit/{commit.oid}"}

    def _tag(self, path, body):
        tags, tag = self._repository(path).tags, json.loads(body)["tag"]
        if tag in tags:
            raise Refusal(409, message="this tag is there")
        tags[tag] = self._at(path).oid
        return {}

    def _untag(self, path, body):
        del self._repository(path).tags[path["rev"]]
        return {}

    def _branch(self, path, body):
        branches = self._repository(path).branches
        if path["rev"] in branches:
            raise Refusal(409)
        branches[path["rev"]] = list(branches["main"])
        return {}


def is_stored_large(name: str, size: int) -> bool:
    return size > 10_000 or name.endswith(".safetensors")


def describe_file(name: str, content: bytes) -> dict[str, Any]:
    file: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": hash_blob(content)}
    if is_stored_large(name, len(content)):
        file["lfs"] = {"oid": hash_large(content), "size": len(content), "pointerSize": 130}
    return file


def hash_large(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def hash_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Headers and body are two packets, of which the second would wait for 40 ms.
    hub: Hub

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._read_chunks())
        path, _, query = self.path.partition("?")
        matches = ((kind, re.fullmatch(pattern, path)) for method, kind, pattern in ROUTES if method == self.command)
        kind, match = next(((kind, match) for kind, match in matches if match), ("", None))
        if match is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
            return
        fault = self.hub.find_fault(kind)
        if fault is not None and (fault.status or fault.stalls or fault.cut == "before"):
            self._fail(fault)
            return
        try:
            answer = self.hub.answer("commit_" if kind == "commit" else kind, match.groupdict(), query, body)
        except Refusal as refusal:
            self._fail(refusal.answer)
            return
        if fault is not None:
            self._fail(fault)
            return
        if isinstance(answer, Download):
            self._send(200, answer.headers, answer.content)
        else:
            self._send(200, {"ETag": '"part"', "Content-Type": "application/json"}, json.dumps(answer).encode())

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do

    def _read_chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _fail(self, fault: Fault) -> None:
        if fault.stalls:
            self.hub.closing.wait()
        if fault.status:
            self._send(fault.status, fault.headers, fault.body)
            return
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *where: object) -> None:
        """Clients that close the connection are part of the tests."""


@contextmanager
def open_hub() -> Iterator[Hub]:
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
