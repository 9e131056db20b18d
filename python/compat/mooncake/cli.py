"""``mooncake_master``: a Tidepool node with the flags that people give to a master.

The node lends memory and disk itself, so that clients need not: ``--dram`` and ``--nvme`` say how much (Tidepool's own
flags). At ``--metrics_port`` a small HTTP server answers what clients ask a master: ``/get_all_segments``, ``/health``,
``/role``, ``/get_all_keys``, ``/metrics``. Flags of the master that have no meaning here are accepted and named.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import List, Optional, Tuple
from urllib.parse import urlsplit

from . import http_metadata_server

DEFAULT_RPC_PORT = 50051
DEFAULT_METRICS_PORT = 9003


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mooncake_master", description=__doc__, allow_abbrev=False)
    parser.add_argument("--rpc_port", "--port", type=int, default=0)
    parser.add_argument("--rpc_address", default="127.0.0.1")
    parser.add_argument("--metrics_port", type=int, default=DEFAULT_METRICS_PORT)
    parser.add_argument("--metrics_host", default="127.0.0.1")
    parser.add_argument("--enable_http_metadata_server", nargs="?", const="true", default="false")
    parser.add_argument("--http_metadata_server_port", type=int, default=8080)
    parser.add_argument("--http_metadata_server_host", default="127.0.0.1")
    parser.add_argument("--data", help="Tidepool's data folder")
    parser.add_argument("--dram", help="memory that the node lends, such as 4GiB")
    parser.add_argument("--nvme", help="disk that the node lends, such as 100GiB; 0: none")
    parser.add_argument("--config", help="Tidepool's own settings (TOML)")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING", help="one of Tidepool's settings")
    return parser


def _normalised(arguments: List[str]) -> List[str]:
    """Flags with one dash are taken, as the master's are."""
    known = [f"-{argument}" if argument.startswith("-") and not argument.startswith("--") else argument for argument in arguments]
    return ["--help" if argument in ("--h",) else argument for argument in known]


def program() -> str:
    """The node's program: ``$MOONCAKE_MASTER_PROGRAM``, or ``tidepool`` on the path."""
    found = os.environ.get("MOONCAKE_MASTER_PROGRAM") or shutil.which("tidepool")
    if not found:
        raise SystemExit("mooncake_master: there is no program tidepool on the path; set MOONCAKE_MASTER_PROGRAM to it")
    return found


def command(options: argparse.Namespace) -> List[str]:
    """How the node is started."""
    host = options.rpc_address
    made = [program(), "serve", "--json"]
    settings = [f'grpc.listen={host}:{options.rpc_port or DEFAULT_RPC_PORT}', "admin.listen=127.0.0.1:0", *options.set]
    for flag in ("config", "data", "dram", "nvme"):
        if getattr(options, flag):
            made += [f"--{flag}", getattr(options, flag)]
    for setting in settings:
        made += ["--set", setting]
    return made


class _Admin:
    """What the small HTTP server answers, from the node's own."""

    def __init__(self, grpc: str, admin: str) -> None:
        self.grpc, self.admin = grpc, admin

    def answer(self, path: str) -> Tuple[int, str, bytes]:
        """Status, type and body."""
        if path == "/get_all_segments":
            return self._relay("/v1/info", lambda info: (json.loads(info).get("node", self.grpc) + "\n").encode())
        if path == "/health":
            return self._relay("/healthz", lambda _: json.dumps({"status": "OK", "role": "leader", "service_ready": True}).encode())
        if path == "/role":
            return 200, "text/plain", b"leader"
        if path == "/metrics":
            return self._relay("/metrics", lambda body: body)
        if path == "/get_all_keys":
            return self._keys()
        return 404, "text/plain", b"not found"

    def _relay(self, path: str, change) -> Tuple[int, str, bytes]:
        try:
            with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=5) as answer:
                return 200, "text/plain", change(answer.read())
        except (OSError, ValueError) as error:
            return 503, "text/plain", str(error).encode()

    def _keys(self) -> Tuple[int, str, bytes]:
        import tidepool

        try:
            with tidepool.Store.connect(self.grpc) as store:
                return 200, "text/plain", b"".join(found.key + b"\n" for found in store.list())
        except tidepool.TidepoolError as error:
            return 503, "text/plain", str(error).encode()


def serve_admin(host: str, port: int, grpc: str, admin: str) -> ThreadingHTTPServer:
    """Starts the small HTTP server in a thread of its own; port 0 picks one."""
    answers = _Admin(grpc, admin)

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            status, kind, body = answers.answer(urlsplit(self.path).path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="mooncake-admin", daemon=True).start()
    return server


def main(arguments: Optional[List[str]] = None) -> int:
    """The command."""
    options, others = _parser().parse_known_args(_normalised(sys.argv[1:] if arguments is None else arguments))
    for other in others:
        print(f"mooncake_master: {other} has no meaning here", file=sys.stderr)
    node = subprocess.Popen(command(options), stdout=subprocess.PIPE, text=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.terminate())
    line = node.stdout.readline()
    if not line:
        return node.wait()
    addresses = json.loads(line)
    admin = serve_admin(options.metrics_host, options.metrics_port, addresses["grpc"], addresses["admin"])
    said = {"master": addresses["grpc"], "admin": f"{options.metrics_host}:{admin.server_address[1]}"}
    if options.enable_http_metadata_server.lower() in ("true", "1", "yes"):
        metadata = http_metadata_server.serve(options.http_metadata_server_host, options.http_metadata_server_port)
        said["metadata"] = f"http://{options.http_metadata_server_host}:{metadata.server_address[1]}/metadata"
    print(json.dumps(said), flush=True)
    return node.wait()


if __name__ == "__main__":
    raise SystemExit(main())
