"""What `mooncake.engine` has beside the engine: messages between processes, and memory that they share."""

import asyncio
import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading

import numpy
import pytest

from mooncake import _rpc
from mooncake.engine import CoroRPCInterface, RpcInterface, SharedSegment, create_rpc_client, create_rpc_server


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = RpcInterface()
    server.data, server.tensors = [], []
    assert server.initialize_server(address, 2)
    server.set_data_receive_callback(server.data.append)
    server.set_tensor_receive_callback(server.tensors.append)
    assert server.start_server_async()
    server.address = address
    yield server
    server.stop_server()


@pytest.fixture
def client():
    client = create_rpc_client()
    yield client
    client.stop_server()


def test_bytes_and_tensors_arrive(server, client):
    for data in (b"", b"few", os.urandom(3 << 20), bytearray(b"more"), numpy.arange(5)):
        assert client.send_data(server.address, data) == 0
        assert server.data[-1]["data"] == bytes(data) and server.data[-1]["source"].startswith("127.0.0.1:")
    for tensor in (numpy.arange(60, dtype="int16").reshape(3, 4, 5), numpy.zeros((0, 3), "float32"), numpy.float64(1.5)):
        tensor = numpy.asarray(tensor)
        assert client.send_tensor(server.address, tensor) == 0
        came = server.tensors[-1]
        assert (came.shape, came.dtype) == (list(tensor.shape), str(tensor.dtype))
        assert came.total_bytes == came.get_data_size() == tensor.nbytes
        assert came.get_data_as_bytes() == tensor.tobytes() == bytes(came.get_memory_view())
    assert len(server.data) == 5 and len(server.tensors) == 3 and CoroRPCInterface is RpcInterface


def test_messages_are_awaited(server, client):
    async def send():
        loop = asyncio.get_running_loop()
        sent = [client.send_data_async(server.address, bytes([number]), loop) for number in range(10)]
        sent.append(client.send_tensor_async(server.address, numpy.ones(3), loop))
        assert await asyncio.gather(*sent) == [0] * 11
        with pytest.raises(RuntimeError):
            await client.send_data_async("127.0.0.1:1", b"nobody", loop)

    asyncio.run(send())
    assert sorted(came["data"][0] for came in server.data) == list(range(10))


def test_what_can_not_be_sent_is_minus_one(server, client, monkeypatch):
    for target in ("", "nonsense", "127.0.0.1:99999", "127.0.0.1:1", "::"):
        assert client.send_data(target, b"x") == -1
    for wrong in (None, object(), [1, 2]):
        assert client.send_tensor(server.address, wrong) == -1
        with pytest.raises(TypeError):
            client.send_data(server.address, wrong)
    with pytest.raises(TypeError):
        client.send_data(server.address, "text")
    monkeypatch.setattr(_rpc, "LONGEST", 1000)
    assert client.send_data(server.address, bytes(1001)) == -1
    assert RpcInterface().send_data(server.address, b"x") == -1, "before it was initialized"
    assert client.send_data(server.address, b"x") == 0


def ends(connection):
    """Whether the other side says nothing more. It may have ended before this one has."""
    try:
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1) == b""
    except OSError:
        return True


def test_a_server_bears_what_comes(server, client):
    def fails(_):
        raise ValueError("a fault of the program's own")

    host, port = server.address.split(":")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<BQ", 9, 5), struct.pack("<BQ", 1, 1 << 60), b"\1"):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(nonsense)
            assert ends(connection)
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(struct.pack("<BQ", 2, 5) + b"wrong")
        assert connection.recv(1) == b"\1", "and nobody is told of it"
    server.set_data_receive_callback(fails)
    assert client.send_data(server.address, b"x") == 0
    assert not server.data and not server.tensors


