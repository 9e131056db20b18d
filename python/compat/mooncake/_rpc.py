"""``RpcInterface``: bytes and tensors sent to another process, which a function of it is called with.

A message is one byte (1 bytes, 2 a tensor), its length (8 bytes, little-endian), then the bytes; a tensor is as it is stored, header first.
The answer is one byte, when the function has returned. Whoever reaches the server may send.
"""

import asyncio
import logging
import socket
import struct
import threading
from typing import Any, Callable, Dict, List, Optional

import tidepool
from tidepool import tensors

log = logging.getLogger("mooncake.engine")

_HEAD = struct.Struct("<BQ")
_BYTES, _TENSOR = 1, 2
_DONE = b"\1"
# Of a message; a longer one ends its connection.
LONGEST = 4 << 30
# Connections that a server has at a time, each a thread; others wait to be accepted.
CONNECTIONS = 256


class ReceivedData:
    """Bytes, and who sent them."""

    def __init__(self, source_address: str = "", data: bytes = b"") -> None:
        self.source_address, self._data = source_address, data

    @property
    def data_size(self) -> int:
        """Of the bytes."""
        return len(self._data)

    def get_bytes(self) -> bytes:
        """The bytes."""
        return bytes(self._data)

    def get_memory_view(self) -> memoryview:
        """The bytes, without a copy."""
        return memoryview(self._data)


class ReceivedTensor:
    """A tensor, and who sent it."""

    def __init__(self, source_address: str = "", data: Any = b"", shape: Any = (), dtype: str = "") -> None:
        self.source_address, self._data = source_address, data
        self.shape: List[int] = list(shape)
        self.dtype = dtype

    @property
    def total_bytes(self) -> int:
        """Of its elements."""
        return len(self._data)

    def get_data_as_bytes(self) -> bytes:
        """Its elements, in C order."""
        return bytes(self._data)

    def get_data_size(self) -> int:
        """Bytes of its elements."""
        return len(self._data)

    def get_memory_view(self) -> memoryview:
        """Its elements, without a copy."""
        return memoryview(self._data)


