"""A way to a service on which the first requests meet faults, in the order given."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import httpx

#: The service says that it will be back: at once, at a date, in hours; it does not say so; a proxy finds nobody behind
#: it. Or it does what it was asked, and its answer is lost, or cut in half.
Fault = Literal["away", "later", "hours", "broken", "gateway", "lost", "cut"]

_PROBLEM = b'{"type": "urn:x", "title": "The database does not answer", "status": 503, "detail": "d"}'
_REFUSALS: Mapping[Fault | None, tuple[int, Mapping[str, str], bytes]] = {
    "away": (503, {"Retry-After": "0"}, _PROBLEM),
    "later": (503, {"Retry-After": "Mon, 30 Nov 2026 10:00:00 GMT"}, _PROBLEM),
    "hours": (503, {"Retry-After": "7200"}, _PROBLEM),
    "broken": (503, {}, _PROBLEM),
    "gateway": (502, {}, b"<h1>Bad gateway</h1>"),
}


class UnsteadyService:
    """Listens on a port of its own from the beginning or from `start`; before that connections are refused.

    Attributes:
        url: where.
        faults: what the next requests meet; those after them reach the service.
        seen: method and path of every request that came.
    """

    def __init__(self, service: str, faults: Sequence[Fault] = (), *, started: bool = True) -> None:
        self.faults: list[Fault] = list(faults)
        self.seen: list[str] = []
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), _handler(service, self), bind_and_activate=False
        )
        self._server.daemon_threads = True
        self._server.server_bind()
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        if started:
            self.start()

    def start(self) -> None:
        """Accepts connections; once is enough."""
        if not self._thread.is_alive():
            self._server.server_activate()
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _handler(service: str, unsteady: UnsteadyService) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            unsteady.seen.append(f"{self.command} {self.path}")
            fault = unsteady.faults.pop(0) if unsteady.faults else None
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fault in _REFUSALS:
                self._answer(*_REFUSALS[fault])
                return
            headers = {name: text for name, text in self.headers.items() if name not in ("Host", "Content-Length")}
            answer = httpx.request(
                self.command, service + self.path, content=body, headers=headers, timeout=60, trust_env=False
            )
            kept = {name: answer.headers[name] for name in ("Content-Type", "Link") if name in answer.headers}
            if fault != "lost":
                self._answer(answer.status_code, kept, answer.content, cut=fault == "cut")
            self.close_connection = True

        do_POST = do_GET

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    return Handler
