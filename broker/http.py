"""The broker's HTTP server: /metrics, /healthz, /readyz. Read-only, in threads of its own.

``/healthz`` answers 200 while the loop turns and 503 when it has stood still for STALLED_S: restart the
broker. ``/readyz`` answers 200 when each model has a worker that serves it, 503 with what is missing
otherwise.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headrace.broker.port_owner import describe_listener
from headrace.errors import ConfigError

#: A loop that has not turned for this long is stalled. It turns once a second when idle; its longest honest
#: turn is a few hundred milliseconds.
STALLED_S = 5.0

#: A client that neither sends its request nor reads its answer is dropped after this.
CLIENT_TIMEOUT_S = 5.0

#: Requests served at once; more are turned away, so that threads are bounded.
MAX_CLIENTS = 16

#: (status, content type, body)
Answer = tuple[int, str, bytes]

PLAIN = "text/plain; charset=utf-8"


class HttpServer:
    """Bound when made; answers from ``serve`` on, until closed."""

    def __init__(self, host: str, port: int) -> None:
        """Bind. Raises ConfigError naming host and port when that is not possible."""
        try:
            self._server = _Server(("::" if host == "*" else host, port))
        except OSError as error:
            owner = f" by {found}" if (found := describe_listener(port)) else ""
            taken = (
                f"port {port} is taken{owner}; choose another"
                if error.errno == errno.EADDRINUSE
                else error.strerror
            )
            raise ConfigError(f"broker.http_port = {port}: can't be bound on {host}: {taken}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def serve(self, pages: dict[str, Callable[[], Answer]]) -> None:
        """Begin to answer: ``pages`` maps a path to the function that makes its answer."""
        self._server.pages = pages
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port. Safe before serve()."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLIENT_TIMEOUT_S)
        self._server.server_close()


def health(last_turn_ns: int) -> Answer:
    """Answer /healthz."""
    still_s = (time.monotonic_ns() - last_turn_ns) / 1e9
    if still_s > STALLED_S:
        return 503, PLAIN, f"the loop has stood still for {still_s:.1f} s\n".encode()
    return 200, PLAIN, b"ok\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int]) -> None:
        self.pages: dict[str, Callable[[], Answer]] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's: it looks its own name up in the DNS, which can take seconds.
        socket_address = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: object, client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that hangs up is no event of ours, and stderr is for logs."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version = "headrace"
    sys_version = ""

    def do_GET(self) -> None:
        pages = self.server.pages
        page = pages.get(self.path.partition("?")[0])
        if page is None:
            known = ", ".join(pages)
            self._answer(404, PLAIN, f"not here; there are {known}\n".encode())
        else:
            self._answer(*page())

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's own signature
        """Log nothing: a scrape is no event."""

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
