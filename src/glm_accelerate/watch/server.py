"""The page over HTTP, for the person on this machine who has its address: loopback alone, a token of its own,
no names but its own in Host and Origin, and no file but those that are named here.
"""

import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from glm_accelerate.watch.metrics import CONTENT, Metrics
from glm_accelerate.watch.run import WatchedRun

LOOPBACK = "127.0.0.1"
FILES = {  # by the path that the page asks for
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/uplot.js": ("uplot.js", "text/javascript"),
    "/uplot.css": ("uplot.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def asset(name: str) -> str:
    """A file of the page."""
    return (resources.files("glm_accelerate.watch") / "page" / name).read_text(encoding="utf-8")


def new_token() -> str:
    """192 bits, in letters that an address takes."""
    return secrets.token_urlsafe(24)


class PageServer(ThreadingHTTPServer):
    """Serves the runs until it is closed. `address` is what to open."""

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun], port: int = 0, token: str = "") -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.runs, self.metrics, self.token = list(runs), Metrics(runs), token or new_token()
        self.port = int(self.server_address[1])
        self.cookie = f"glm-watch-{self.port}"  # cookies know no ports
        self.names = {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "glm-accelerate", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = parse_qs(url.query)
        if refusal := self._refusal():
            self._send(HTTPStatus.FORBIDDEN, refusal)
        elif url.path == "/" and self._is_token(asked.get("token", [""])[0]):
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, "", headers={"Location": "/", "Set-Cookie": cookie})
        elif url.path == "/metrics" and self._is_token(self._bearer() or asked.get("token", [""])[0]):
            self._send(HTTPStatus.OK, self.server.metrics.text(), CONTENT)
        elif not self._is_token(self._cookie()):
            self._send(HTTPStatus.FORBIDDEN, "open the address that `glm-accelerate watch` printed")
        elif url.path in FILES:
            name, kind = FILES[url.path]
            self._send(HTTPStatus.OK, asset(name), kind)
        else:
            self._answer(url.path, asked)

    def _answer(self, path: str, asked: Mapping[str, list[str]]) -> None:
        """What the page wants to know."""
        try:
            number, start, step = (int(asked.get(name, ["0"])[0]) for name in ("run", "from", "step"))
            if path == "/runs":
                found: Any = [run.about() for run in self.server.runs]
            elif number < 0 or start < 0 or step < 0:
                raise ValueError
            elif path == "/events":
                run = self.server.runs[number]
                found = {**run.events(start), "nodes": run.nodes()}
            elif path == "/answers":
                found = self.server.runs[number].answers(step)
            else:
                raise ValueError
        except (ValueError, IndexError):
            self._send(HTTPStatus.NOT_FOUND, "there is no such thing")
            return
        self._send(HTTPStatus.OK, json.dumps(found, ensure_ascii=False), "application/json")

    def _refusal(self) -> str:
        """Why it is not for us: a foreign site can send a browser here, under a name of its own."""
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in self.server.names:
            return "this page has another name"
        if origin is not None and origin.removeprefix("http://") not in self.server.names:
            return "this page is asked by itself alone"
        return ""

    def _bearer(self) -> str:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    def _cookie(self) -> str:
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _send(
        self,
        status: HTTPStatus,
        text: str,
        kind: str = "text/plain",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address, and requests hold a token."""
