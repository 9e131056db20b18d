"""``mooncake_http_metadata_server``: keys and values in memory, by HTTP: ``GET``, ``PUT``, ``DELETE /metadata?key=``."""

import argparse
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Dict, List, Optional
from urllib.parse import parse_qs, urlsplit

# More are refused, and so are longer values.
KEYS = 100_000
VALUE_BYTES = 1 << 20


class Metadata:
    """What the server knows."""

    def __init__(self) -> None:
        self._values: Dict[str, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, key: str, value: bytes) -> "tuple[int, bytes]":
        """Status and body."""
        with self._lock:
            if method == "GET":
                found = self._values.get(key)
                return (404, b"metadata not found") if found is None else (200, found)
            if method == "DELETE":
                return (404, b"metadata not found") if self._values.pop(key, None) is None else (200, b"metadata deleted")
            if "rpc_meta" in key and key in self._values:
                return 400, b"Duplicate rpc_meta key not allowed"
            if len(self._values) >= KEYS and key not in self._values:
                return 507, b"too many keys"
            self._values[key] = value
            return 200, b"metadata updated"


def make_handler(metadata: Metadata, path: str = "/metadata") -> type:
    """A class that answers requests from `metadata`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def _answer(self) -> None:
            address = urlsplit(self.path)
            key = parse_qs(address.query).get("key", [""])[0]
            length = int(self.headers.get("Content-Length") or 0)
            if length > VALUE_BYTES:
                self.close_connection = True
                return self._reply(413, b"value too long")
            value = self.rfile.read(length)
            if address.path != path:
                return self._reply(404, b"not found")
            if not key:
                return self._reply(400, b"key is missing")
            return self._reply(*metadata.answer(self.command, key, value))

        do_GET = do_PUT = do_DELETE = _answer

        def do_POST(self) -> None:
            self.close_connection = True
            self._reply(405, b"method not allowed")

        do_PATCH = do_POST

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if status == 200 else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


def serve(host: str, port: int) -> ThreadingHTTPServer:
    """A server in a thread of its own; port 0 picks one."""
    server = ThreadingHTTPServer((host, port), make_handler(Metadata()))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="mooncake-metadata", daemon=True).start()
    return server


def main(arguments: Optional[List[str]] = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="mooncake_http_metadata_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args(arguments)
    server = ThreadingHTTPServer((options.host, options.port), make_handler(Metadata()))
    server.daemon_threads = True
    print(f"metadata at http://{options.host}:{server.server_address[1]}/metadata", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