def test_servers_start_and_stop(server, client):
    assert not server.start_server_async(), "it has"
    assert not server.initialize("127.0.0.1:0")
    assert client.send_data(server.address, b"x") == 0
    server.stop_server()
    server.stop_server()
    assert client.send_data(server.address, b"x") == -1
    waits = threading.Thread(target=server.start_server)
    waits.start()
    while client.send_data(server.address, b"again") != 0:
        assert waits.is_alive()
    server.stop_server()
    waits.join(30)
    assert not waits.is_alive() and server.data[-1]["data"] == b"again"
    for address in ("", "nonsense", "127.0.0.1:-1", "127.0.0.1:99999"):
        other = RpcInterface()
        assert other.initialize(address) and not other.start_server() and not other.start_server_async()
    assert not RpcInterface().start_server() and not RpcInterface().initialize("", -1)
    assert isinstance(create_rpc_server(), RpcInterface)


def test_a_program_ends_while_it_listens(server):
    listens = f"""
from mooncake.engine import RpcInterface
server = RpcInterface()
server.initialize("127.0.0.1:0")
assert server.start_server_async()
sender = RpcInterface()
sender.initialize()
assert sender.send_data("{server.address}", b"x") == 0
"""
    subprocess.run([sys.executable, "-c", listens], check=True, timeout=60)


def at(segment, length):
    return (ctypes.c_char * length).from_address(segment.base_addr())


def test_a_segment_is_shared():
    world = [SharedSegment.create("kv", 5 << 20, 3, rank, owner_rank=1) for rank in range(3)]
    blobs = [blob for _, blob in world]
    segments = [segment for segment, _ in world]
    assert [segment.ready() for segment in segments] == [False] * 3 and segments[0].base_addr() == 0
    for segment in segments:
        segment.complete(blobs)
        assert segment.ready() and segment.size() == 6 << 20 and segment.device_addr() == 0
    assert len({segment.base_addr() for segment in segments}) == 3
    at(segments[0], 5)[:] = b"hello"
    assert at(segments[1], 5).raw == at(segments[2], 5).raw == b"hello"
    taken = """
import ctypes, sys
from mooncake.engine import SharedSegment
segment, blob = SharedSegment.create("kv", 5 << 20, 3, 2, 1)
segment.complete([bytes.fromhex(text) for text in sys.argv[1:]])
memory = (ctypes.c_char * 5).from_address(segment.base_addr())
assert memory.raw == b"hello"
memory[:] = b"there"
"""
    subprocess.run([sys.executable, "-c", taken, *(blob.hex() for blob in blobs)], check=True, timeout=60)
    assert at(segments[1], 5).raw == b"there"
    del world, segments[1]
    assert at(segments[0], 5).raw == b"there", "whoever has mapped it keeps it"


def test_segments_that_do_not_fit_together_are_refused():
    assert SharedSegment.supported() and not SharedSegment.supported(False) and not SharedSegment.supported(True, True)
    for size, world, rank, owner in ((0, 1, 0, 0), (-1, 1, 0, 0), (1 << 47, 1, 0, 0), (5, 0, 0, 0), (5, 2, 2, 0), (5, 2, 0, 2)):
        with pytest.raises(RuntimeError):
            SharedSegment.create("s", size, world, rank, owner)
    with pytest.raises(RuntimeError):
        SharedSegment.create("s", 5, 1, 0, mmap=False)
    with pytest.raises(RuntimeError, match="no memory"):
        SharedSegment.create("s", 1 << 45, 1, 0)
    (owner, first), (_, second) = (SharedSegment.create("s", 5, 2, rank) for rank in range(2))
    _, other = SharedSegment.create("t", 5, 2, 1)
    for blobs in ([], [first], [second, first], [first, other], [first, b"nonsense"], [first, ""]):
        with pytest.raises(RuntimeError):
            owner.complete(blobs)
    owner.complete([first, second])
    with pytest.raises(RuntimeError, match="already"):
        owner.complete([first, second])
    late, third = SharedSegment.create("s", 5, 2, 1)
    del owner
    with pytest.raises(RuntimeError, match="opened"):
        late.complete([first, third])
