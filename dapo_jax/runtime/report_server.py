"""A report over HTTP while runs train: read-only, and only of what a report shows.

GET /                       the page
GET /data.json?known=V      what it shows, or 204 where version V is still the newest
GET /run/I/eval/step_N.html a page of an evaluation of the run of that place
Everything else is refused. A browser sends the name by which it reached the server; names that are
not this machine's own are refused too, so that no foreign page can read it through a name of its
own (DNS rebinding).
"""

import dataclasses
import hashlib
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from dapo_jax import config
from dapo_jax.runtime import metrics, page

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
SECONDS = 30.0  # that a client may take over a request
REST = 4.0  # times what a reading took, until the next one


@dataclasses.dataclass(frozen=True)
class Source:
    """What is served: `stamp` changes when `payload` would; `files` are those beside it that may
    be read, address to a function that reads it."""

    stamp: Callable[[], Any]
    payload: Callable[[], dict[str, Any]]
    files: Callable[[], Mapping[str, Callable[[], bytes]]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Status, kind and content."""

    status: HTTPStatus
    kind: str = TEXT
    content: bytes = b""


class _Newest:
    """The newest payload and its version, made again when the stamp has changed; but a long run is
    read at most a fifth of the time."""

    def __init__(self, source: Source) -> None:
        self._source, self._lock = source, threading.Lock()
        self._stamp: Any = None
        self._payload: dict[str, Any] | None = None
        self._rest_until = 0.0

    def get(self) -> dict[str, Any]:
        with self._lock:
            begun, stamp = time.monotonic(), self._source.stamp()
            due = stamp != self._stamp and begun >= self._rest_until
            if self._payload is None or due:
                version = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
                self._payload = self._source.payload() | {"version": version}
                self._stamp, ended = stamp, time.monotonic()
                self._rest_until = ended + REST * (ended - begun)
            return self._payload


def answer(address: str, newest: Callable[[], dict[str, Any]], source: Source) -> Answer:
    """The answer to GET `address`; what cannot be read just now is 503, the rest 404."""
    parts = urllib.parse.urlsplit(address)
    try:
        if parts.path == "/":
            return Answer(HTTPStatus.OK, HTML, page.render(newest()).encode())
        if parts.path == "/data.json":
            found = newest()
            if urllib.parse.parse_qs(parts.query).get("known") == [found["version"]]:
                return Answer(HTTPStatus.NO_CONTENT)
            text = json.dumps(metrics.plain(found), allow_nan=False)
            return Answer(HTTPStatus.OK, JSON, text.encode())
        if read := source.files().get(parts.path):  # no path is made from the address
            return Answer(HTTPStatus.OK, HTML, read())
    except (config.ConfigError, OSError) as error:
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, content=f"{error}\n".encode())
    return Answer(HTTPStatus.NOT_FOUND, content=b"there is nothing here\n")


def named(host: str | None, names: Sequence[str]) -> bool:
    """Whether the Host of a request is one of the names, with a port or without."""
    plain = (host or "").rsplit(":", 1)[0] if not (host or "").endswith("]") else host
    return (plain or "").strip("[]").lower() in names


def opened(source: Source, *, host: str, port: int) -> http.server.ThreadingHTTPServer:
    """A server that listens; `serve_forever` serves. ConfigError where it cannot listen."""
    newest = _Newest(source).get
    names = (*LOOPBACK, host) if host not in ("0.0.0.0", "::") else ()

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = SECONDS
        server_version, sys_version = "dapo_jax", ""

        def do_GET(self) -> None:
            foreign = names and not named(self.headers.get("Host"), names)
            self._send(Answer(HTTPStatus.FORBIDDEN, content=b"called by a foreign name\n")
                       if foreign else answer(self.path, newest, source))

        do_HEAD = do_GET

        def _send(self, made: Answer) -> None:
            self.send_response(made.status)
            for name, value in (("Content-Type", made.kind), ("Cache-Control", "no-store"),
                                ("Content-Length", str(len(made.content))),
                                ("X-Content-Type-Options", "nosniff"),
                                ("Referrer-Policy", "no-referrer")):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(made.content)

        def log_message(self, *args: Any) -> None:
            """Requests are not printed: the page asks every few seconds."""

    try:
        server = http.server.ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise config.ConfigError(f"--port={port}: {host}:{port} cannot be listened on: {error}"
                                 ) from error
    server.daemon_threads = True
    return server
