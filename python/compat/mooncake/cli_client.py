"""``mooncake_client``: says to clients on this host which node is meant, and lends memory if it is told to.

Nodes lend memory themselves, so there is no service to run between a client and a node. This command stands where scripts
start one: it listens at ``--port`` and tells who asks (``setup_dummy``) the address of the master that it was given. With
``TIDEPOOL_LEND_SEGMENT=1`` it lends ``--global_segment_size`` bytes to that master's cluster, and its clients use it.
"""

import argparse
import signal
import socket
import socketserver
import sys
from typing import List, Optional

import tidepool

from . import _codes, _setup

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
    parser.add_argument("--global_segment_size", default="4 GB")
    parser.add_argument("--enable_offload", default="false")
    options, others = parser.parse_known_args(arguments)
    for other in others:
        print(f"mooncake_client: {other} has no meaning here", file=sys.stderr)
    master, lender = options.master_server_address, None
    segment, offloads = _codes.size(options.global_segment_size), _setup.is_true(options.enable_offload)
    settings = _setup.Settings(options.host, "", segment, 0, "tcp", "", master, enable_ssd_offload=offloads)
    # An instance hands over what it has before it goes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if _setup.lends_segment(settings):
            code, lender = _setup.connect(settings, lends=True)
            if not isinstance(lender, tidepool.EmbeddedStore):
                print(f"mooncake_client: no segment could be lent to {master}: {code}", file=sys.stderr)
                return 1
            master = lender.endpoint
        server = serve(options.host, options.port, master)
        print(f"clients at {options.host}:{server.server_address[1]} use {master}", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        if lender is not None:
            lender.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