class RpcInterface:
    """Sends bytes and tensors, and takes those of others. Codes are 0, and -1 for whatever failed."""

    def __init__(self) -> None:
        self._listen_address: Optional[str] = None
        self._timeout, self._pool_size = 30.0, 100
        self._lock = threading.Lock()
        self._idle: Dict[str, List[socket.socket]] = {}
        self._server: Optional[socket.socket] = None
        self._ended = threading.Event()
        self._on_data: Optional[Callable[[dict], Any]] = None
        self._on_tensor: Optional[Callable[[ReceivedTensor], Any]] = None

    def initialize(
        self, listen_address: str = "", thread_count: int = 0, timeout_seconds: int = 30, pool_size: int = 100
    ) -> bool:
        """Says what it is to be; ``HOST:PORT`` to listen at, if others are to send here. ``pool_size`` connections to a server are kept; ``thread_count`` is
        not used: each of at most 256 senders has a thread."""
        if min(thread_count, timeout_seconds, pool_size) < 0 or self._server is not None:
            return False
        self._timeout, self._pool_size = float(timeout_seconds or 30), pool_size
        self._listen_address = listen_address
        return True

    def initialize_client(self, pool_size: int = 100, timeout_seconds: int = 30) -> bool:
        """To send only."""
        return self.initialize("", 0, timeout_seconds, pool_size)

    def initialize_server(self, listen_address: str, thread_count: int = 8, timeout_seconds: int = 30) -> bool:
        """To listen at ``HOST:PORT``."""
        return self.initialize(listen_address, thread_count, timeout_seconds, 4)

    def start_server(self) -> bool:
        """Listens, and returns when ``stop_server`` was called; False if it can't."""
        if not self.start_server_async():
            return False
        self._ended.wait()
        return True

    def start_server_async(self) -> bool:
        """Listens, and returns at once; False if it can't."""
        host, _, port = (self._listen_address or "").rpartition(":")
        with self._lock:
            if self._server is not None or not host:
                return False
            try:
                server = socket.create_server((host.strip("[]"), int(port)), family=_family(host), backlog=128)
            except (OSError, ValueError, OverflowError) as error:
                log.error("can't listen at %s: %s", self._listen_address, error)
                return False
            self._server = server
            self._ended.clear()
        threading.Thread(target=self._accept, args=(server, self._ended), name="mooncake-rpc", daemon=True).start()
        return True

    def stop_server(self) -> None:
        """Ends listening, and what senders are in the middle of."""
        with self._lock:
            server, self._server = self._server, None
            idle, self._idle = self._idle, {}
        for connection in (connection for kept in idle.values() for connection in kept):
            connection.close()
        if server is not None:
            # Closing alone does not wake who accepts.
            server.shutdown(socket.SHUT_RDWR)
            server.close()

    def send_data(self, target_address: str, data: Any) -> int:
        """Sends bytes to ``HOST:PORT``; 0 once the function there has returned."""
        if isinstance(data, str):
            raise TypeError("data is bytes-like, not str")
        return self._send(target_address, _BYTES, [memoryview(data).cast("B")])

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Sends a tensor of torch or numpy."""
        try:
            header, elements = tensors.encode(tensor)
        except (tidepool.TidepoolError, TypeError, AttributeError) as error:
            log.error("no tensor that can be sent: %s", error)
            return -1
        return self._send(target_address, _TENSOR, [header, memoryview(elements).cast("B")])

    def send_data_async(self, target_address: str, data: Any, loop: asyncio.AbstractEventLoop) -> Any:
        """As ``send_data``, awaited in ``loop``; raises RuntimeError where that gives -1."""
        return loop.run_in_executor(None, _raising, self.send_data, target_address, data)

    def send_tensor_async(self, target_address: str, tensor: Any, loop: asyncio.AbstractEventLoop) -> Any:
        """As ``send_tensor``, awaited in ``loop``; raises RuntimeError where that gives -1."""
        return loop.run_in_executor(None, _raising, self.send_tensor, target_address, tensor)

    def set_data_receive_callback(self, callback: Callable[[dict], Any]) -> None:
        """Called with ``{"source": .., "data": ..}`` for bytes that come."""
        self._on_data = callback

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], Any]) -> None:
        """Called with a :class:`ReceivedTensor` for each that comes."""
        self._on_tensor = callback

    def _send(self, target: str, kind: int, parts: List[Any]) -> int:
        if self._listen_address is None:
            return -1
        length = sum(len(part) for part in parts)
        connection = None
        try:
            if length > LONGEST:
                raise ValueError(f"{length} bytes are more than {LONGEST}")
            connection = self._connection(target)
            connection.sendall(_HEAD.pack(kind, length))
            for part in parts:
                connection.sendall(part)
            if connection.recv(1) != _DONE:
                raise ConnectionError("the server ended the connection")
        except (OSError, ValueError, OverflowError) as error:
            log.error("nothing was sent to %s: %s", target, error)
            if connection is not None:
                connection.close()
            return -1
        with self._lock:
            kept = self._idle.setdefault(target, [])
            if len(kept) < self._pool_size:
                kept.append(connection)
                return 0
        connection.close()
        return 0

    def _connection(self, target: str) -> socket.socket:
        while True:
            with self._lock:
                kept = self._idle.get(target)
                connection = kept.pop() if kept else None
            if connection is None:
                host, _, port = target.rpartition(":")
                return socket.create_connection((host.strip("[]"), int(port)), self._timeout)
            # A server that has ended meanwhile has ended it too.
            connection.setblocking(False)
            try:
                connection.recv(1)
            except BlockingIOError:
                connection.settimeout(self._timeout)
                return connection
            except OSError:
                pass
            connection.close()

    def _accept(self, server: socket.socket, ended: threading.Event) -> None:
        heard: set = set()
        room = threading.Semaphore(CONNECTIONS)
        while True:
            room.acquire()
            try:
                connection, source = server.accept()
            except OSError:
                break
            heard.add(connection)

            def hear(connection: socket.socket = connection, source: str = f"{source[0]}:{source[1]}") -> None:
                self._hear(connection, source)
                heard.discard(connection)
                room.release()

            # Daemons: a program ends without asking whether somebody may send yet.
            threading.Thread(target=hear, name="mooncake-rpc", daemon=True).start()
        for connection in list(heard):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        ended.set()

    def _hear(self, connection: socket.socket, source: str) -> None:
        with connection:
            try:
                while True:
                    head = _receive(connection, _HEAD.size)
                    if not head:
                        return
                    kind, length = _HEAD.unpack(head)
                    if kind not in (_BYTES, _TENSOR) or length > LONGEST:
                        raise ValueError("what came is no message")
                    # A sender that has begun goes on, or is not well.
                    connection.settimeout(self._timeout)
                    message = _receive(connection, length)
                    self._call(kind, source, message)
                    connection.sendall(_DONE)
                    connection.settimeout(None)
            except (OSError, ValueError, MemoryError) as error:
                log.debug("the connection of %s ends: %s", source, error)

    def _call(self, kind: int, source: str, message: bytearray) -> None:
        try:
            if kind == _BYTES:
                if self._on_data is not None:
                    self._on_data({"source": source, "data": bytes(message)})
            elif self._on_tensor is not None:
                header = tensors.unpack(message)
                elements = memoryview(message)[tensors.HEADER_BYTES :]
                self._on_tensor(ReceivedTensor(source, elements, header.shape, header.type_name))
        except Exception:
            log.exception("the function for what %s sent failed", source)


def _raising(send: Callable[[str, Any], int], target: str, what: Any) -> int:
    if send(target, what) != 0:
        raise RuntimeError(f"nothing was sent to {target}")
    return 0


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _receive(connection: socket.socket, length: int) -> bytearray:
    """All of them; none if the connection ends before the first. Memory grows as they come."""
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            if received:
                raise ConnectionError("it ended in the middle of a message")
            break
        received += part
    return received


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """One that sends only."""
    client = RpcInterface()
    client.initialize_client(10)
    return client


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """One that listens at 127.0.0.1:8080 once it is started."""
    server = RpcInterface()
    server.initialize("127.0.0.1:8080", 0, 30, 10)
    return server
