"""``mooncake_client``: says to clients on this host which node is meant.

Nodes lend memory themselves, so there is no service to run between a client and a node. This command stands where scripts
start one: it listens at ``--port`` and tells who asks (``setup_dummy``) the address of the master that it was given.
"""

import argparse
import socket
import socketserver
import sys
from typing import List, Optional

DEFAULT_PORT = 50052
_GREETING = b"tidepool master "


def master_of(server_address: str) -> Optional[str]:
    """The master that the ``mooncake_client`` there was given; None if there is none."""
    host, separator, port = server_address.rpartition(":")
    if not separator or not port.isdigit():
        return None
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), timeout=2) as connection:
            connection.settimeout(2)
            line = connection.makefile("rb").readline(1024)
    except OSError:
        return None
    return line[len(_GREETING) :].strip().decode() if line.startswith(_GREETING) else None


def serve(host: str, port: int, master: str) -> socketserver.ThreadingTCPServer:
    """A server that tells the master's address; port 0 picks one."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(5)
            self.request.sendall(_GREETING + master.encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    return Server((host, port), Handler)


def main(arguments: Optional[List[str]] = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="mooncake_client", description=__doc__, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--master_server_address", default="127.0.0.1:50051")
    options, others = parser.parse_known_args(arguments)
    for other in others:
        print(f"mooncake_client: {other} has no meaning here", file=sys.stderr)
    server = serve(options.host, options.port, options.master_server_address)
    print(f"clients at {options.host}:{server.server_address[1]} use {options.master_server_address}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
