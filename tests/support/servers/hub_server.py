"""A Hugging Face Hub on loopback, with the part of its HTTP protocol that downloads use: revisions, trees,
files with ETag, X-Repo-Commit and Range. It counts what it sends, and fails in the Hub's ways."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

PATH = re.compile(
    r"/(?P<api>api/)?(?P<kind>models/|datasets/)?(?P<name>[^/]+/[^/]+)"
    r"/(?P<act>revision|tree|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?"
)
CHUNK = 1 << 14


@dataclass
class Stored:
    """A repository: commits by branch or tag, and files by commit."""

    revisions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    status: int = 200  # of every answer: 401, 403 (gated), 500
    token: str = ""  # that a reader needs


@dataclass
class Hub:
    endpoint: str = ""
    repositories: dict[str, Stored] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    tokens: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of bodies by file name
    silent: bool = False  # it accepts connections and never answers
    holds_after: int | None = None  # bytes of a file after which it sends nothing until `go_on`
    cuts_after: int | None = None  # bytes of a file after which it closes the connection, once
    held: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, name: str, files: Mapping[str, bytes] | Path, *, branch: str = "main") -> str:
        """Add a commit with these files, at the head of a branch. Data sets have names with datasets/."""
        if isinstance(files, Path):
            files = {str(p.relative_to(files)): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        digests = "".join(f"{file}{hashlib.sha1(content).hexdigest()}" for file, content in files.items())
        commit = hashlib.sha1(digests.encode()).hexdigest()
        stored = self.repositories.setdefault(name, Stored())
        stored.revisions[branch] = commit
        stored.files[commit] = dict(files)
        return commit

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something is true, which a request changes."""
        with self.changed:
            assert self.changed.wait_for(happened, timeout=60)

    def asked(self, file: str) -> list[str]:
        """The methods of the requests for a file."""
        return [method for method, path in self.requests if path.endswith(f"/{file}")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.changed:
            self.hub.requests.append((self.command, path))
            self.hub.changed.notify_all()
        if token := self.headers.get("Authorization", ""):
            self.hub.tokens.add(token)
        if self.hub.silent:
            self.hub.go_on.wait()
            return
        found = PATH.fullmatch(path)
        name = found and f"{'datasets/' if found['kind'] == 'datasets/' else ''}{found['name']}"
        stored = self.hub.repositories.get(name or "")
        if found is None or stored is None or (stored.token and token != f"Bearer {stored.token}"):
            return self.refuse(404, "RepoNotFound") if token else self.refuse(401, "")
        if stored.status != 200:
            return self.refuse(stored.status, "GatedRepo" if stored.status == 403 else "")
        commit = stored.revisions.get(found["revision"], found["revision"])
        if commit not in stored.files:
            return self.refuse(404, "RevisionNotFound")
        files = stored.files[commit]
        if found["act"] == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self.send(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
        if found["act"] == "tree":
            return self.send(json.dumps([self.entry(file, files[file]) for file in files]).encode())
        if found["file"] not in files:
            return self.refuse(404, "EntryNotFound")
        self.send(files[found["file"]], file=found["file"], commit=commit)

    def entry(self, file: str, content: bytes) -> dict[str, object]:
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": "refused"}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send(self, content: bytes, file: str = "", commit: str = "") -> None:
        start = 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if file:
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(start, len(content), CHUNK):
            if file and self.hub.holds_after is not None and at - start >= self.hub.holds_after:
                self.hub.held.set()
                self.hub.go_on.wait()
            if file and self.hub.cuts_after is not None and at - start >= self.hub.cuts_after:
                self.hub.cuts_after = None
                self.close_connection = True
                return
            part = content[at : at + CHUNK]
            self.wfile.write(part)
            self.wfile.flush()
            self.hub.sent[file] = self.hub.sent.get(file, 0) + len(part)


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve an empty Hub until the end."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def stop_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HUB_OFFLINE, for this process and those that it starts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
